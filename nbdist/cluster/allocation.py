"""What an engine for several machines asks of a cluster: nodes, and one agent on each; pure.

Ray, Slurm and the tests' double are clusters. A cluster places and ends; cells, output and
files never go through it: the agents connect to the kernel's hub by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a session asks of a cluster; None: the cluster decides."""

    kind: Kind
    nproc: int | None = None
    """Ranks over all nodes."""
    nodes: int | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node that the cluster gave, numbered from 0, the notebook's own first where it is one."""

    name: str
    """For people: the node's host name."""
    address: str
    """Of the interface by which the nodes reach one another."""
    ranks: int
    """At least 1; nodes may differ."""
    gpus: tuple[str, ...] = ()
    """UUIDs; empty for CPU ranks."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of python, torch, nbdist, by name."""


class Cluster(Protocol):
    """Gives nodes and starts an agent on each. Called from one thread at a time, but for `lost`."""

    name: str
    """"ray", "slurm"."""

    @property
    def reach(self) -> str:
        """Address of this machine that the nodes reach: the hub listens there and nowhere else."""

    def allot(self, wanted: Wanted, progress: Callable[[str], None]) -> list[Place]:
        """Reserve nodes; may wait in a queue and says so to `progress`.

        KeyboardInterrupt ends the waiting and gives back what was reserved.

        Raises:
            StartError: there is not enough, or no cluster; nothing stays reserved.
        """

    def start(self, tickets: Sequence[str]) -> None:
        """Run `nbdist.cluster.agent.serve.serve(ticket)` on each place, in a process of its own.

        A ticket is a secret: it goes over stdin or the cluster's own authenticated channel, never
        into a command line, an environment or a log.

        Raises:
            StartError: a place does not answer; what was started is ended by `close`.
        """

    def lost(self) -> Mapping[int, str]:
        """Places that the cluster knows to be gone, with the cause in words.

        Called about once a second from a thread of its own; has to be cheap.
        """

    def close(self) -> None:
        """End what `start` started and give everything back; a second call finds nothing."""
