"""Memory of one training step: the moments of an engine, and which of them is the peak.

An engine's story (`ddp`, `fsdp`, `zero`) tells the `Moment`s: what each part holds on the
fullest rank's device, and in the host's memory and on NVMe for that rank. The peak is the moment
with the largest sum. Third optimizer step or later: optimizer state exists, and ZeRO-3 has its
trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbdist.planner.memory.timeline import Moment, Story
    from nbdist.planner.model_spec import Compute, ModelSpec, Workload
    from nbdist.planner.optimizers import Optimizer
    from nbdist.strategies import Options

PARTS = (
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
"""What tensors are for.

parameters: as the engine keeps them (a shard, or all); master: a second, fp32 copy of them.
buffers: the engine's own, such as DDP's buckets and what is being reduced.
gathered: parameters put together for use.
logits: the loss and its gradients, or the logits that a variable keeps.
temporaries: of the operation at work, and of the optimizer's step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is trained: everything but the model and its micro-batch."""

    options: Options
    """Checked: canonical backend, a precision."""
    world_size: int
    optimizer: Optimizer
    kind: Literal["cuda", "cpu"] = "cuda"
    nodes: int = 1
    """Machines that the ranks are on, equally many on each."""

    @property
    def replicas(self) -> int:
        """How often all shards are there."""
        return 1 if self.options.replicate_across == "none" else self.nodes

    @property
    def shards(self) -> int:
        """Ranks that share what an engine cuts: all, or those of one node."""
        return self.world_size // self.replicas

    @property
    def half(self) -> bool:
        """Mixed precision with a 16-bit type (fp8 keeps its weights in bf16)."""
        return self.options.precision in {"bf16", "fp16", "fp8"}


def compute_of(setup: Setup) -> Compute:
    """How the engine computes, as `spec.Compute` names it."""
    if not setup.half:
        return "full"
    return _COMPUTE[setup.options.strategy.engine, setup.options.strategy.level]


def computes(precision: str) -> tuple[Compute, ...]:
    """All ways to compute that the engines have for a precision."""
    return ("full",) if precision == "no" else tuple(dict.fromkeys(_COMPUTE.values()))


_COMPUTE: Mapping[tuple[str, int], Compute] = {
    ("ddp", 0): "autocast",
    ("fsdp", 1): "half_autocast",
    ("fsdp", 2): "half",
    ("deepspeed", 1): "half",
    ("deepspeed", 2): "half",
    ("deepspeed", 3): "half",
}


def story(model: ModelSpec, setup: Setup) -> Story:
    """How the setup's engine trains a model; its `peak` is asked for any micro-batch."""
    from nbdist.planner.memory import ddp, fsdp, zero12

    engines: Mapping[str, Callable[[ModelSpec, Setup], Story]] = {
        "ddp": ddp.Whole,
        "fsdp": fsdp.Sharded,
        "deepspeed": zero12.story,
    }
    return engines[setup.options.strategy.engine](model, setup)


def moments(model: ModelSpec, workload: Workload, setup: Setup) -> Iterator[Moment]:
    """The moments of a training step under the setup's engine."""
    return story(model, setup).moments(model.micro_batch(workload))


def peak(model: ModelSpec, workload: Workload, setup: Setup) -> Moment:
    """The fullest moment; of host memory the most of any moment."""
    return story(model, setup).peak(model.micro_batch(workload))
