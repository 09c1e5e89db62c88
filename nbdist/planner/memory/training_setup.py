"""Training setup that the memory model of every engine takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.model_spec import ComputeMode
    from nbdist.planner.optimizers import OptimizerSpec
    from nbdist.strategies import Options

MEMORY_PARTS = (
    "parameters",
    "master",
    "gradients",
    "optimizer",
    "buffers",
    "gathered",
    "activations",
    "logits",
    "temporaries",
)
"""Purposes of tensors.

parameters: as the engine stores them (a shard, or all); master: a second copy in fp32.
buffers: the engine's own, such as DDP's buckets and gradients being reduced.
gathered: parameters gathered for use.
logits: the loss and its gradients, or logits kept alive by a variable.
temporaries: those of the current operation and of the optimizer step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """Training configuration without the model and its micro-batch."""

    options: Options
    """Validated options with canonical backend and a precision."""
    world_size: int
    optimizer: OptimizerSpec
    kind: Literal["cuda", "cpu"] = "cuda"
    num_nodes: int = 1
    """Number of nodes, with equally many ranks on each."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the shards."""
        return 1 if self.options.replicate_across == "none" else self.num_nodes

    @property
    def num_shards(self) -> int:
        """Number of ranks that share the shards: all ranks, or those of one node."""
        return self.world_size // self.num_replicas

    @property
    def is_half_precision(self) -> bool:
        """True for mixed precision with a 16-bit type (fp8 keeps its weights in bf16)."""
        return self.options.precision in {"bf16", "fp16", "fp8"}


def compute_mode(setup: TrainingSetup) -> ComputeMode:
    """Return the engine's compute mode."""
    if not setup.is_half_precision:
        return "full"
    return _COMPUTE[setup.options.strategy.engine, setup.options.strategy.level]


def compute_modes(precision: str) -> tuple[ComputeMode, ...]:
    """Return all compute modes of the engines for a precision."""
    return ("full",) if precision == "no" else tuple(dict.fromkeys(_COMPUTE.values()))


_COMPUTE: Mapping[tuple[str, int], ComputeMode] = {
    ("ddp", 0): "autocast",
    ("fsdp", 1): "half_autocast",
    ("fsdp", 2): "half",
    ("deepspeed", 1): "half",
    ("deepspeed", 2): "half",
    ("deepspeed", 3): "half",
}
