"""Plan request: the model, the cluster and the options that the user has fixed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist import strategies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.planner.optimizers import OptimizerSpec

OFFLOAD_TARGETS = ("none", "cpu", "nvme:PATH")
"""Offload targets that are searched unless the user fixed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Input of a plan: a model, a cluster, and the options that the user fixed."""

    model: ModelSpec
    cluster: ClusterSpec
    """One device per rank; the least free memory is the limit."""
    batch_sizes: tuple[int, ...]
    """Samples per micro-batch and rank."""
    seq_len: int
    """Tokens per sample."""
    precision: str
    """One of strategies.PRECISIONS."""
    optimizer: OptimizerSpec
    fixed_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `strategies.Options` fixed by the user; the rest is searched."""
    offload_candidates: tuple[str, ...] = OFFLOAD_TARGETS
    """Offload targets to search if `fixed_options` names none."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user: assumptions, limiting devices, unsupported precision."""
        device = self.cluster.smallest_device
        known = (*self.model.notes, *self.cluster.notes)
        if self.cluster.kind == "cpu" or self.precision in {"no", *device.flops}:
            return known
        supported = ", ".join(sorted({"fp16", "bf16", "fp8"} & set(device.flops)))
        lacking = (
            f"{device.name} does not support {self.precision}, so speeds are those of fp32. It"
            f" supports {supported}."
        )
        return (*known, lacking)

    @property
    def world_size(self) -> int:
        """Number of ranks, one per device."""
        return self.cluster.world_size

    @property
    def hardware(self) -> strategies.Hardware:
        """Hardware that options are checked against: fully capable GPUs on these nodes."""
        return hardware_for_cluster(self.cluster)


def hardware_for_cluster(cluster: ClusterSpec) -> strategies.Hardware:
    """Return GPUs with every capability, on a cluster's nodes."""
    ranks, nodes = cluster.world_size, cluster.num_nodes
    return strategies.Hardware(kind="cuda", bf16=True, fp8=True, world_size=ranks, nodes=nodes)
