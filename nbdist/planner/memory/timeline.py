"""Training setup, the base class of an engine's memory timeline, and that of DDP.

An engine's memory does not depend on the micro-batch size; activations and logits do. So a timeline
computes its `NonActivationMemory` once for walks with the same steps. Parts are summed by name
only for the moments that are reported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from nbdist.planner import model_spec, optimizers
from nbdist.planner.memory import zero_partitioning
from nbdist.planner.model_spec import (
    Workload,
    end_blocks,
    num_frozen_params,
    schedule_micro_batch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.planner.model_spec import (
        ComputeMode,
        FrozenSaves,
        MicroBatchActivations,
        MicroBatchStep,
        ModelSpec,
        VisitedBlocks,
    )
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

_HALF = frozenset({"bf16", "fp16", "fp8"})


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
        return self.options.precision in _HALF

    def workload(
        self, model: ModelSpec, batch_size: int, seq_len: int, *, keep_outputs: bool
    ) -> Workload:
        """Return a micro-batch of a model, as the engine computes it."""
        return Workload(
            batch_size=batch_size,
            seq_len=seq_len,
            compute=compute_mode(self.options),
            activation_checkpointing=self.options.activation_checkpointing,
            kind=self.kind,
            frozen_saves=frozen_saves(model, self),
            keep_outputs=keep_outputs,
        )


def frozen_saves(model: ModelSpec, setup: TrainingSetup) -> FrozenSaves:
    """Return which layers save their inputs although their weights are frozen.

    The kind of linear layer also matters to a tied weight.
    """
    is_tied = model.tied or model.groups[0].tied_tensor is not None
    if not (num_frozen_params(model) or is_tied):
        return "nothing"
    # deepspeed 0.19 replaces torch.nn.functional.linear (zero/linear.py).
    ways: Mapping[str, FrozenSaves] = {"zero3": "linear", "fsdp1": "all"}
    return ways.get(setup.options.strategy.name, "nothing")


def compute_mode(options: Options) -> ComputeMode:
    """Return the engine's compute mode."""
    return _COMPUTE[options.strategy.name] if options.precision in _HALF else "full"


def compute_modes(precision: str) -> tuple[ComputeMode, ...]:
    """Return all compute modes of the engines for a precision."""
    return ("full",) if precision == "no" else tuple(dict.fromkeys(_COMPUTE.values()))


_COMPUTE: Mapping[str, ComputeMode] = {
    "ddp": "autocast",
    "fsdp1": "half_autocast",
    "fsdp2": "half_shards",
    "zero1": "half",
    "zero2": "half",
    "zero3": "half",
}


BytesByPart = Mapping[str, int]
"""Bytes by purpose, one of `MEMORY_PARTS`."""
_NOTHING: BytesByPart = {}


class NonActivationMemory:
    """Memory of a rank at a moment, without activations and logits of the micro-batch."""

    __slots__ = ("host", "host_bytes", "nvme", "parts", "total")

    def __init__(
        self,
        *parts: BytesByPart,
        host: tuple[BytesByPart, ...] = (),
        nvme: int = 0,
        besides: NonActivationMemory | None = None,
    ) -> None:
        """Sum up the bytes.

        Args:
            parts: bytes on the rank's device; a part may occur several times.
            host: bytes in host memory for this rank, in the same form.
            nvme: bytes on NVMe for this rank.
            besides: memory to add to, such as what is held throughout.
        """
        self.parts, self.host, self.nvme = parts, host, nvme
        self.total = sum([sum(part.values()) for part in parts])
        self.host_bytes = sum([sum(part.values()) for part in host])
        if besides is not None:
            self.parts, self.host = besides.parts + parts, besides.host + host
            self.nvme += besides.nvme
            self.total += besides.total
            self.host_bytes += besides.host_bytes


class MemoryUsage(NamedTuple):
    """Memory of one rank at one moment."""

    name: str
    """Display name: "forward of block 3", "loss", "backward of block 0", "optimizer step"."""
    parts: BytesByPart
    """Bytes on the rank's device, by part."""
    host_parts: BytesByPart = _NOTHING
    """Bytes in host memory for this rank."""
    nvme_bytes: int = 0
    """Bytes on NVMe for this rank."""
    idle_pool_bytes: int = 0
    """Bytes that a GPU's caching allocator holds for other moments and cannot use at this one."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())


class StepTimeline(ABC):
    """One engine's training step of one model."""

    separate_parts: BytesByPart = _NOTHING
    """Most bytes of the parts that a GPU's allocator cannot build from freed activations: those
    allocated on another stream, and flat buffers that are larger than any activation."""
    _update: NonActivationMemory
    """Memory in the optimizer step."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self._allocations = cache(lambda steps: list(self.walk_allocations(steps)))

    @cached_property
    def visited_blocks(self) -> VisitedBlocks:
        """Blocks that a walk visits: all that may be the peak."""
        return end_blocks(self.model.groups)

    @abstractmethod
    def walk_allocations(
        self, steps: tuple[MicroBatchStep, ...]
    ) -> Iterator[tuple[int, NonActivationMemory]]:
        """Yield the index of a step of the walk and the memory held at it.

        A step may occur several times, or not at all if the engine does nothing of its own.
        """

    def other_allocations(
        self, run: MicroBatchActivations
    ) -> Iterator[tuple[str, NonActivationMemory, int]]:
        """Yield name, memory and bytes of activations for moments that are not steps of a walk."""
        yield "optimizer step", self._update, run.batch_bytes

    def memory_usage(self, run: MicroBatchActivations) -> Iterator[MemoryUsage]:
        """Yield all moments of an optimizer step with such micro-batches."""
        for name, allocation, activations, logits in self._moments(run):
            yield self._moment(name, allocation, activations, logits, allocation.host)

    def peak_memory(self, run: MicroBatchActivations) -> MemoryUsage:
        """Return the peak device usage, with the peak of host memory over all moments."""
        moments = self._moments(run)
        host = max([allocation for _, allocation, _, _ in moments], key=_host_bytes).host
        totals = [allocation.total + alive + logits for _, allocation, alive, logits in moments]
        return self._moment(*moments[totals.index(max(totals))], host)

    def _moment(
        self,
        name: str,
        allocation: NonActivationMemory,
        activations: int,
        logits: int,
        host: tuple[BytesByPart, ...],
    ) -> MemoryUsage:
        alive = {"activations": activations, "logits": logits}
        parts = sum_parts((*allocation.parts, alive))
        idle = sum(max(0, most - parts.get(name, 0)) for name, most in self.separate_parts.items())
        return MemoryUsage(name, parts, sum_parts(host), allocation.nvme, idle)

    def _moments(
        self, run: MicroBatchActivations
    ) -> list[tuple[str, NonActivationMemory, int, int]]:
        """Name, memory, and bytes of activations and logits at each moment."""
        steps, activations, logits = schedule_micro_batch(self.model, run, self.visited_blocks)
        moments = [
            (steps[at].name, allocation, activations[at], logits[at])
            for at, allocation in self._allocations(steps)
        ]
        held = run.output_bytes + run.kept_bytes
        others = self.other_allocations(run)
        return moments + [(name, allocation, alive, held) for name, allocation, alive in others]


_host_bytes = attrgetter("host_bytes")


def sum_parts(many: Iterable[BytesByPart]) -> dict[str, int]:
    """Sum up parts by name."""
    sums: dict[str, int] = {}
    for parts in many:
        for name, count in parts.items():
            sums[name] = sums.get(name, 0) + count
    return sums


# -- DDP -------------------------------------------------------------------------------------


class DdpTimeline(StepTimeline):
    """A training step under DDP; of several micro-batches the last one, which uses the most.

    Every rank holds everything, and the gradients twice: torch 2.13 and accelerate 1.15 leave
    `gradient_as_bucket_view` off, so the reducer's buckets are a second copy of all gradients for
    the lifetime of the model. On one GPU, accelerate 1.15 does not wrap the model in DDP.
    """

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        super().__init__(model)
        self._setup = setup
        elements, width = model_spec.num_trainable_params(model), model.trainable_element
        shapes = optimizers.trained_shapes(model)
        is_wrapped = setup.world_size > 1 or setup.kind == "cpu"
        self._kept = NonActivationMemory(
            {
                "parameters": elements * width
                + num_frozen_params(model) * model.element
                + model_spec.quantized_param_bytes(model),
                "buffers": elements * width * is_wrapped,
                "optimizer": setup.optimizer.state_bytes(elements, element=width, shapes=shapes),
            }
        )
        scratch = setup.optimizer.num_temporaries(
            elements, zero_partitioning.largest_trainable_size(*model.groups), shapes
        )
        update = {"gradients": elements * width, "temporaries": width * scratch}
        self._update = NonActivationMemory(update, besides=self._kept)

    def walk_allocations(
        self, steps: tuple[MicroBatchStep, ...]
    ) -> Iterator[tuple[int, NonActivationMemory]]:
        """Gradients, and weights cast to 16 bits."""
        for at, step in enumerate(steps):
            if step.phase not in {"before", "after"}:
                casts = {"activations": self._casts(step)}
                yield at, NonActivationMemory(self._gradients(step), casts, besides=self._kept)

    def _gradients(self, step: MicroBatchStep) -> BytesByPart:
        """Bytes of gradients; those of earlier micro-batches accumulate the new ones one by one."""
        elements = new = 0
        if self._setup.options.accumulate > 1:
            elements = model_spec.num_trainable_params(self.model)
            new = zero_partitioning.num_pending_gradients(self.model, step)
        elif step.phase == "backward":
            elements = zero_partitioning.num_finished_gradients(self.model, step) + step.num_grads
        width = self.model.trainable_element
        return {"gradients": elements * width, "temporaries": new * width}

    def _casts(self, step: MicroBatchStep) -> int:
        """Bytes of the 16-bit weights that autocast caches until the forward ends.

        Without checkpointing they are saved for the backward and counted as activations, as they
        are in a trace.
        """
        if (
            step.phase != "forward"
            or self.model.depth == "traced"
            or not self._setup.options.activation_checkpointing
            or not self._setup.is_half_precision
        ):
            return 0
        *earlier, own = self.model.groups[: step.group_index + 1]
        blocks = sum(group.trainable * group.count for group in earlier if group.role == "block")
        return 2 * (blocks + (step.block_index * own.trainable if own.role == "block" else 0))
