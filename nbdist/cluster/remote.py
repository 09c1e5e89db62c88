"""The engine for several machines: a cluster gives nodes, agents on them start the ranks.

Runs in the kernel; called by `session.worker_group`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cluster.allocation import Wanted
from nbdist.cluster.node_group import Nodes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nbdist.cluster.allocation import Cluster, Kind


class RemoteEngine:
    """Gives the nodes of a cluster.

    Args:
        cluster: Ray, Slurm.
        nodes: how many. Default: the cluster decides.
        gpus_per_node: GPUs of each, one for each rank.
    """

    memory_events: Path | None = None
    """The OOM killer's counter of this machine says nothing of the nodes."""

    def __init__(
        self, cluster: Cluster, *, nodes: int | None = None, gpus_per_node: int | None = None
    ) -> None:
        """Ask for nothing yet."""
        self.cluster = cluster
        self._nodes, self._gpus_per_node = nodes, gpus_per_node

    def check(self, world_size: int) -> None:
        """Nothing grows here with the number of ranks: each agent looks at its own machine."""

    def warm_up(self, kind: Kind) -> None:
        """Reserve nothing ahead of need."""

    def take(self, kind: Kind, world_size: int, progress: Callable[[str], None]) -> Nodes:
        """Get nodes with an agent on each; the caller closes them.

        Raises:
            StartError: there are none; nothing stays reserved.
        """
        made = Nodes(self.cluster, kind)
        try:
            made.start(
                Wanted(
                    kind=kind,
                    nproc=world_size,
                    nodes=self._nodes,
                    gpus_per_node=self._gpus_per_node,
                ),
                progress,
            )
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Nothing waits here for a session."""
