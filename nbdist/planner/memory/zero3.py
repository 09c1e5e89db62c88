"""Memory timeline of DeepSpeed under ZeRO-3.

Parameters are partitioned one by one and gathered for use; reduced gradients and the bucket have
permanent buffers. Follows DeepSpeed 0.19.8, runtime/zero/stage3.py and
runtime/zero/partitioned_param_coordinator.py: at each module the coordinator gathers missing
parameters, prefetches the next ones, a bucket at a time and up to ``max_live_parameters``, and
releases those not used again within ``max_reuse_distance`` elements. `simulate_prefetch` applies
these rules parameter by parameter, in elements.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from nbdist.errors import PlanError
from nbdist.planner import model_spec
from nbdist.planner.memory import zero_partitioning
from nbdist.planner.memory.timeline import sum_parts
from nbdist.planner.memory.zero_common import (
    MASTER_BYTES,
    NORM_BYTES,
    PrefetchLimits,
    ZeroTimeline,
)
from nbdist.planner.model_spec import last_blocks_and

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbdist.planner.memory.timeline import BytesByPart, NonActivationMemory, TrainingSetup
    from nbdist.planner.memory.zero_partitioning import BucketReduction
    from nbdist.planner.model_spec import LayerGroup, MicroBatchStep, ModelSpec, VisitedBlocks

Direction = Literal["forward", "backward"]
GatherPoint = tuple[Direction, int, int]
"""Direction, group, index of the instance."""

_SWAP_BUFFERS = 4
_PARAM_BUFFERS = 5
_PARAMS_IN_HOST = 1e9
"""Defaults of NVMe offload (runtime/zero/offload_config.py)."""


class Zero3Timeline(ZeroTimeline):
    """Stage 3."""

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        """Simulate which parameters are gathered when."""
        if model_spec.has_int8_params(model):
            raise PlanError(
                "ZeRO-3 does not shard bitsandbytes' int8 weights: every rank keeps all of them"
                ' in addition to its share. Use zero1, zero2 or ddp, or quantize="nf4".'
            )
        super().__init__(model, setup)
        self._params_away = setup.options.offload_params
        self._on_nvme = setup.options.offload_device == "nvme"
        if not self.is_offloaded:
            update = self.update_parts(self._sub_group)
            self.separate_parts = sum_parts(
                (update, {"gradients": self.element_bytes * self.partition_size})
            )
        self._gathered = simulate_prefetch(
            model.groups,
            tied=model.tied,
            recompute=setup.options.activation_checkpointing,
            rules=self.config.prefetch_limits,
            element_bytes=self.element_bytes,
        )

    @cached_property
    def visited_blocks(self) -> VisitedBlocks:
        """Blocks to visit: only gathered bytes are not affine in a block's index."""
        return last_blocks_and(self.model.groups, self._gathered.peak_blocks)

    @cached_property
    def partition_size(self) -> int:
        """Elements of a rank's share of trainable parameters."""
        return self._share(zero_partitioning.trainable_param_sizes)

    def _share(self, sizes: Callable[[LayerGroup], tuple[int, ...]]) -> int:
        # Each parameter is partitioned separately.
        ranks = self.setup.world_size
        return sum(
            group.count * -(-size // ranks) for group in self.model.groups for size in sizes(group)
        )

    def device_parts(self) -> dict[str, int]:
        """Shares of parameters, gradients and optimizer state, and the bucket."""
        parts = {
            "buffers": self.element_bytes * self.config.reduce_bucket_size * self.config.num_buffers
        }
        scales = model_spec.quantized_param_bytes(self.model) - sum(self._graph_bytes.values())
        parts["parameters"] = scales
        if not self._params_away:
            parts["parameters"] += self._param_bytes
        if self.is_offloaded:
            return parts
        return (
            parts
            | self.optimizer_state_parts()
            | {"gradients": self.element_bytes * self.partition_size}
        )

    @cached_property
    def _param_bytes(self) -> int:
        frozen = self._share(zero_partitioning.frozen_param_sizes)
        quantized = self._share(lambda group: group.quantized_tensors)
        return self.element_bytes * (self.partition_size + frozen) + quantized

    @cached_property
    def _graph_bytes(self) -> dict[str, int]:
        """Quantized weights of a micro-batch without scales.

        bitsandbytes 0.50 keeps a gathered weight as an attribute of the graph (MatMul4Bit), so it
        lives until the variable that holds the output changes.
        """
        groups = self.model.groups
        return {"gathered": sum(group.count * sum(group.quantized_tensors) for group in groups)}

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
            return parts | ({"parameters": self._param_bytes} if self._params_away else {})
        swap_buffers = int(self.config.offload_optimizer.get("buffer_count", _SWAP_BUFFERS))
        parts["buffers"] = MASTER_BYTES * swap_buffers * self._sub_group
        if not self._params_away:
            return parts
        # Pinned buffers of parameters on NVMe, and parameters that may stay on the host.
        section = self.config.offload_param
        largest = max(group.largest for group in self.model.groups)
        buffers = int(section.get("buffer_count", _PARAM_BUFFERS))
        # nbdist.worker.engines.deepspeed sets the size of the buffers by the largest parameter.
        buffer_size = int(section.get("buffer_size", largest))
        num_elements = min(self.partition_size, int(section.get("max_in_cpu", _PARAMS_IN_HOST)))
        in_host = {
            "buffers": self.element_bytes * buffers * buffer_size,
            "parameters": self.element_bytes * num_elements,
        }
        return sum_parts((parts, in_host))

    @cached_property
    def _sub_group(self) -> int:
        """Elements updated at once: limited by the config, but at least one parameter."""
        ranks = self.setup.world_size
        return min(self.partition_size, max(self.config.sub_group_size, -(-self.largest // ranks)))

    def nvme_bytes(self) -> int:
        """Bytes of files on NVMe: optimizer state, and parameters if offloaded too."""
        if not self._on_nvme:
            return 0
        return sum(self.optimizer_state_parts().values()) + (
            self._param_bytes if self._params_away else 0
        )

    def walk_allocations(
        self, steps: tuple[MicroBatchStep, ...]
    ) -> Iterator[tuple[int, NonActivationMemory]]:
        """Gathered parameters and gradients during forward, loss and backward."""
        for at, step in enumerate(steps):
            tail = self.model.groups[step.group_index].role == "tail"
            place = (step.group_index, step.block_index)
            if step.phase == "loss":
                yield at, self.allocation_with(self._gathered_parts(self._gathered.num_at_loss))
            elif step.phase == "backward":
                peak = self._gathered.max_at.get(("backward", *place), 0)
                pending = self.pending_gradient_parts(step)
                yield at, self.allocation_with(self._gathered_parts(peak), pending)
            elif tail and step.phase == "forward":
                # The head is gathered before the logits exist.
                gathered = self._gathered.min_at.get(("forward", *place), 0)
                yield at, self.allocation_with(self._gathered_parts(gathered), self._graph_bytes)
            elif step.phase == "forward" or (tail and step.phase == "before"):
                peak = self._gathered.max_at.get(("forward", *place), 0)
                yield at, self.allocation_with(self._gathered_parts(peak), self._graph_bytes)

    def _gathered_parts(self, elements: int) -> dict[str, int]:
        if self.setup.num_shards == 1 and not self._params_away:
            return {}  # a parameter is a view of its only share (partition_parameters.py:61)
        return {"gathered": self.element_bytes * (self._gathered.num_persistent + elements)}

    def reduction_allocations(self) -> Iterator[tuple[BucketReduction, BytesByPart]]:
        """Buckets reduced during the backward, each copied for its reduction."""
        for reduction in zero_partitioning.bucket_reductions(
            self.model.groups,
            tied=self.model.tied,
            world_size=self.setup.world_size,
            bucket=self.config.reduce_bucket_size,
            backward=True,
        ):
            gathered = 0
            if reduction.next_parameter is not None:
                _, group_index, block_index = reduction.next_parameter
                gathered = self._gathered.max_at.get(("backward", group_index, block_index), 0)
            temporaries = 0
            if not self.exceeds_bucket(reduction):
                temporaries += self.element_bytes * reduction.num_in_bucket
            if self.is_offloaded:
                # The norm of an offloaded gradient share takes a copy in fp64.
                largest = min(reduction.num_in_bucket, self.largest)
                temporaries += NORM_BYTES * -(-largest // self.setup.world_size)
            parts = {
                "gradients": self.unbucketed_gradient_bytes(reduction),
                "temporaries": temporaries,
            }
            yield reduction, parts | self._gathered_parts(gathered)

    def update_allocations(self) -> Iterator[tuple[str, NonActivationMemory]]:
        """One group of parameters after another: fp32 gradients, optimizer step."""
        size = self._sub_group
        if self.is_offloaded:
            yield "optimizer step", self.allocation_with(host=self.host_update_parts(size))
            return
        cast = MASTER_BYTES if self.element_bytes != MASTER_BYTES else 0
        flat = {"temporaries": (self.element_bytes + cast) * size}
        kept = self._graph_bytes
        yield "gradients to fp32", self.allocation_with(flat, kept)
        yield "optimizer step", self.allocation_with(self.update_parts(size), kept)


# -- gathered parameters --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredParameters:
    """Elements on a rank in addition to its partition."""

    num_persistent: int
    """Elements that are always gathered."""
    max_at: Mapping[GatherPoint, int]
    """Peak while a group runs, including the flat tensors of its gathers."""
    min_at: Mapping[GatherPoint, int]
    """Elements when a group has everything it needs."""
    num_at_loss: int
    """Elements between forward and backward."""
    peak_blocks: tuple[tuple[int, int], ...]
    """Group and index where more is gathered than at all later ones in the same direction."""


@dataclass(frozen=True, slots=True)
class _ParameterUse:
    parameter: int
    size: int
    where: GatherPoint
    held: int
    """Elements of the result's size that it takes."""


@lru_cache(maxsize=64)
def simulate_prefetch(
    groups: tuple[LayerGroup, ...],
    *,
    tied: bool,
    recompute: bool,
    rules: PrefetchLimits,
    element_bytes: int = 2,
) -> GatheredParameters:
    """Return the gathered parameters over a micro-batch, from the third step on.

    Quantized weights are elements of one byte to DeepSpeed.

    Args:
        groups: groups of the model.
        tied: True if the first group also uses the largest parameter of the last one.
        recompute: True if the forward of blocks is recomputed before their backward.
        rules: limits from DeepSpeed's config.
        element_bytes: bytes of the elements in which the result is counted.
    """
    threshold = rules.param_persistence_threshold
    sizes = [
        [(size, size) for size in zero_partitioning.param_sizes(group)]
        + [(size, size // element_bytes) for size in group.quantized_tensors]
        for group in groups
    ]
    uses = _parameter_uses(groups, sizes, tied=tied, recompute=recompute, persist=threshold)
    replay = _CoordinatorReplay(uses, rules)
    num_at_loss = replay.run()
    directions: tuple[Direction, ...] = ("forward", "backward")
    peak_blocks = []
    for direction, (number, group) in itertools.product(directions, enumerate(groups)):
        most = -1
        for nth in reversed(range(group.count)):
            gathered = replay.most.get((direction, number, nth), 0)
            if gathered > most:
                peak_blocks.append((number, nth))
            most = max(most, gathered)
    return GatheredParameters(
        num_persistent=sum(
            group.count * sum(held for size, held in of_group if size <= threshold)
            for group, of_group in zip(groups, sizes, strict=True)
        ),
        max_at=replay.most,
        min_at=replay.least,
        num_at_loss=num_at_loss,
        peak_blocks=tuple(peak_blocks),
    )


def _parameter_uses(
    groups: tuple[LayerGroup, ...],
    sizes: list[list[tuple[int, int]]],
    *,
    tied: bool,
    recompute: bool,
    persist: int,
) -> list[_ParameterUse]:
    """Every use of a partitioned parameter, in the order of one micro-batch."""
    numbers: dict[tuple[int, int, int], int] = {}

    def uses_of_block(direction: Direction, group: int, index: int) -> list[_ParameterUse]:
        return [
            _ParameterUse(
                numbers.setdefault((group, index, position), len(numbers)),
                size,
                (direction, group, index),
                held,
            )
            for position, (size, held) in enumerate(sizes[group])
            if size > persist
        ]

    order = [(number, index) for number, group in enumerate(groups) for index in range(group.count)]
    uses = [use for position in order for use in uses_of_block("forward", *position)]
    head = max(uses_of_block("forward", len(groups) - 1, 0), key=lambda use: use.size, default=None)
    first = next((number for number, group in enumerate(groups) if group.trainable), 0)
    for number, index in reversed(order):
        if number < first and not recompute:
            break  # nothing before the first trainable parameter has a backward
        if recompute and groups[number].role == "block":
            uses += uses_of_block("backward", number, index)
        uses += reversed(uses_of_block("backward", number, index))
    if tied and head is not None:
        uses.insert(0, _ParameterUse(head.parameter, head.size, ("forward", 0, 0), head.held))
        if recompute or not first:
            uses.append(_ParameterUse(head.parameter, head.size, ("backward", 0, 0), head.held))
    return uses


class _GatherMessage:
    """Parameters gathered in one message, into one flat tensor."""

    __slots__ = ("copied", "size", "waiting")

    def __init__(self, parameters: set[int], size: int) -> None:
        self.waiting, self.size, self.copied = parameters, size, False


class _CoordinatorReplay:
    """One micro-batch of DeepSpeed's coordinator with a complete trace."""

    def __init__(self, uses: list[_ParameterUse], rules: PrefetchLimits) -> None:
        self.most: dict[GatherPoint, int] = {}
        self.least: dict[GatherPoint, int] = {}
        self._uses, self._rules = uses, rules
        self._before = [0, *accumulate(use.size for use in uses)]
        upcoming: dict[int, int] = {}
        self._next_use: dict[int, int] = {}
        """Index of a use -> index of the same parameter's next use."""
        for step in reversed(range(len(uses))):
            if uses[step].parameter in upcoming:
                self._next_use[step] = upcoming[uses[step].parameter]
            upcoming[uses[step].parameter] = step
        self._sizes = {use.parameter: use.size for use in uses}
        self._held_sizes = {use.parameter: use.held for use in uses}
        self._seen_until: dict[int, int] = {}
        self._gather_messages: dict[int, _GatherMessage] = {}
        self._gathered_parameters: set[int] = set()
        self._available = 0
        """Elements gathered or in flight, as DeepSpeed counts them."""
        self._held = 0
        """Elements of flat tensors and of the copies made from them."""
        self._queue = 0

    def run(self) -> int:
        """Simulate all uses; return the elements between forward and backward."""
        loss = 0
        self._look_ahead()  # in the model's own hook, before any of its modules
        for step, use in enumerate(self._uses):
            if use.where not in self.most:
                self._look_ahead()  # in the block's hook
            peak = self._fetch(use)
            if self._seen_until.get(use.parameter, -1) < step:  # not prefetched
                self._seen_until[use.parameter] = step
                self._queue = step + 1
            self._look_ahead()
            self.most[use.where] = max(self.most.get(use.where, 0), peak, self._held)
            self.least[use.where] = self._held
            self._release(step, use)
            if use.where[0] == "forward":
                loss = self._held
        return loss

    def _fetch(self, use: _ParameterUse) -> int:
        """Gather missing parameters and wait for them; return the peak meanwhile."""
        if use.parameter not in self._gathered_parameters:
            self._gather({use.parameter})
        message = self._gather_messages.pop(use.parameter, None)
        if message is None:
            return self._held
        if not message.copied:
            # Each parameter is copied out of the flat tensor.
            message.copied = True
            self._held += message.size
        peak = self._held
        message.waiting.discard(use.parameter)
        if not message.waiting:
            # DeepSpeed keeps the flat tensor until the last of its parameters is fetched.
            self._held -= message.size
        return peak

    def _gather(self, parameters: set[int]) -> None:
        held = sum(self._held_sizes[parameter] for parameter in parameters)
        self._gathered_parameters |= parameters
        self._gather_messages |= dict.fromkeys(parameters, _GatherMessage(set(parameters), held))
        self._available += sum(self._sizes[parameter] for parameter in parameters)
        self._held += held

    def _look_ahead(self) -> None:
        """Prefetch; parameters that are already gathered are skipped and count as fetched."""
        num_free = min(
            self._rules.max_live_parameters - self._available, self._rules.prefetch_bucket_size
        )
        parameters: set[int] = set()
        size = 0
        while self._queue < len(self._uses) and size < num_free:
            ahead = self._uses[self._queue]
            self._seen_until[ahead.parameter] = self._queue
            self._queue += 1
            if (
                ahead.parameter not in self._gathered_parameters
                and ahead.parameter not in parameters
            ):
                parameters.add(ahead.parameter)
                size += ahead.size
        if parameters:
            self._gather(parameters)

    def _release(self, step: int, use: _ParameterUse) -> None:
        """Release a parameter, unless its next use is near or was counted as fetched."""
        if self._seen_until[use.parameter] > step:
            return
        later = self._next_use.get(step)
        if (
            later is not None
            and self._before[later] - self._before[step + 1] < self._rules.max_reuse_distance
        ):
            return
        self._gathered_parameters.discard(use.parameter)
        self._available -= use.size
        # A quantized weight, which takes less than its size in elements, stays in the graph.
        self._held -= use.held if use.held == use.size else 0
