"""Memory of one training step: the moments of an engine, and which of them is the peak.

An engine's story (`ddp`, `fsdp`, `zero`) is a generator of `Moment`s: what each part holds
on the fullest rank's device, and in the host's memory and on NVMe for that rank. The peak is
the moment with the largest sum. Third optimizer step or later: optimizer state exists, and
ZeRO-3 has its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from nbdist.plan.optimizers import Optimizer
    from nbdist.plan.spec import Compute, ModelSpec, Workload
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

Parts = Mapping[str, int]
_NOTHING: Parts = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is trained: everything but the model and its micro-batch."""

    options: Options
    """Checked: canonical backend, a precision."""
    world_size: int
    optimizer: Optimizer
    kind: Literal["cuda", "cpu"] = "cuda"
    reshard_after_forward: bool = True
    """FSDP: parameters are in shards between forward and backward."""

    @property
    def half(self) -> bool:
        """Mixed precision with a 16-bit type (fp8 keeps its weights in bf16)."""
        return self.options.precision in {"bf16", "fp16", "fp8"}


class Moment(NamedTuple):
    """What one rank holds at one moment."""

    name: str
    """For a reader: "forward of block 3", "loss", "backward of block 0", "optimizer step"."""
    parts: Parts
    """Bytes on the rank's device, by part."""
    host: Parts = _NOTHING
    """Bytes in the host's memory, for this rank."""
    nvme: int = 0
    """Bytes on NVMe, for this rank."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())


Story = Callable[["ModelSpec", "Workload", Setup], Iterator[Moment]]


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


def moments(model: ModelSpec, workload: Workload, setup: Setup) -> Iterator[Moment]:
    """The moments of a training step under the setup's engine."""
    from nbdist.plan.engines import ddp, fsdp, zero

    stories: Mapping[str, Story] = {
        "ddp": ddp.moments,
        "fsdp": fsdp.moments,
        "deepspeed": zero.moments,
    }
    return stories[setup.options.strategy.engine](model, workload, setup)


def peak(model: ModelSpec, workload: Workload, setup: Setup) -> Moment:
    """The fullest moment; host memory and NVMe are the most of any moment."""
    told = list(moments(model, workload, setup))
    totals = [moment.total for moment in told]
    fullest = told[totals.index(max(totals))]
    hosted = [moment.host for moment in told if moment.host]
    host = max(hosted, key=lambda parts: sum(parts.values()), default=_NOTHING)
    nvme = max(moment.nvme for moment in told)
    return Moment(name=fullest.name, parts=fullest.parts, host=host, nvme=nvme)
