"""Options for where a session's ranks run: this machine, or nodes of a cluster.

Runs in the notebook's kernel. The cluster is queried for options that the user left open; the
answer is cached while the session keeps its nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.cluster import factory
from nbdist.cluster.rank_distribution import RankDistribution
from nbdist.cluster.remote import ClusterLauncherProvider
from nbdist.errors import OptionError, StartError
from nbdist.session import placement as session_placement
from nbdist.strategies import ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.hardware.discovery import SessionNode

LOCAL = "local"
_CLUSTER_ARGUMENTS = {
    name: argument for name, argument in ARGUMENTS.items() if argument.scope == "cluster"
}
OPTION_NAMES = tuple(_CLUSTER_ARGUMENTS)
"""Session options that select the cluster."""
DISTRIBUTION_OPTIONS = tuple(name for name, item in _CLUSTER_ARGUMENTS.items() if item.can_switch)
"""Options for the distribution of ranks over cluster nodes."""
FIXED_OPTIONS = tuple(name for name in OPTION_NAMES if name not in DISTRIBUTION_OPTIONS)
"""Those that cannot change during a session."""


class ClusterOptions:
    """Cluster options of a session.

    Args:
        requested: the given options of `OPTION_NAMES`.

    Raises:
        OptionError: an unknown cluster, or an option that it does not support.
    """

    def __init__(self, requested: Mapping[str, Any]) -> None:
        self.fixed_options = {
            name: requested[name] for name in FIXED_OPTIONS if requested.get(name) is not None
        }
        self.on = str(self.fixed_options.setdefault("on", LOCAL))
        self.cluster = factory.create_cluster(self.on, requested)
        self.distribution_options = {
            name: requested[name] for name in DISTRIBUTION_OPTIONS if name in requested
        }
        """The options for the distribution of ranks over nodes."""
        self.nodes: Sequence[SessionNode] = ()
        """Nodes of the last start, as their agents reported them."""
        self._known: dict[tuple[int | None, ...], RankDistribution] = {}

    def check_changes(self, changes: Mapping[str, Any]) -> None:
        """Check that changes do not move a session elsewhere.

        Raises:
            OptionError: an option that needs a new session.
        """
        for name in FIXED_OPTIONS:
            if changes.get(name) is not None and changes[name] != self.fixed_options.get(name):
                raise OptionError(
                    f"Cannot change to --{name} {changes[name]}: this session's ranks are on"
                    f" {self.on}. Use %nbdist stop; the next cell starts a new session."
                )
        if self.cluster is None:
            factory.create_cluster(self.on, changes)

    def choose_placement(
        self, nproc: Any, gpus: Any, requested: Mapping[str, Any]
    ) -> session_placement.Placement | None:
        """Choose the devices on the cluster; return None on this machine.

        Raises:
            OptionError: contradictory options, or indices of this machine's GPUs.
            StartError: the cluster is not reachable or too small.
        """
        if self.cluster is None:
            return None
        per_node = _count(requested.get("gpus_per_node"), "--gpus-per-node", least=0)
        if gpus is not None:
            if gpus not in ("none", (), []) or per_node:
                raise OptionError(
                    f"--gpus {gpus} selects GPUs of this machine, but the ranks run on {self.on}."
                    " Use --gpus-per-node N."
                )
            per_node = 0
        options = (
            None if nproc is None else session_placement.parse_nproc(nproc),
            _count(requested.get("nodes"), "--nodes", least=1),
            per_node,
        )
        if options not in self._known:
            self._known[options] = self.cluster.distribute_ranks(*options)
        return session_placement.cluster_placement(self._known[options])

    def make_launcher_provider(self) -> ClusterLauncherProvider | None:
        """Return the provider of launchers; None on this machine."""
        return None if self.cluster is None else ClusterLauncherProvider(self.cluster)

    def set_distribution(self, placement: session_placement.Placement) -> None:
        """Make the next allocation of nodes follow this placement."""
        if self.cluster is not None:
            each = placement.nproc // placement.num_nodes
            self.cluster.distribution = RankDistribution(placement.kind, placement.num_nodes, each)

    def close(self) -> None:
        """Release the cluster."""
        self._known.clear()
        if self.cluster is not None:
            self.cluster.disconnect()

    def options_for_remaining_nodes(self, placement: session_placement.Placement) -> dict[str, int]:
        """Return the options that change after nodes were lost: the remaining nodes take over.

        Raises:
            StartError: none remains.
        """
        self._known.clear()
        if self.cluster is None:
            return {}
        each = placement.nproc // placement.num_nodes
        nodes = self.cluster.num_available_nodes(placement.kind, each, placement.num_nodes)
        if nodes == 0:
            raise StartError(
                f"No remaining node of {self.on} has room for {each} ranks. Use %nbdist stop to"
                " end the session."
            )
        if nodes == placement.num_nodes:
            return {}
        return {"nodes": nodes, "nproc": nodes * each}


def _count(given: object, option: str, *, least: int) -> int | None:
    """Parse a number of nodes or GPUs."""
    if given is None:
        return None
    text = str(given).strip()
    if isinstance(given, bool) or not text.isdecimal() or not least <= int(text) < 1 << 20:
        raise OptionError(f"{option} must be an integer >= {least}, got {given!r}.")
    return int(text)
