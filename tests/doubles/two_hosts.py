"""Two hosts in place of a Ray cluster: `--on ray` of this process then means them.

For a kernel that runs on the host alpha where Ray is not installed. A cluster only gives nodes and
starts agents: what runs on them, and every connection, is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.cluster.allocation import RankDistribution
from nbdist.session import config
from tests.two_nodes import Hosts, NodesOnHosts

if TYPE_CHECKING:
    from nbdist.cluster.allocation import DeviceType


class TwoHostCluster(NodesOnHosts):
    """Both hosts, one CPU rank on each, under Ray's name."""

    name = "ray"
    distribution: RankDistribution | None = None

    def distribute_ranks(
        self, nproc: int | None, nodes: int | None, gpus_per_node: int | None
    ) -> RankDistribution:
        """What there is."""
        assert nproc in {None, 2}
        assert nodes in {None, 2}
        assert not gpus_per_node
        return RankDistribution("cpu", 2, 1)

    def num_available_nodes(self, kind: DeviceType, each: int, nodes: int) -> int:  # noqa: ARG002 - as Ray's
        """Both: only agents are killed here."""
        return nodes

    disconnect = NodesOnHosts.close


def stand_in(prefix: str) -> None:
    """Have `--on ray` take these hosts; the prefix names their namespaces."""

    def made(*_: Any) -> TwoHostCluster:
        return TwoHostCluster(Hosts(prefix))

    config.RayCluster = made  # type: ignore[assignment, misc]
