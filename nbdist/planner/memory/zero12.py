"""Memory timelines of DeepSpeed: its config, what all stages have in common, and ZeRO-1 and 2.

Stage 3 is in `zero3`. Based on DeepSpeed 0.19.8, measured tensor by tensor with the config that
`strategies` passes to it.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.planner import model_spec
from nbdist.planner.memory import zero_partitioning
from nbdist.planner.memory.timeline import NonActivationMemory, StepTimeline
from nbdist.strategies import Hardware

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.planner.memory.timeline import BytesByPart, TrainingSetup
    from nbdist.planner.memory.zero_partitioning import (
        BucketReduction,
        RetainedGradients,
        TrainableParameter,
    )
    from nbdist.planner.model_spec import (
        MicroBatchActivations,
        MicroBatchStep,
        ModelSpec,
        VisitedBlocks,
    )

GRADIENT_PARTITIONING_STAGE = 2
PARAMETER_PARTITIONING_STAGE = 3
MASTER_BYTES = 4
"""Bytes per element of the master copy, which is always fp32."""
NORM_BYTES = 8
"""Bytes per element while a norm is computed in fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchLimits:
    """Limits of ZeRO-3's parameter gathering, in elements."""

    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    param_persistence_threshold: int = 100_000
    """Parameters up to this size are never partitioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """DeepSpeed's config, in elements, completed by its defaults."""

    reduce_bucket_size: int
    num_buffers: int
    """Number of buckets that exist at once."""
    overlap_comm: bool
    sub_group_size: int
    prefetch_limits: PrefetchLimits
    offload_optimizer: Mapping[str, Any]
    offload_param: Mapping[str, Any]


def read_config(model: ModelSpec, setup: TrainingSetup) -> ZeroConfig:
    """Read the session's config as DeepSpeed does (runtime/zero/config.py)."""
    strategy = setup.options.strategy
    hardware = Hardware(kind=setup.kind, world_size=setup.world_size)
    zero = strategy.deepspeed_config(setup.options, hardware)["zero_optimization"]
    # The smallest parameter besides the head is the final norm's, of hidden size.
    hidden = min((shape.num_elements for shape in model.groups[-1].tensors), default=0)
    automatic = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": 9 * hidden * hidden // 10,
        "stage3_param_persistence_threshold": 10 * hidden,
    }

    def number(key: str, default: float) -> int:
        # accelerate 1.15 replaces "auto" by numbers that depend on the hidden size.
        value = zero.get(key, default)
        if value == "auto":
            return automatic.get(key, int(default))
        return int(value)

    cuts_parameters = strategy.level == PARAMETER_PARTITIONING_STAGE
    overlap = zero.get("overlap_comm")
    overlap = cuts_parameters if overlap in (None, "auto") else overlap
    contiguous = bool(zero.get("contiguous_gradients", True))
    return ZeroConfig(
        reduce_bucket_size=number("reduce_bucket_size", 5e8),
        num_buffers=int(contiguous) * (2 if overlap and not cuts_parameters else 1),
        overlap_comm=overlap,
        sub_group_size=number("sub_group_size", 1e9),
        prefetch_limits=PrefetchLimits(
            prefetch_bucket_size=number("stage3_prefetch_bucket_size", 5e7),
            max_live_parameters=number("stage3_max_live_parameters", 1e9),
            max_reuse_distance=number("stage3_max_reuse_distance", 1e9),
            param_persistence_threshold=number("stage3_param_persistence_threshold", 1e5),
        ),
        offload_optimizer=zero.get("offload_optimizer", {}),
        offload_param=zero.get("offload_param", {}),
    )


class ZeroTimeline(StepTimeline):
    """A training step under DeepSpeed; of several micro-batches the last, which uses the most."""

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        """Read the config and compute sizes that all moments need."""
        super().__init__(model)
        self.setup = setup
        self.config = read_config(model, setup)
        self.element_bytes = 2 if setup.is_half_precision else 4
        """Bytes per element of parameters and gradients in use."""
        self.trainable = model_spec.num_trainable_params(model)
        if not self.trainable:
            raise PlanError(
                "The model has no trainable parameter, which DeepSpeed needs. Unfreeze some."
            )
        self.largest = zero_partitioning.largest_trainable_size(*model.groups)
        """Elements of the largest trainable parameter."""
        self.is_offloaded = setup.options.offload_device != "none"
        self.has_accumulated_gradients = setup.options.accumulate > 1
        """True if gradients of earlier micro-batches exist."""
        self.tied_head_size = zero_partitioning.tied_head_size(model)

    @cached_property
    def partition_size(self) -> int:
        """Elements of a rank's share of the master copy."""
        return zero_partitioning.partition_size(self.trainable, self.setup.world_size)

    @abstractmethod
    def device_parts(self) -> dict[str, int]:
        """Return the bytes that are always on the device."""

    @abstractmethod
    def host_parts(self) -> dict[str, int]:
        """Return the bytes that are always in host memory."""

    def nvme_bytes(self) -> int:
        """Return the bytes on NVMe."""
        return 0

    @abstractmethod
    def reduction_allocations(self) -> Iterator[tuple[BucketReduction, BytesByPart]]:
        """Yield reductions that may be the peak, in order, with their additional memory."""

    @abstractmethod
    def update_allocations(self) -> Iterator[tuple[str, NonActivationMemory]]:
        """Yield the parts of the optimizer step with the memory held."""

    def other_allocations(
        self, run: MicroBatchActivations
    ) -> Iterator[tuple[str, NonActivationMemory, int]]:
        """Yield the reductions, then the optimizer step."""
        before = model_spec.saved_bytes_before_groups(self.model, run)
        for reduction, allocation in self._peak_reductions:
            yield "gradient reduction", allocation, self._alive(reduction, run, before)
        for name, allocation in self._updates:
            yield name, allocation, run.batch_bytes

    @cached_property
    def _updates(self) -> list[tuple[str, NonActivationMemory]]:
        return list(self.update_allocations())

    @cached_property
    def _peak_reductions(self) -> list[tuple[BucketReduction, NonActivationMemory]]:
        """Reductions one of which is the peak, for any micro-batch."""
        candidates: list[tuple[BucketReduction, int, BytesByPart]] = []
        for reduction, parts in self.reduction_allocations():
            size = sum(parts.values())
            if not any(
                more >= size and _is_before(other, reduction) for other, more, _ in candidates
            ):
                candidates.append((reduction, size, parts))
        return [(reduction, self.allocation_with(parts)) for reduction, _, parts in candidates]

    def allocation_with(
        self, *more: BytesByPart, host: BytesByPart | None = None
    ) -> NonActivationMemory:
        """Return the permanent memory combined with additional parts."""
        return NonActivationMemory(*more, host=(host,) if host else (), besides=self._permanent)

    @cached_property
    def _permanent(self) -> NonActivationMemory:
        return NonActivationMemory(
            self.device_parts(), host=(self.host_parts(),), nvme=self.nvme_bytes()
        )

    def optimizer_state_parts(self) -> dict[str, int]:
        """Return the bytes of master copy and optimizer state, on any device."""
        optimizer = self.setup.optimizer
        return {
            "master": MASTER_BYTES * self.partition_size,
            "optimizer": optimizer.state_bytes(self.partition_size, flat=True),
        }

    def page_locked(self, *sizes: int) -> int:
        """Return the padding of pinned tensors of these sizes, in bytes.

        torch 2.13 rounds each one up to a power of two (CachingHostAllocator.h).
        """
        if not self.config.offload_optimizer.get("pin_memory"):
            return 0
        return sum((1 << (size - 1).bit_length()) - size for size in sizes if size)

    def update_parts(self, elements: int) -> dict[str, int]:
        """Return the bytes of updating these elements: fp32 gradients, optimizer temporaries."""
        return {
            "gradients": MASTER_BYTES * elements,
            "temporaries": MASTER_BYTES * self.setup.optimizer.num_temporaries(elements, elements),
        }

    def host_update_parts(self, elements: int) -> dict[str, int]:
        """Return the bytes of temporaries of an update in host memory."""
        # DeepSpeed's own CPU optimizers work in place.
        optimizer = self.setup.optimizer
        copies = 0 if optimizer.has_cpu_version else optimizer.loop_copies
        return {"temporaries": round(MASTER_BYTES * copies * elements)}

    def pending_gradient_parts(self, step: MicroBatchStep) -> dict[str, int]:
        """Return the bytes of gradients that exist but are not in the bucket yet."""
        return {
            "temporaries": self.element_bytes
            * zero_partitioning.num_pending_gradients(
                self.model, step, self.config.reduce_bucket_size
            )
        }

    def unbucketed_gradient_bytes(self, reduction: BucketReduction) -> int:
        """Return the bytes of gradients outside the bucket while one is reduced.

        These are the next gradient, a tied head's, which is complete only after the embedding's
        backward, and a large one, which is reduced in place.
        """
        at = reduction.next_parameter
        head = 0 if at is None or self._is_tied_head(at) else self.tied_head_size
        waits = 0 if at is None else at.num_elements + head
        large = reduction.num_in_bucket if self.exceeds_bucket(reduction) else 0
        return self.element_bytes * (waits + large)

    def exceeds_bucket(self, reduction: BucketReduction) -> bool:
        """Return whether it is a single parameter above the bucket size."""
        return reduction.num_in_bucket > self.config.reduce_bucket_size

    def _alive(
        self, reduction: BucketReduction, run: MicroBatchActivations, before: list[int]
    ) -> int:
        """Bytes of activations when a reduction begins, including those saved `before` its group.

        It begins when the gradient that does not fit exists: at the first moment of its group with
        at least that many gradients.
        """
        place = reduction.next_parameter
        if place is None or self._is_tied_head(place):
            return 0
        own = run.layers[place.group_index]
        # A closed form knows the gradients in the order of use, a reduction in the module's, in
        # which norms may come earlier or later.
        is_closed = self.model.depth == "closed form"
        shapes = self.model.groups[place.group_index].tensors if is_closed else ()
        vectors = sum(each.num_elements for each in shapes if each.trainable and each.is_vector)
        held_then = (
            moment.held_bytes
            for moment in own.gradient_moments or own.backward_moments  # the largest first
            if moment.num_grads >= reduction.num_done_in_group - vectors
        )
        held = next(held_then, own.input_grad_bytes)
        late = sum(zero_partitioning.late_trainable_sizes(self.model.groups))
        if place.group_index == 0 and reduction.num_done_in_group <= late:
            # A trace runs fewer blocks, and those of the whole model are all still saved.
            return max(held, before[-1])
        return before[place.group_index] + place.block_index * own.saved_bytes + held

    def _is_tied_head(self, place: TrainableParameter) -> bool:
        """True for the first parameter: its gradient is complete at the end of the backward."""
        return (
            self.model.tied
            and place == zero_partitioning.trainable_parameters(self.model.groups, tied=True)[0]
        )


def _is_before(other: BucketReduction, reduction: BucketReduction) -> bool:
    """True if the other reduction is not later and has at least the same activations."""
    if reduction.next_parameter is None or other.next_parameter is None:
        return reduction.next_parameter is None
    return (
        other.next_parameter.group_index == reduction.next_parameter.group_index
        and other.num_done_in_group <= reduction.num_done_in_group
    )


class Zero12Timeline(ZeroTimeline):
    """Stages 1 and 2, on the fullest rank.

    Every rank holds all parameters; the master copy, optimizer state and (stage 2) gradients are
    cut into equal partitions of one flat buffer. Ranks differ, since a rank keeps the whole
    gradient of each parameter that overlaps with its partition; the rank with the highest peak
    determines the estimate. Follows DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py.
    """

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        super().__init__(model, setup)
        self._cuts_gradients = setup.options.strategy.level == GRADIENT_PARTITIONING_STAGE
        self._reduces_in_backward = self._cuts_gradients or self.config.overlap_comm
        """True if gradients are reduced during the backward, not after it."""
        self._shares = zero_partitioning.partition_contents(
            model.groups, tied=model.tied, world_size=setup.world_size
        )
        self._max_touched = max(share.num_touched for share in self._shares)
        self._bucket = {
            "buffers": self.element_bytes * self.config.reduce_bucket_size * self.config.num_buffers
        }
        update = {} if self.is_offloaded else self.update_parts(self.partition_size)
        self.separate_parts = self._bucket | update
        self._accumulates_in_bucket = self.has_accumulated_gradients and not self._cuts_gradients
        """True if stage 1 accumulates into gradients of earlier micro-batches."""

    def device_parts(self) -> dict[str, int]:
        """All parameters, and unless offloaded the optimizer state."""
        parameters = sum(group.count * group.num_params for group in self.model.groups)
        whole = model_spec.quantized_param_bytes(self.model)
        parts = {"parameters": self.element_bytes * parameters + whole}
        if self.is_offloaded:
            # Buffer through which a parameter's gradients return from the host to be accumulated.
            return parts | {"buffers": self.element_bytes * self.largest}
        return parts | self.optimizer_state_parts()

    def host_parts(self) -> dict[str, int]:
        """Master copy, its gradients, optimizer state, and a 16-bit copy on its way back."""
        if not self.is_offloaded:
            return {}
        kept = self._max_touched if self.has_accumulated_gradients and self._cuts_gradients else 0
        return self.optimizer_state_parts() | {
            "parameters": self.element_bytes * self.partition_size,
            "gradients": MASTER_BYTES * self.partition_size + self.element_bytes * kept,
            "buffers": self.element_bytes * self.largest
            + self.page_locked(
                MASTER_BYTES * self.partition_size,  # the master copy
                MASTER_BYTES * self.partition_size,  # its gradients
                self.element_bytes * self.partition_size,
                self.element_bytes * self.largest,
            ),
        }

    def walk_allocations(
        self, steps: tuple[MicroBatchStep, ...]
    ) -> Iterator[tuple[int, NonActivationMemory]]:
        """Memory during forward, loss and backward."""
        for at, step in enumerate(steps):
            if step.phase not in {"before", "after"}:
                yield at, self.allocation_with(self._gradient_and_bucket_parts(step))

    @cached_property
    def visited_blocks(self) -> VisitedBlocks:
        """The last blocks, and those where the bucket appears or a rank keeps more gradients."""
        groups = self.model.groups
        if self._reduces_in_backward:
            begins = [
                (at.group_index, at.block_index)
                for kept in self._retained_gradients
                if (at := kept.reduction.next_parameter) and kept.after > kept.before
            ]
        else:
            begins = [(number, 0) for number in range(len(groups))]
        # The bucket is allocated with the first gradient.
        earliest = max(number for number, group in enumerate(groups) if group.trainable)
        begins.append((earliest, groups[earliest].count - 1))
        # Moments of a block may precede its gradient; those of the next block follow it.
        also = [(number, max(0, nth)) for number, at in begins for nth in (at, at - 1)]
        return model_spec.last_blocks_and(groups, also)

    def _earlier_gradient_bytes(self, num_elsewhere: int) -> int:
        """Gradient bytes of earlier micro-batches; `num_elsewhere` elements are stored elsewhere.

        In the last micro-batch, which is reduced, a gradient becomes a view of the bucket it is
        copied to, which frees its own tensor (stage_1_and_2.py:1457 to 1461).
        """
        return (
            self.element_bytes * (self.trainable - num_elsewhere)
            if self._accumulates_in_bucket
            else 0
        )

    def _gradient_and_bucket_parts(self, step: MicroBatchStep) -> dict[str, int]:
        """Bytes of gradients, and of the bucket that collects them."""
        finished = zero_partitioning.num_finished_gradients(self.model, step) + step.num_grads
        reduced = 0
        if step.phase == "backward" and self._reduces_in_backward:
            # A bucket is reduced when the next gradient exists, and so is a large gradient
            # (stage_1_and_2.py:1420, 1450).
            number = bisect_left(
                self._retained_gradients,
                finished - self.tied_head_size,
                key=lambda reduced_bytes: reduced_bytes.reduction.num_reduced,
            )
            reduced = self._retained_gradients[number - 1].after if number else 0
        reduced_bytes = self._reduced_gradient_bytes(reduced)
        if self._accumulates_in_bucket:
            # The bucket stays as well. The peak is in the last micro-batch or the one before.
            reduces = self._reduces_in_backward and step.phase == "backward"
            done = max(0, finished - self.tied_head_size) if reduces else 0
            gradients = max(
                self._earlier_gradient_bytes(0), self._earlier_gradient_bytes(done) + reduced_bytes
            )
            return self._bucket | {"gradients": gradients} | self.pending_gradient_parts(step)
        if step.phase != "backward" or not finished:
            return {"gradients": reduced_bytes}
        # The gradient of a tied head is not complete, so the bucket does not exist yet.
        bucket = self._bucket if finished > self.tied_head_size else {}
        if not self._reduces_in_backward:
            return bucket | {"gradients": self.element_bytes * finished}
        return bucket | {"gradients": reduced_bytes} | self.pending_gradient_parts(step)

    @cached_property
    def _retained_gradients(self) -> tuple[RetainedGradients, ...]:
        """Retained gradients of each reduction; offloaded gradients go to the host.

        Stage 2 clears what is in other ranks' partitions, stage 1 does not
        (stage_1_and_2.py:2261 to 2274). With offload, only the last micro-batch clears a rank's own
        (stage_1_and_2.py:2166 to 2183).
        """
        return zero_partitioning.retained_gradients(
            self.model.groups,
            tied=self.model.tied,
            world_size=self.setup.world_size,
            bucket=self.config.reduce_bucket_size,
            backward=self._reduces_in_backward,
            buffered=not self.is_offloaded,
            large_stay="elsewhere"
            if not self._cuts_gradients
            else "owners"
            if self._keeps_own
            else None,
        )

    @property
    def _keeps_own(self) -> bool:
        """True if a rank's own large gradients stay until the last micro-batch."""
        return self.is_offloaded and self.has_accumulated_gradients and self._cuts_gradients

    def _reduced_gradient_bytes(self, num_reduced: int) -> int:
        """Bytes of reduced gradients of this micro-batch and, in stage 2, of earlier ones."""
        own_bytes = self.element_bytes * num_reduced
        if not self.has_accumulated_gradients or not self._cuts_gradients or self.is_offloaded:
            return own_bytes
        return max(self.element_bytes * self._max_touched, 2 * own_bytes)

    def reduction_allocations(self) -> Iterator[tuple[BucketReduction, BytesByPart]]:
        """Yield the memory before and during each reduction.

        During the backward, activations shrink while more ranks hold gradients. After it (stage 1),
        all gradients exist and pass through the bucket from the first to the last.
        """
        largest_piece = max(share.largest_piece for share in self._shares)
        for kept in self._retained_gradients:
            reduction = kept.reduction
            following = reduction.next_parameter
            if self._reduces_in_backward:
                comes = 0 if following is None else following.num_elements
                around = self.unbucketed_gradient_bytes(reduction)
                around += self._earlier_gradient_bytes(reduction.num_reduced + comes)
            else:
                large = reduction.num_in_bucket if self.exceeds_bucket(reduction) else 0
                around = self.element_bytes * (self.trainable - reduction.num_reduced + large)
                reduction = reduction._replace(next_parameter=None)
            norm = NORM_BYTES * min(reduction.largest, largest_piece) * self.is_offloaded
            for elements, extra in (
                (kept.before, self.element_bytes * kept.reduction.num_copied),
                (kept.during, 0 if self._keeps_own else norm),
                (0 if self._keeps_own else kept.during, norm),  # in the last micro-batch
            ):
                mine = (
                    self._reduced_gradient_bytes(elements)
                    if self._reduces_in_backward
                    else self.element_bytes * elements
                )
                yield reduction, self._bucket | {"gradients": around + mine, "temporaries": extra}

    def update_allocations(self) -> Iterator[tuple[str, NonActivationMemory]]:
        """Gradient norm, flat fp32 gradients, optimizer step."""
        if self.is_offloaded:
            yield (
                "optimizer step",
                self.allocation_with(host=self.host_update_parts(self.partition_size)),
            )
            return
        reduced = {"gradients": self.element_bytes * self._max_touched}
        fullest = max(
            self._shares,
            key=lambda share: (
                self.element_bytes * share.num_touched + NORM_BYTES * share.largest_piece
            ),
        )
        norm = {
            "gradients": self.element_bytes * fullest.num_touched,
            "temporaries": NORM_BYTES * fullest.largest_piece,
        }
        yield "gradient norm", self.allocation_with(norm)
        cast = MASTER_BYTES if self.element_bytes != MASTER_BYTES else 0
        flat = {"temporaries": (self.element_bytes + cast) * self.partition_size}
        yield "gradients to fp32", self.allocation_with(reduced, flat)
        yield "optimizer step", self.allocation_with(self.update_parts(self.partition_size))
