"""Memory timeline of DeepSpeed under ZeRO-1 and 2; stage 3 is in `zero3`.

Every rank holds all parameters; the master copy, optimizer state and (stage 2) gradients are cut
into equal partitions of one flat buffer. Ranks differ, since a rank keeps the whole gradient of
each parameter that overlaps with its partition; the rank with the highest peak determines the
estimate.
Follows DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.planner import model_spec
from nbdist.planner.memory import zero_partitioning
from nbdist.planner.memory.zero_common import (
    GRADIENT_PARTITIONING_STAGE,
    MASTER_BYTES,
    NORM_BYTES,
    ZeroTimeline,
)
from nbdist.planner.model_spec import last_blocks_and

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.memory.timeline import BytesByPart, NonActivationMemory, TrainingSetup
    from nbdist.planner.memory.zero_partitioning import BucketReduction, RetainedGradients
    from nbdist.planner.model_spec import MicroBatchStep, ModelSpec, VisitedBlocks


class Zero12Timeline(ZeroTimeline):
    """Stages 1 and 2, on the fullest rank."""

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        super().__init__(model, setup)
        self._cuts_gradients = setup.options.strategy.level == GRADIENT_PARTITIONING_STAGE
        self._reduces_in_backward = self._cuts_gradients or self.config.overlap_comm
        """True if gradients are reduced during the backward, not after it."""
        self._shares = zero_partitioning.partition_contents(
            model.groups, tied=model.tied, world_size=setup.world_size
        )
        self._most_touched = max(share.num_touched for share in self._shares)
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
        kept = self._most_touched if self.has_accumulated_gradients and self._cuts_gradients else 0
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
        return last_blocks_and(groups, also)

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
        return max(self.element_bytes * self._most_touched, 2 * own_bytes)

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
        reduced = {"gradients": self.element_bytes * self._most_touched}
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
