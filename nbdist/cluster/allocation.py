"""Interface of a cluster: allocates nodes, distributes ranks over them, starts an agent on each.

Implemented for Ray, for Slurm and by a test double. A cluster only starts and ends the agents;
cells, output and files use the agents' own connections to the kernel.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nbdist._version import __version__
from nbdist.errors import OptionError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DeviceType = Literal["cpu", "cuda"]
MAX_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """Nodes and ranks that a session requests; for None the cluster decides."""

    kind: DeviceType
    nproc: int | None = None
    """Total number of ranks."""
    nodes: int | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedNode:
    """A node allocated by the cluster, indexed from 0; the notebook's own node is first."""

    name: str
    """Display name: the host name."""
    address: str
    """Address of its interface to the other nodes."""
    ranks: int
    """Number of ranks, at least 1; may differ between nodes."""
    gpus: tuple[str, ...] = ()
    """UUIDs; empty for CPU ranks."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of python, torch and nbdist, by name."""


@dataclass(frozen=True, slots=True)
class RankDistribution:
    """Number of nodes and of ranks on each."""

    kind: DeviceType
    num_nodes: int
    ranks_per_node: int

    @property
    def nproc(self) -> int:
        """Total number of ranks."""
        return self.num_nodes * self.ranks_per_node

    def describe(self) -> str:
        """Return a short summary: "2 nodes x 4 GPUs", "1 node x 2 CPU ranks"."""
        unit = "GPU" if self.kind == "cuda" else "CPU rank"
        return f"{format_count(self.num_nodes, 'node')} x {format_count(self.ranks_per_node, unit)}"


def software_versions() -> dict[str, str]:
    """Versions that kernel and ranks must share; does not import torch."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {"python": platform.python_version(), "torch": torch, "nbdist": __version__}


def number_nodes(
    descriptions: Sequence[Mapping[str, Any]], kernel_address: str, distribution: RankDistribution
) -> tuple[list[int], list[AllocatedNode]]:
    """Number the nodes, this machine first.

    Args:
        descriptions: of the nodes, by ``NodeBootstrap.describe_node``.
        kernel_address: address of this machine.
        distribution: the ranks on each node.

    Returns:
        For each node in order the index of its description, and the nodes.

    Raises:
        StartError: a node cannot be used, or its versions differ from the notebook's.
    """
    for node in descriptions:
        if "error" in node:
            raise StartError(f"Cannot use node {node['host']}: {node['error']}")
    order = sorted(
        range(len(descriptions)), key=lambda i: descriptions[i]["address"] != kernel_address
    )
    ranks, on_gpus = distribution.ranks_per_node, distribution.kind == "cuda"
    names = unique_names([(node["host"], node["address"]) for node in descriptions])
    nodes = [
        AllocatedNode(
            name=names[i],
            address=descriptions[i]["address"],
            ranks=ranks,
            gpus=tuple(descriptions[i]["gpus"][:ranks]) if on_gpus else (),
            versions=descriptions[i]["versions"],
        )
        for i in order
    ]
    check_versions(software_versions(), nodes)
    return order, nodes


def unique_names(nodes: Sequence[tuple[str, str]]) -> list[str]:
    """Return the host names, with the address if several nodes share one."""
    often = Counter(host for host, _ in nodes)
    return [host if often[host] == 1 else f"{host} ({ip})" for host, ip in nodes]


def check_folder(nodes: Sequence[Mapping[str, Any]], folder: str) -> None:
    """Check that all nodes have the notebook's folder.

    Raises:
        StartError: names the nodes that do not.
    """
    without = [node["host"] for node in nodes if not node["has_folder"]]
    if without:
        raise StartError(
            f"The notebook's folder {folder} does not exist on {', '.join(without)}. Open the"
            " notebook in a folder that all nodes share under the same path."
        )


def format_count(number: int, what: str) -> str:
    """Return a number with its noun: "1 node", "2 nodes"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def requested_counts(request: AllocationRequest) -> tuple[int | None, int | None]:
    """Return the number of nodes and of ranks on each, as far as the options specify them.

    Raises:
        OptionError: contradictory options.
    """
    nproc, nodes = request.nproc, request.nodes
    per_node = request.gpus_per_node if request.kind == "cuda" else None
    if per_node is None:
        return nodes, _divide_evenly(nproc, nodes, f"--nodes {nodes}")
    if nodes is None:
        return _divide_evenly(nproc, per_node, f"--gpus-per-node {per_node}"), per_node
    if nproc is not None and nproc != nodes * per_node:
        raise OptionError(
            f"-n {nproc} contradicts --nodes {nodes} --gpus-per-node {per_node}, which are"
            f" {nodes * per_node} ranks. Leave one of the three out."
        )
    return nodes, per_node


def _divide_evenly(nproc: int | None, parts: int | None, option: str) -> int | None:
    if nproc is None or parts is None:
        return None
    if nproc % parts:
        nearest_counts = [n for n in (nproc // parts * parts, (nproc // parts + 1) * parts) if n]
        use = " or ".join(f"-n {n}" for n in nearest_counts)
        raise OptionError(
            f"-n {nproc} cannot be spread evenly with {option}: every node gets the same number"
            f" of ranks. Use {use}."
        )
    return nproc // parts


def fit_to_nodes(
    request: AllocationRequest, available: Mapping[str, int], cluster: str
) -> RankDistribution:
    """Distribute ranks over nodes with limited numbers of devices.

    Args:
        request: the requested numbers.
        available: number of GPUs, or of CPUs for CPU ranks, by name of the node.
        cluster: name of the cluster in messages: "The Ray cluster at 10.0.0.1".

    Raises:
        OptionError: contradictory options.
        StartError: not enough devices; the message names what exists and what would fit.
    """
    nodes, per_node = requested_counts(request)
    sizes = sorted((size for size in available.values() if size > 0), reverse=True)
    if distribution := _first_fitting_distribution(request, nodes, per_node, sizes):
        return distribution
    unit = "GPU" if request.kind == "cuda" else "CPU"
    wanted = format_count(request.nproc, "rank") if request.nproc else "ranks"
    if nodes is not None:
        wanted += f" on {format_count(nodes, 'node')}"
    if per_node is not None:
        wanted += f" with {format_count(per_node, unit)} each"
    listed = ", ".join(f"{size} on {name}" for name, size in available.items() if size) or "none"
    # the largest number of ranks that can be spread evenly
    best = max(range(1, len(sizes) + 1), key=lambda n: n * sizes[n - 1], default=0)
    if best:
        each = sizes[best - 1]
        words = f"--gpus-per-node {each}" if unit == "GPU" else f"-n {best * each}"
        hint = f"Use --nodes {best} {words} or less"
    elif unit == "CPU":
        hint = "Request fewer, or use --on local"
    else:
        hint = "Use --gpus-per-node 0 for CPU ranks"
    raise StartError(
        f"{cluster} has {format_count(sum(available.values()), unit)} ({listed}), not enough for"
        f" {wanted}. {hint}."
    )


def _first_fitting_distribution(
    request: AllocationRequest, nodes: int | None, per_node: int | None, sizes: list[int]
) -> RankDistribution | None:
    """Return the first distribution that fits; `sizes` are in descending order."""
    default = None if request.kind == "cuda" else 1  # ranks per node: all GPUs, one CPU rank
    for count in [nodes] if nodes is not None else range(1, len(sizes) + 1):
        if count > len(sizes):
            break
        least, ranks = sizes[count - 1], per_node
        if request.nproc is not None and ranks is None:
            if request.nproc % count:
                continue
            ranks = request.nproc // count
        elif (
            request.nproc is None
            and nodes is None
            and max(sizes[count:], default=0) >= (per_node or 1)
        ):
            continue  # the number of nodes is free: use all that fit
        ranks = ranks or default or least
        if ranks <= least and (request.nproc in {None, ranks * count}):
            return RankDistribution(request.kind, count, ranks)
    return None


def check_versions(
    kernel_versions: Mapping[str, str], nodes_to_check: Sequence[AllocatedNode]
) -> None:
    """Raise if a node's versions differ from the notebook's.

    Cells, messages and tensors are exchanged between the nodes: different versions fail late and
    obscurely. Python's micro version may differ; torch's build ("+cu130", "+cpu") may not.

    Raises:
        StartError: lists the versions and their nodes.
    """
    lines = []
    for name in kernel_versions:
        found: dict[str, list[str]] = {kernel_versions[name]: ["the notebook"]}
        for node in nodes_to_check:
            found.setdefault(node.versions.get(name, "none"), []).append(node.name)
        # of Python, the micro version is not compared
        num_parts = 2 if name == "python" else None
        if len({".".join(version.split(".")[:num_parts]) for version in found}) > 1:
            words = [f"{version} on {format_names(nodes)}" for version, nodes in found.items()]
            lines.append(f"{name} {', '.join(words)}")
    if lines:
        raise StartError(
            f"Versions differ between the nodes: {'; '.join(lines)}."
            " Install the same versions everywhere. Nothing was started."
        )


def format_names(things: Sequence[object], max_names: int = MAX_NAMES) -> str:
    """Return the first few names, and the number of the others: "alpha, beta and 3 more"."""
    more = len(things) - max_names
    names = ", ".join(map(str, things[:max_names]))
    return f"{names} and {more} more" if more > 0 else names


class Cluster(Protocol):
    """Allocates nodes and starts agents.

    Called from one thread at a time, except `lost_nodes` and `drained_nodes`.
    """

    name: str
    """"ray", "slurm"."""

    @property
    def kernel_address(self) -> str:
        """Address of this machine for the nodes. Only there the agent server listens."""

    def allocate_nodes(self, progress: Callable[[str], None]) -> list[AllocatedNode]:
        """Reserve nodes for the session; report waiting in a queue to `progress`.

        KeyboardInterrupt cancels the request and releases reserved nodes.

        Raises:
            StartError: not enough resources, or no cluster; nothing stays reserved.
        """

    def start_agents(self, tickets: Sequence[str]) -> None:
        """Run `python -m nbdist.cluster.agent` on each node, with its ticket as a line on stdin.

        A ticket is a secret: pass it over stdin or the cluster's authenticated channel, never in
        a command line, an environment variable or a log.

        Raises:
            StartError: a node does not respond; `close` ends the agents that were started.
        """

    def lost_nodes(self) -> Mapping[int, str]:
        """Return the lost nodes that the cluster reports, with the reason as text.

        Called about once a second from a separate thread, so it must be cheap.
        """

    def drained_nodes(self) -> Mapping[int, float | None]:
        """Return the nodes that will be lost, each with the Unix time of its end if it is known.

        Called as `lost_nodes`.
        """

    def close(self) -> None:
        """End the agents and release everything. A second call does nothing."""
