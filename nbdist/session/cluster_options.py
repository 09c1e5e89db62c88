"""Where the ranks of a session are: this machine, or nodes of a cluster.

Runs in the notebook's kernel. A cluster is asked what it has when the user has left something
open; the answer holds as long as the session keeps its nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.cluster import factory
from nbdist.cluster.rank_distribution import Spread
from nbdist.cluster.remote import RemoteEngine
from nbdist.errors import OptionError, StartError
from nbdist.session import placement as session_placement
from nbdist.session.config import SPREAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.hardware.discovery import Node

LOCAL = "local"
NAMES = ("on", *factory.OF_CLUSTERS)
"""Options of a session that say where it is."""
FIXED = ("on", "interface", *factory.OF_SLURM)
"""Those that hold for the life of a session."""


class Where:
    """The place that a session was made for.

    Args:
        asked: of `NAMES` what was given.

    Raises:
        OptionError: no such place, or an option that it does not have.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        """Ask nobody yet."""
        self.fixed = {name: asked[name] for name in FIXED if asked.get(name) is not None}
        self.on = str(self.fixed.setdefault("on", LOCAL))
        self.cluster = factory.opened(self.on, asked)
        self.spread = {name: asked[name] for name in SPREAD if name in asked}
        """Of the options those that say how ranks are spread over nodes."""
        self.nodes: Sequence[Node] = ()
        """The machines that the ranks were on last, as their agents told."""
        self._known: dict[tuple[int | None, ...], Spread] = {}

    def check(self, changes: Mapping[str, Any]) -> None:
        """Refuse to go somewhere else with a session that is here.

        Raises:
            OptionError: which option would need a new session.
        """
        for name in FIXED:
            if changes.get(name) is not None and changes[name] != self.fixed.get(name):
                raise OptionError(
                    f"--{name} {changes[name]}: this session's ranks are on {self.on}; stop it with"
                    " %nbdist stop, the next cell starts one there."
                )
        if self.cluster is None:
            factory.opened(self.on, changes)

    def placement(
        self, nproc: Any, gpus: Any, asked: Mapping[str, Any]
    ) -> session_placement.Placement | None:
        """Where the ranks go on the cluster; None on this machine.

        Raises:
            OptionError: contradictions, or GPUs of this machine by their numbers.
            StartError: no cluster, or it has not enough.
        """
        if self.cluster is None:
            return None
        per_node = _count(asked.get("gpus_per_node"), "--gpus-per-node", least=0)
        if gpus is not None:
            if gpus not in ("none", (), []) or per_node:
                raise OptionError(
                    f"--gpus {gpus} names GPUs of this machine, and the ranks go to {self.on}; use"
                    " --gpus-per-node N."
                )
            per_node = 0
        wish = (
            None if nproc is None else session_placement.parse_nproc(nproc),
            _count(asked.get("nodes"), "--nodes", least=1),
            per_node,
        )
        if wish not in self._known:
            self._known[wish] = self.cluster.spread(*wish)
        return session_placement.spread_out(self._known[wish])

    def engine(self) -> RemoteEngine | None:
        """Where launchers come from; None on this machine."""
        return None if self.cluster is None else RemoteEngine(self.cluster)

    def settle(self, placement: session_placement.Placement) -> None:
        """Have the next nodes taken as this placement says."""
        if self.cluster is not None:
            each = placement.nproc // placement.nodes
            self.cluster.chosen = Spread(placement.kind, placement.nodes, each)

    def close(self) -> None:
        """Let go of the cluster."""
        self._known.clear()
        if self.cluster is not None:
            self.cluster.leave()

    def left(self, placement: session_placement.Placement) -> dict[str, int]:
        """What of the options changes when nodes are gone: those that are left take over.

        Raises:
            StartError: none is left.
        """
        self._known.clear()
        if self.cluster is None:
            return {}
        each = placement.nproc // placement.nodes
        nodes = self.cluster.left(placement.kind, each, placement.nodes)
        if nodes == 0:
            raise StartError(
                f"No node of {self.on} is left that has room for {each} of the ranks; %nbdist"
                " stop ends the session."
            )
        if nodes == placement.nodes:
            return {}
        return {"nodes": nodes, "nproc": nodes * each}


def _count(given: object, option: str, *, least: int) -> int | None:
    """Read a number of nodes or of GPUs."""
    if given is None:
        return None
    text = str(given).strip()
    if isinstance(given, bool) or not text.isdecimal() or not least <= int(text) < 1 << 20:
        raise OptionError(f"{option} {given!r} is no number; use a whole number from {least}.")
    return int(text)
