"""Launcher provider for several machines: a cluster provides nodes, agents start the ranks.

Runs in the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cluster.allocation import AllocationRequest
from nbdist.cluster.node_group import NodeGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nbdist.cluster.allocation import Cluster, DeviceType


class ClusterLauncherProvider:
    """Provides launchers on the nodes of a cluster.

    Args:
        cluster: Ray or Slurm.
        nodes: number of nodes. Default: the cluster decides.
        gpus_per_node: GPUs on each node, one per rank.
    """

    memory_events_file: Path | None = None
    """None: this machine's OOM counter does not cover the nodes."""

    def __init__(
        self, cluster: Cluster, *, nodes: int | None = None, gpus_per_node: int | None = None
    ) -> None:
        self.cluster = cluster
        self._nodes, self._gpus_per_node = nodes, gpus_per_node

    def check_limits(self, world_size: int) -> None:
        """Do nothing: each agent checks its own machine."""

    def warm_up(self, kind: DeviceType) -> None:
        """Do nothing: no nodes are reserved in advance."""

    def acquire_launchers(
        self, kind: DeviceType, world_size: int, progress: Callable[[str], None]
    ) -> NodeGroup:
        """Reserve nodes and start an agent on each; the caller closes them.

        Raises:
            StartError: no nodes available; nothing stays reserved.
        """
        group = NodeGroup(self.cluster, kind)
        try:
            group.start(
                AllocationRequest(
                    kind=kind,
                    nproc=world_size,
                    nodes=self._nodes,
                    gpus_per_node=self._gpus_per_node,
                ),
                progress,
            )
        except BaseException:
            group.close()
            raise
        return group

    def close(self) -> None:
        """Do nothing: there are no unused launchers."""
