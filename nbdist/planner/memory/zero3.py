"""Memory timeline of DeepSpeed under ZeRO-3.

Parameters are partitioned one by one and gathered for use; reduced gradients and the bucket have
permanent buffers. Follows DeepSpeed 0.19.8, runtime/zero/stage3.py and
runtime/zero/partitioned_param_coordinator.py: at each module the coordinator gathers missing
parameters, prefetches the next ones, a bucket at a time and up to ``max_live_parameters``, and
releases those not used again within ``max_reuse_distance`` elements. `simulate_prefetch` applies
these rules module by module, in elements.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from nbdist.errors import PlanError
from nbdist.planner import model_spec
from nbdist.planner.memory import zero_partitioning
from nbdist.planner.memory.timeline import sum_parts
from nbdist.planner.memory.zero12 import (
    MASTER_BYTES,
    NORM_BYTES,
    PrefetchLimits,
    ZeroTimeline,
)
from nbdist.planner.model_spec import last_blocks_and

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from nbdist.planner.memory.timeline import BytesByPart, NonActivationMemory, TrainingSetup
    from nbdist.planner.memory.zero_partitioning import BucketReduction
    from nbdist.planner.model_spec import (
        LayerGroup,
        MicroBatchActivations,
        MicroBatchStep,
        ModelSpec,
        VisitedBlocks,
    )

Direction = Literal["forward", "backward"]
GatherPoint = tuple[Direction, int, int]
"""Direction, group, index of the instance."""
_Key = tuple[int, int, int]
"""Of a parameter: group, index of the instance, index in the group."""

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
        self._are_params_offloaded = setup.options.offload_params
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
            accumulates=self.has_accumulated_gradients,
        )

    @cached_property
    def visited_blocks(self) -> VisitedBlocks:
        """Blocks to visit: only gathered bytes are not affine in a block's index."""
        return last_blocks_and(self.model.groups, self._gathered.peak_blocks())

    @cached_property
    def partition_size(self) -> int:
        """Elements of a rank's share of trainable parameters."""
        return self._share(zero_partitioning.trainable_param_sizes)

    def _share(self, sizes: Callable[[LayerGroup], Iterable[int]]) -> int:
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
        if not self._are_params_offloaded:
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
        frozen = self._share(
            lambda group: (each.num_elements for each in group.tensors if not each.trainable)
        )
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
            return parts | ({"parameters": self._param_bytes} if self._are_params_offloaded else {})
        swap_buffers = int(self.config.offload_optimizer.get("buffer_count", _SWAP_BUFFERS))
        parts["buffers"] = MASTER_BYTES * swap_buffers * self._sub_group
        if not self._are_params_offloaded:
            return parts
        # Pinned buffers of parameters on NVMe, and parameters that may stay on the host.
        section = self.config.offload_param
        tensors = (shape for group in self.model.groups for shape in group.tensors)
        largest = max(shape.num_elements for shape in tensors)
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
            self._param_bytes if self._are_params_offloaded else 0
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
                is_block = self.model.groups[step.group_index].role == "block"
                new = None if self.model.depth == "traced" and is_block else step.new_grads
                gathered = self._gathered.during_backward(*place, step.num_grads, new)
                pending = self.pending_gradient_parts(step)
                yield at, self.allocation_with(self._gathered_parts(gathered), pending)
            elif tail and step.phase == "forward":
                # The head is gathered before the logits exist.
                gathered = self._gathered.min_at.get(("forward", *place), 0)
                yield at, self.allocation_with(self._gathered_parts(gathered), self._graph_bytes)
            elif tail and step.phase == "before":
                peak = max(self._gathered.max_at.get(("forward", *place), (0,)))
                yield at, self.allocation_with(self._gathered_parts(peak), self._graph_bytes)

    def other_allocations(
        self, run: MicroBatchActivations
    ) -> Iterator[tuple[str, NonActivationMemory, int]]:
        """Yield the forward of all groups but the tail, then what every stage has."""
        before = model_spec.saved_bytes_before_groups(self.model, run, in_forward=True)
        for (group, index), allocations in self._in_forward.items():
            name = model_spec.step_name("forward", self.model.groups[group], index)
            own = run.layers[group]
            saved = before[group] + index * (own.saved_bytes + own.kept_bytes)
            pairs = [*zip(own.forward_peaks, allocations, strict=False)]
            if len(own.forward_peaks) != len(allocations):
                pairs = [(max(own.forward_peaks), max(allocations, key=attrgetter("total")))]
            for peak, allocation in pairs:
                yield name, allocation, saved + peak
        yield from super().other_allocations(run)

    @cached_property
    def _in_forward(self) -> dict[tuple[int, int], list[NonActivationMemory]]:
        """Memory by group and index in the forward, from the use of each matrix on."""
        return {
            (group, index): [
                self.allocation_with(self._gathered_parts(gathered), self._graph_bytes)
                for gathered in self._gathered.max_at.get(("forward", group, index), (0,))
            ]
            for group, indices in enumerate(self.visited_blocks)
            for index in indices
            if self.model.groups[group].role != "tail"
        }

    def _gathered_parts(self, elements: int) -> dict[str, int]:
        if self.setup.num_shards == 1 and not self._are_params_offloaded:
            return {}  # a parameter is a view of its only share (partition_parameters.py:61)
        return {"gathered": self.element_bytes * (self._gathered.num_persistent + elements)}

    def reduction_allocations(self) -> Iterator[tuple[BucketReduction, BytesByPart]]:
        """Buckets reduced during the backward, each copied for its reduction."""
        for reduction in zero_partitioning.bucket_reductions(
            zero_partitioning.with_biases_first(self.model.groups),
            tied=self.model.tied,
            world_size=self.setup.world_size,
            bucket=self.config.reduce_bucket_size,
            backward=True,
        ):
            gathered = 0
            if reduction.next_parameter is not None:
                _, group, index = reduction.next_parameter
                done = reduction.num_done_in_group
                gathered = self._gathered.during_backward(group, index, done)
            temporaries = 0
            # A gradient that is reduced alone is copied only to be padded.
            if (
                not self.exceeds_bucket(reduction)
                or reduction.num_in_bucket % self.setup.world_size
            ):
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


class _Parameter(NamedTuple):
    position: int
    """Index in its group."""
    matrix: int
    """Index among the group's matrices; a vector counts as the one before it."""
    size: int
    held: int
    """Elements of the result's size that it takes."""
    trainable: bool = False
    is_last: bool = False
    """True for weight and bias of the last linear layer."""
    module: int = 0
    """Position of the first parameter of its module: of the weight that a bias belongs to."""
    num_calls_before: int = 0
    """Modules without parameters that are called before its module; each prefetches, too."""


@dataclass(frozen=True, slots=True)
class _ParameterUse:
    key: _Key
    parameter: _Parameter
    where: GatherPoint
    stays: bool = False
    """True if a module uses it until the next use."""
    num_grads: int = 0
    """In a backward, elements of the instance's gradients that are made with its own."""
    releases: tuple[_Key, ...] = ()
    """Other parameters that are released after it."""


@lru_cache(maxsize=64)
def simulate_prefetch(
    groups: tuple[LayerGroup, ...],
    *,
    tied: bool,
    recompute: bool,
    rules: PrefetchLimits,
    element_bytes: int = 2,
    accumulates: bool = False,
) -> GatheredParameters:
    """Return what is gathered over a micro-batch, from the third step on.

    Quantized weights are elements of one byte to DeepSpeed.

    Args:
        groups: groups of the model.
        tied: True if the first group also uses the largest parameter of the last one.
        recompute: True if the forward of blocks is recomputed before their backward.
        rules: limits from DeepSpeed's config.
        element_bytes: bytes of the elements in which the result is counted.
        accumulates: True if the second micro-batch comes before an optimizer step.
    """
    uses = _parameter_uses(groups, element_bytes, tied=tied, recompute=recompute)
    blocks = {number for number, group in enumerate(groups) if group.role == "block"}
    return GatheredParameters(uses, rules, blocks, accumulates=accumulates)


def _parameters(group: LayerGroup, element_bytes: int) -> list[_Parameter]:
    """Parameters of one instance of a group."""
    tensors = group.tensors
    sizes = [(each.num_elements, each.num_elements, each.trainable) for each in tensors]
    sizes += [(size, size // element_bytes, False) for size in group.quantized_tensors]
    vectors = [n for n, shape in enumerate(tensors) if shape.is_vector]
    num_used = accumulate(position not in vectors for position in range(len(sizes)))
    found = [
        _Parameter(position, max(0, number - 1), *each, module=position)
        for position, (number, each) in enumerate(zip(num_used, sizes, strict=True))
    ]
    last = max((n for n in range(len(found)) if n not in vectors), default=None)
    if last is not None and not group.ends_with_dropout:
        found[last] = found[last]._replace(is_last=True)
    for position, shape in enumerate(tensors):
        if shape.num_calls_before:
            found[position] = found[position]._replace(num_calls_before=shape.num_calls_before)
        if shape.is_bias:
            weight = found[position - 1]
            found[position] = found[position]._replace(is_last=weight.is_last, module=weight.module)
    return found


def _parts(groups: tuple[LayerGroup, ...], element_bytes: int) -> list[list[_Parameter]]:
    """Parameters of each group, and at the end those of the root that are used after the blocks.

    The gradients of the latter count as the root's.
    """
    parts = [_parameters(group, element_bytes) for group in groups]
    root, end = groups[0], len(groups[0].tensors)
    late = parts[0][end - root.num_late_tensors : end]
    del parts[0][end - root.num_late_tensors : end]
    if root.tied_tensor is not None:
        late.append(parts[0][root.tied_tensor])
    return [*parts, [each._replace(trainable=False, is_last=False) for each in late]]


def _parameter_uses(
    groups: tuple[LayerGroup, ...], element_bytes: int, *, tied: bool, recompute: bool
) -> list[_ParameterUse]:
    """Every use of a parameter, in the order of one micro-batch."""
    tail, late = len(groups) - 1, len(groups)
    parts = _parts(groups, element_bytes)
    num_late = sum(zero_partitioning.late_trainable_sizes(groups))

    def uses_of_block(direction: Direction, part: int, index: int) -> list[_ParameterUse]:
        return [
            _ParameterUse(
                (part % late, index, each.position), each, (direction, min(part, tail), index)
            )
            for each in parts[part]
        ]

    order = [(number, index) for number, group in enumerate(groups) for index in range(group.count)]
    if [group.role for group in groups[:2]] == ["root", "embedding"]:
        order[:2] = order[1::-1]  # positions are looked up after tokens
    order.insert(-1, (late, 0))
    uses = [use for position in order for use in uses_of_block("forward", *position)]
    head = max(uses_of_block("forward", tail, 0), key=lambda use: use.parameter.size, default=None)
    first = next((number for number, group in enumerate(groups) if group.trainable), 0)
    for part, index in reversed(order):
        if part < first and not recompute:
            break  # nothing before the first trainable parameter has a backward
        uses += _uses_in_backward(
            uses_of_block("backward", part, index),
            num_grads=0 if part else num_late,
            recompute=recompute and part != late and groups[part].role == "block",
        )
    if tied and head is not None:
        uses.insert(0, replace(head, where=("forward", 0, 0)))
        if recompute or not first or groups[-1].trainable:
            uses.append(replace(head, where=("backward", 0, 0)))
    return uses


def _uses_in_backward(
    uses: list[_ParameterUse], *, num_grads: int, recompute: bool
) -> list[_ParameterUse]:
    """Order the uses of an instance as in its backward, after `num_grads` elements of gradients."""
    uses = sorted(uses, key=lambda use: use.parameter.is_last)
    found = []
    for _, same in groupby(reversed(uses), lambda use: use.parameter.module):
        for use in reversed([*same]):  # as DeepSpeed lists them
            num_grads += use.parameter.size if use.parameter.trainable else 0
            found.append(replace(use, num_grads=num_grads))
    if not recompute:
        return found
    # The last layer is gathered for its backward, which begins with the forward of all. What is
    # frozen is released together with that layer (`ds_recompute_parameters`).
    num_last = sum(use.parameter.is_last for use in uses)
    frozen = tuple(use.key for use in uses if not use.parameter.trainable)
    if num_last:
        found[num_last - 1] = replace(found[num_last - 1], releases=frozen)
    uses.sort(key=lambda use: not use.parameter.is_last)
    return [*(replace(use, stays=use.parameter.is_last) for use in uses), *found]


class _BackwardUse(NamedTuple):
    num_grads: int
    """Elements of the instance's gradients that are made with its own."""
    held: int
    """Elements gathered."""
    held_after: int
    """The same after the parameter's release."""


class _GatherMessage:
    """Parameters gathered in one message, into one flat tensor; a single one as it is."""

    __slots__ = ("copied", "is_flat", "size", "waiting")

    def __init__(self, parameters: set[_Key], size: int) -> None:
        self.waiting, self.size, self.copied = parameters, size, False
        self.is_flat = len(parameters) > 1


class GatheredParameters:
    """Elements on a rank in addition to its partition, as DeepSpeed's coordinator gathers them."""

    def __init__(
        self,
        uses: list[_ParameterUse],
        rules: PrefetchLimits,
        blocks: Collection[int],
        *,
        accumulates: bool,
    ) -> None:
        """Simulate two micro-batches with a complete trace.

        DeepSpeed caches for good what the first one releases (an `lru_cache` around
        `__params_to_release`). Parameters that persist are available from the first optimizer step.
        """
        self._uses, self._rules, self._blocks = uses, rules, blocks
        self._before = [0, *accumulate(use.parameter.size for use in uses)]
        upcoming: dict[_Key, int] = {}
        self._next_use: dict[int, int] = {}
        """Index of a use -> index of the same parameter's next use."""
        for step in reversed(range(len(uses))):
            if uses[step].key in upcoming:
                self._next_use[step] = upcoming[uses[step].key]
            upcoming[uses[step].key] = step
        self._sizes = {use.key: use.parameter.size for use in uses}
        self._held_sizes = {use.key: use.parameter.held for use in uses}
        self._persistent = {
            use.key for use in uses if use.parameter.size <= rules.param_persistence_threshold
        }
        self._releases: dict[int, bool] = {}
        """Whether a parameter is released after a use."""
        self.num_persistent = sum(self._held_sizes[parameter] for parameter in self._persistent)
        """Elements that are always gathered."""
        self._run_micro_batch(available=set() if accumulates else self._persistent)
        self._run_micro_batch(available=self._persistent)

    def during_backward(
        self, group: int, index: int, num_grads: int, num_new: int | None = None
    ) -> int:
        """Return the most elements while an instance has made this many gradient elements.

        `num_new` of them are just being made: gradients of a weight and its bias, which are
        released after both. If it is 0, the last ones are released; if None, they may not be.
        """
        uses = self.in_backward.get((group, index))
        if not uses:
            return 0
        if num_new == 0 and num_grads:
            same = [use for use in uses if use.num_grads == num_grads]
            if same and group not in self._blocks and same[-1:] == uses[-2:-1]:
                return uses[-1].held  # an embedding makes its gradient as a whole
            if same:
                return max([same[0].held_after, *(use.held for use in same[1:])])
        now = next(
            (use.num_grads for use in uses if use.num_grads >= num_grads), uses[-1].num_grads
        )
        first = min(now, num_grads - (num_new or 0) + 1)
        return max(use.held for use in uses if first <= use.num_grads <= now)

    def peak_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield group and index where more is gathered than later in a direction of the group."""
        most: dict[tuple[Direction, int, int], int] = {}
        for (direction, group, index), peaks in sorted(self.max_at.items(), reverse=True):
            for matrix, gathered in enumerate(peaks):
                if gathered > most.get((direction, group, matrix), -1):
                    most[direction, group, matrix] = gathered
                    yield group, index

    def _modules(self) -> Iterator[tuple[int, list[_ParameterUse]]]:
        """Yield what one module fetches at a time, and the index of its first use."""
        start = 0
        for _, same in groupby(
            self._uses, lambda use: (use.where, use.key[:2], use.parameter.module, use.stays)
        ):
            uses = list(same)
            yield start, uses
            start += len(uses)

    def _run_micro_batch(self, available: set[_Key]) -> None:
        self.max_at: dict[GatherPoint, list[int]] = defaultdict(list)
        """Peak while an instance uses each of its matrices, with the flat tensors of gathers."""
        self.min_at: dict[GatherPoint, int] = {}
        """Elements when an instance has everything it needs."""
        self.in_backward: dict[tuple[int, int], list[_BackwardUse]] = defaultdict(list)
        """Uses by each instance in its backward, in order."""
        self.num_at_loss = 0
        """Elements between forward and backward."""
        self._seen_until: dict[_Key, int] = {}
        self._gather_messages: dict[_Key, _GatherMessage] = {}
        self._gathered_parameters = set(available)
        self._available = 0
        """Elements gathered or in flight, as DeepSpeed counts them."""
        self._num_held = 0
        """Elements of flat tensors and of the copies made from them."""
        self._in_graph: set[_Key] = set()
        """Quantized weights gathered in the forward, which the graph keeps."""
        self._saved_until: set[int] = set()
        """Uses until which a recomputed graph keeps a parameter that is released."""
        self._queue = 0
        self._look_ahead()  # in the hook of the model, before any of its modules
        self._look_ahead()  # in that of its base model
        for start, uses in self._modules():
            where, matrix = uses[-1].where, uses[-1].parameter.matrix
            direction, group, index = where
            if direction == "forward":
                self._in_graph |= {
                    use.key for use in uses if use.parameter.held != use.parameter.size
                }
            if group in self._blocks and where not in self.max_at:
                self._look_ahead()  # in the block's hook
                self._look_ahead()  # in that of its attention
            if direction == "forward":
                self._look_ahead_in_calls(uses)
            peak = self._fetch(start, uses)
            peaks = self.max_at[where]
            peaks += [0] * (matrix + 1 - len(peaks))
            peaks[matrix] = max(peaks[matrix], self._num_held)
            before = max(0, matrix - 1)  # what it holds is still alive during a fetch
            peaks[before] = max(peaks[before], peak)
            self.min_at[where] = self._num_held
            held = self._num_held
            for step, use in enumerate(uses, start):
                self._after_use(step, use)
            if direction == "backward":
                num_grads = uses[-1].num_grads
                self._look_ahead_in_calls(uses)
                self.in_backward[group, index].append(_BackwardUse(num_grads, held, self._num_held))
            else:
                self.num_at_loss = self._num_held

    def _after_use(self, step: int, use: _ParameterUse) -> None:
        """Release what is not needed soon."""
        if self._releases.setdefault(step, self._is_released(step, use)):
            self._release(use.key)
            later = self._next_use.get(step)
            if use.parameter.trainable and later and self._uses[later].where == use.where:
                # Recomputed: torch.utils.checkpoint has saved it detached, so its memory stays.
                self._num_held += use.parameter.held
                self._saved_until.add(later)
        if step in self._saved_until:
            self._num_held -= use.parameter.held
        for parameter in use.releases:
            if parameter not in self._persistent:
                self._release(parameter)

    def _look_ahead_in_calls(self, uses: list[_ParameterUse]) -> None:
        for _ in range(sum(use.parameter.num_calls_before for use in uses)):
            self._look_ahead()

    def _fetch(self, start: int, uses: list[_ParameterUse]) -> int:
        """Gather a module's missing parameters, wait for all and prefetch; return the peak."""
        missing = {use.key for use in uses} - self._gathered_parameters
        if missing:
            self._gather(missing)
        peak = self._num_held
        for use in uses:
            message = self._gather_messages.pop(use.key, None)
            if message is None or not message.is_flat:
                continue
            if not message.copied:
                # Each parameter is copied out of the flat tensor.
                message.copied = True
                self._num_held += message.size
            peak = max(peak, self._num_held)
            message.waiting.discard(use.key)
            if not message.waiting:
                # DeepSpeed keeps the flat tensor until the last of its parameters is fetched.
                self._num_held -= message.size
        for step, use in enumerate(uses, start):
            if self._seen_until.get(use.key, -1) < step:  # not prefetched
                self._seen_until[use.key] = step
                self._queue = step + 1
        self._look_ahead()
        return peak

    def _gather(self, parameters: set[_Key]) -> None:
        held = sum(self._held_sizes[parameter] for parameter in parameters)
        self._gathered_parameters |= parameters
        self._gather_messages |= dict.fromkeys(parameters, _GatherMessage(set(parameters), held))
        self._available += sum(self._sizes[parameter] for parameter in parameters)
        self._num_held += held

    def _look_ahead(self) -> None:
        """Prefetch; parameters that are already gathered are skipped and count as fetched."""
        num_free = min(
            self._rules.max_live_parameters - self._available, self._rules.prefetch_bucket_size
        )
        parameters: set[_Key] = set()
        size = 0
        while self._queue < len(self._uses) and size < num_free:
            ahead = self._uses[self._queue]
            self._seen_until[ahead.key] = self._queue
            self._queue += 1
            if ahead.key not in self._gathered_parameters and ahead.key not in parameters:
                parameters.add(ahead.key)
                size += ahead.parameter.size
        if parameters:
            self._gather(parameters)

    def _is_released(self, step: int, use: _ParameterUse) -> bool:
        """False if the next use is near or was counted as fetched."""
        if use.stays or use.key in self._persistent or self._seen_until[use.key] > step:
            return False
        later = self._next_use.get(step)
        return (
            later is None
            or self._before[later] - self._before[step + 1] >= self._rules.max_reuse_distance
        )

    def _release(self, parameter: _Key) -> None:
        if parameter not in self._gathered_parameters:
            return
        self._gathered_parameters.discard(parameter)
        self._available -= self._sizes[parameter]
        if parameter in self._in_graph:
            self._in_graph.discard(parameter)
        else:
            self._num_held -= self._held_sizes[parameter]
