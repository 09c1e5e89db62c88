"""Memory timeline of DeepSpeed under ZeRO-3.

Parameters are partitioned one by one and gathered for use (`zero3_prefetch`); reduced gradients and
the bucket have permanent buffers. Follows DeepSpeed 0.19.8, runtime/zero/stage3.py.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from nbdist.planner.memory import partitioning, zero3_prefetch
from nbdist.planner.memory.timeline import running_maxima, sum_parts
from nbdist.planner.memory.zero_common import MASTER_BYTES, NORM_BYTES, ZeroTimeline
from nbdist.planner.model_spec import last_blocks_and

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.planner.memory.partitioning import BucketReduction
    from nbdist.planner.memory.timeline import Allocation, BytesByPart
    from nbdist.planner.memory.training_setup import TrainingSetup
    from nbdist.planner.memory.zero3_prefetch import GatherPoint, PrefetchLimits
    from nbdist.planner.model_spec import LayerGroup, ModelSpec, VisitedBlocks, WalkStep

_SWAP_BUFFERS = 4
_PARAM_BUFFERS = 5
_PARAM_BUFFER = 1e8
_PARAMS_IN_HOST = 1e9
"""Defaults of NVMe offload (runtime/zero/offload_config.py)."""


class Zero3Timeline(ZeroTimeline):
    """Stage 3."""

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        """Simulate which parameters are gathered when."""
        super().__init__(model, setup)
        self._params_away = setup.options.offload_params
        self._on_nvme = setup.options.offload_device == "nvme"
        self._gathered = zero3_prefetch.simulate_prefetch(
            model.groups,
            tied=model.tied,
            recompute=setup.options.activation_checkpointing,
            rules=self.config.prefetch_limits,
        )

    @cached_property
    def visited_blocks(self) -> VisitedBlocks:
        """Blocks to visit: only gathered bytes are not affine in a block's index."""
        return last_blocks_and(self.model.groups, self._gathered.peak_blocks)

    @cached_property
    def partition_size(self) -> int:
        """Elements of a rank's share; each parameter is partitioned separately."""
        return self._share(partitioning.trainable_param_sizes)

    def _share(self, sizes: Callable[[LayerGroup], tuple[int, ...]]) -> int:
        """Elements of one rank's share of parameters."""
        ranks = self.setup.world_size
        return sum(
            group.count * -(-size // ranks) for group in self.model.groups for size in sizes(group)
        )

    def device_parts(self) -> dict[str, int]:
        """Shares of parameters, gradients and optimizer state, and the bucket."""
        parts = {
            "buffers": self.element_bytes * self.config.reduce_bucket_size * self.config.num_buffers
        }
        if not self._params_away:
            parts["parameters"] = self._parameters()
        if self.is_offloaded:
            return parts
        return (
            parts
            | self.optimizer_state_parts()
            | {"gradients": self.element_bytes * self.partition_size}
        )

    def _parameters(self) -> int:
        """Bytes of a rank's share of all parameters."""
        return self.element_bytes * (
            self.partition_size + self._share(partitioning.frozen_param_sizes)
        )

    def host_parts(self) -> dict[str, int]:
        """Offloaded memory on the host, including buffers for NVMe."""
        if not self.is_offloaded:
            return {}
        # Reduced gradients in the 16-bit type, and in fp32 for the step.
        parts = {"gradients": (self.element_bytes + MASTER_BYTES) * self.partition_size}
        if not self._on_nvme:
            locked = self.page_locked(
                self.element_bytes * self.partition_size, MASTER_BYTES * self.partition_size
            )
            parts |= self.optimizer_state_parts() | {"buffers": locked}
            return parts | ({"parameters": self._parameters()} if self._params_away else {})
        parts["buffers"] = (
            MASTER_BYTES * self._swap_buffers() * min(self.partition_size, self._sub_group())
        )
        return sum_parts((parts, self._params_in_host())) if self._params_away else parts

    def _sub_group(self) -> int:
        """Elements updated at once: limited by the config, but at least one parameter."""
        ranks = self.setup.world_size
        return min(self.partition_size, max(self.config.sub_group_size, -(-self.largest // ranks)))

    def _swap_buffers(self) -> int:
        return int(self.config.offload_optimizer.get("buffer_count", _SWAP_BUFFERS))

    def _params_in_host(self) -> dict[str, int]:
        """Pinned buffers of parameters on NVMe, and parameters that may stay on the host."""
        section = self.config.offload_param
        largest = max(group.largest for group in self.model.groups)
        buffers = int(section.get("buffer_count", _PARAM_BUFFERS))
        kept = min(self.partition_size, int(section.get("max_in_cpu", _PARAMS_IN_HOST)))
        return {
            # nbdist.worker.engines.deepspeed sets their size by the largest parameter.
            "buffers": self.element_bytes * buffers * int(section.get("buffer_size", largest)),
            "parameters": self.element_bytes * kept,
        }

    def nvme_bytes(self) -> int:
        """Bytes of files on NVMe: optimizer state, and parameters if offloaded too."""
        if not self._on_nvme:
            return 0
        return sum(self.optimizer_state_parts().values()) + (
            self._parameters() if self._params_away else 0
        )

    def walk_allocations(self, steps: tuple[WalkStep, ...]) -> Iterator[tuple[int, Allocation]]:
        """Gathered parameters and gradients during forward, loss and backward."""
        for at, step in enumerate(steps):
            for parts in self._during(step):
                yield at, self.allocation_with(*parts)

    def _during(self, step: WalkStep) -> Iterator[tuple[BytesByPart, ...]]:
        """Additional memory at a step."""
        tail = self.model.groups[step.group_index].role == "tail"
        if step.phase == "loss":
            yield (self._gather(self._gathered.num_at_loss),)
        elif step.phase == "backward":
            yield (
                self._at_work(("backward", step.group_index, step.block_index)),
                self.pending_gradient_parts(step),
            )
        elif step.phase != "after":
            where: GatherPoint = ("forward", step.group_index, step.block_index)
            # The head is gathered before the logits exist.
            if tail and step.phase == "forward":
                yield (self._gather(self._gathered.min_at.get(where, 0)),)
            elif tail or step.phase == "forward":
                yield (self._at_work(where),)

    def _at_work(self, where: GatherPoint) -> dict[str, int]:
        return self._gather(self._gathered.max_at.get(where, 0))

    def _gather(self, elements: int) -> dict[str, int]:
        return {"gathered": self.element_bytes * (self._gathered.num_persistent + elements)}

    def reduction_allocations(self) -> Iterator[tuple[BucketReduction, BytesByPart]]:
        """Buckets reduced during the backward, each copied for its reduction."""
        candidates = _telling(
            self.model.groups,
            tied=self.model.tied,
            world_size=self.setup.world_size,
            bucket=self.config.reduce_bucket_size,
            recompute=self.setup.options.activation_checkpointing,
            rules=self.config.prefetch_limits,
        )
        for reduction, gathered in candidates:
            copied = (
                0
                if self.exceeds_bucket(reduction)
                else self.element_bytes * reduction.num_in_bucket
            )
            temporaries = copied + self._norm(reduction)
            parts = {
                "gradients": self.unbucketed_gradient_bytes(reduction),
                "temporaries": temporaries,
            }
            yield reduction, parts | self._gather(gathered)

    def _norm(self, reduction: BucketReduction) -> int:
        """Bytes of the fp64 copy of an offloaded gradient share for its norm."""
        if not self.is_offloaded:
            return 0
        return NORM_BYTES * -(-min(reduction.num_in_bucket, self.largest) // self.setup.world_size)

    def update_allocations(self) -> Iterator[tuple[str, Allocation]]:
        """One group of parameters after another: fp32 gradients, optimizer step."""
        size = self._sub_group()
        if self.is_offloaded:
            yield "optimizer step", self.allocation_with(host=self.host_update_parts(size))
            return
        cast = MASTER_BYTES if self.element_bytes != MASTER_BYTES else 0
        flat = {"temporaries": (self.element_bytes + cast) * size}
        yield "gradients to fp32", self.allocation_with(flat)
        yield "optimizer step", self.allocation_with(self.update_parts(size))


@lru_cache(maxsize=64)
def _telling(
    groups: tuple[LayerGroup, ...],
    *,
    tied: bool,
    world_size: int,
    bucket: int,
    recompute: bool,
    rules: PrefetchLimits,
) -> tuple[tuple[BucketReduction, int], ...]:
    """Reductions that may be the peak, with the elements gathered at that time."""
    most = zero3_prefetch.simulate_prefetch(
        groups, tied=tied, recompute=recompute, rules=rules
    ).max_at
    reductions = partitioning.bucket_reductions(
        groups, tied=tied, world_size=world_size, bucket=bucket, backward=True
    )
    pairs = [
        (
            reduction,
            0
            if reduction.next_parameter is None
            else most.get(
                (
                    "backward",
                    reduction.next_parameter.group_index,
                    reduction.next_parameter.block_index,
                ),
                0,
            ),
        )
        for reduction in reductions
    ]
    return tuple(
        running_maxima(
            (partitioning.equivalence_key(reduction), (gathered,), (reduction, gathered))
            for reduction, gathered in pairs
        )
    )
