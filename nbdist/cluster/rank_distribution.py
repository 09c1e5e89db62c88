"""How the ranks of a session are spread over the nodes of a cluster: arithmetic; pure.

Every node gets the same number of ranks. What is not said is chosen so that as few nodes as
possible hold all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.errors import OptionError, StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.cluster.allocation import Kind, Wanted


@dataclass(frozen=True, slots=True)
class Spread:
    """So many nodes with so many ranks each."""

    kind: Kind
    nodes: int
    each: int

    @property
    def nproc(self) -> int:
        """Ranks over all nodes."""
        return self.nodes * self.each

    def describe(self) -> str:
        """In words: "2 nodes x 4 GPUs", "1 node x 2 CPU ranks"."""
        what = "GPU" if self.kind == "cuda" else "CPU rank"
        return f"{counted(self.nodes, 'node')} x {counted(self.each, what)}"


def counted(number: int, what: str) -> str:
    """A number and a noun: "1 node", "2 nodes"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def filled(wanted: Wanted) -> tuple[int | None, int | None]:
    """Nodes and ranks on each, as far as the user's words say them.

    Raises:
        OptionError: they contradict one another.
    """
    nproc, nodes = wanted.nproc, wanted.nodes
    each = wanted.gpus_per_node if wanted.kind == "cuda" else None
    if each is None:
        return nodes, _whole(nproc, nodes, f"--nodes {nodes}")
    if nodes is None:
        return _whole(nproc, each, f"--gpus-per-node {each}"), each
    if nproc is not None and nproc != nodes * each:
        raise OptionError(
            f"-n {nproc} contradicts --nodes {nodes} --gpus-per-node {each}, which are"
            f" {nodes * each} ranks; leave one of the three out."
        )
    return nodes, each


def _whole(nproc: int | None, parts: int | None, option: str) -> int | None:
    """One part of the ranks."""
    if nproc is None or parts is None:
        return None
    if nproc % parts:
        near = [n for n in (nproc // parts * parts, (nproc // parts + 1) * parts) if n]
        use = " or ".join(f"-n {n}" for n in near)
        raise OptionError(
            f"-n {nproc} cannot be spread evenly with {option}: every node gets the same number"
            f" of ranks; use {use}."
        )
    return nproc // parts


def fitted(wanted: Wanted, there: Mapping[str, int], cluster: str) -> Spread:
    """Spread over nodes that hold so many ranks each at most.

    Args:
        wanted: what the user said.
        there: GPUs of each node by its name, or CPUs for CPU ranks.
        cluster: its name in messages: "The Ray cluster at 10.0.0.1".

    Raises:
        OptionError: contradictions.
        StartError: there is not enough; says what there is, and what would be granted.
    """
    nodes, each = filled(wanted)
    sizes = sorted((size for size in there.values() if size > 0), reverse=True)
    spread = _spread(wanted, nodes, each, sizes)
    if spread is None:
        raise StartError(_too_few(wanted, nodes, each, there, cluster))
    return spread


def _spread(wanted: Wanted, nodes: int | None, each: int | None, sizes: list[int]) -> Spread | None:
    """The first that fits; `sizes` are in falling order."""
    default = None if wanted.kind == "cuda" else 1  # of ranks on a node: all GPUs, one CPU rank
    for count in [nodes] if nodes is not None else range(1, len(sizes) + 1):
        if count > len(sizes):
            break
        least, ranks = sizes[count - 1], each
        if wanted.nproc is not None and ranks is None:
            if wanted.nproc % count:
                continue
            ranks = wanted.nproc // count
        elif wanted.nproc is None and nodes is None and _more_fit(count, each, sizes):
            continue  # nothing limits the number of nodes: all that can take part do
        ranks = ranks or default or least
        if ranks <= least and (wanted.nproc in {None, ranks * count}):
            return Spread(wanted.kind, count, ranks)
    return None


def _more_fit(count: int, each: int | None, sizes: list[int]) -> bool:
    """Whether one more node could take part."""
    return count < len(sizes) and sizes[count] >= (each or 1)


def _too_few(
    wanted: Wanted,
    nodes: int | None,
    each: int | None,
    there: Mapping[str, int],
    cluster: str,
) -> str:
    unit = "GPU" if wanted.kind == "cuda" else "CPU"
    asked = counted(wanted.nproc, "rank") if wanted.nproc else "ranks"
    if nodes is not None:
        asked += f" on {counted(nodes, 'node')}"
    if each is not None:
        asked += f" with {counted(each, unit)} each"
    listed = ", ".join(f"{size} on {name}" for name, size in there.items() if size) or "none"
    has = f"{cluster} has {counted(sum(there.values()), unit)} ({listed})"
    return f"{has}, not enough for {asked}; {_granted(wanted.kind, there)}."


def _granted(kind: Kind, there: Mapping[str, int]) -> str:
    """What would be given instead: the most ranks that can be spread evenly."""
    sizes = sorted(there.values(), reverse=True)
    best = max(range(1, len(sizes) + 1), key=lambda n: n * sizes[n - 1], default=0)
    if not best or not sizes[best - 1]:
        return (
            "ask for less, or use --on local"
            if kind == "cpu"
            else "use --gpus-per-node 0 for CPU ranks"
        )
    each = sizes[best - 1]
    words = f"--gpus-per-node {each}" if kind == "cuda" else f"-n {best * each}"
    return f"use --nodes {best} {words} or less"
