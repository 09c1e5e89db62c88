"""Interface of a cluster: allocates nodes and starts an agent on each.

Implemented for Ray, for Slurm and by a test double. A cluster only starts and ends the agents;
cells, output and files use the agents' own connections to the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DeviceType = Literal["cpu", "cuda"]


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


class Cluster(Protocol):
    """Allocates nodes and starts agents. Called from one thread at a time, except `lost_nodes`."""

    name: str
    """"ray", "slurm"."""

    @property
    def kernel_address(self) -> str:
        """Address of this machine for the nodes. Only there the agent server listens."""

    def allocate_nodes(
        self, wanted: AllocationRequest, progress: Callable[[str], None]
    ) -> list[AllocatedNode]:
        """Reserve nodes; report waiting in a queue to `progress`.

        KeyboardInterrupt cancels the request and releases reserved nodes.

        Raises:
            StartError: not enough resources, or no cluster; nothing stays reserved.
        """

    def start_agents(self, tickets: Sequence[str]) -> None:
        """Run ``nbdist.cluster.agent.serve.run_agent(ticket)`` in a process on each node.

        A ticket is a secret: pass it over stdin or the cluster's authenticated channel, never in
        a command line, an environment variable or a log.

        Raises:
            StartError: a node does not respond; `close` ends the agents that were started.
        """

    def lost_nodes(self) -> Mapping[int, str]:
        """Return the lost nodes that the cluster reports, with the reason as text.

        Called about once a second from a separate thread, so it must be cheap.
        """

    def close(self) -> None:
        """End the agents and release everything. A second call does nothing."""
