"""Parameters in the module's order, from which DeepSpeed cuts partitions and buckets.

Pure arithmetic over `LayerGroup`s, in elements. DeepSpeed does not follow the groups: it lays all
parameters out in one row, cuts it into equal partitions, and reduces gradients in the order in
which the backward makes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from nbdist.planner.model_spec import LayerGroup, MicroBatchStep, ModelSpec, WeightShape


class TrainableParameter(NamedTuple):
    """One trainable parameter."""

    num_elements: int
    """Number of elements."""
    group_index: int
    block_index: int
    """Index of the instance in its group."""


class BucketReduction(NamedTuple):
    """A bucket being reduced."""

    next_parameter: TrainableParameter | None
    """The gradient that did not fit into it; None at the end of the backward."""
    num_done_in_group: int
    """Elements of that gradient's group that are done, including itself."""
    num_in_bucket: int
    """Elements in the bucket."""
    largest: int
    """Elements of the largest gradient in it."""
    num_reduced: int
    """Elements reduced so far, including the bucket's."""
    num_copied: int
    """Elements of the largest flat copy that ZeRO-1/2 reduce, of pieces for several ranks."""


def trainable_param_sizes(group: LayerGroup) -> tuple[int, ...]:
    """Return the elements of each trainable parameter of one group."""
    return tuple(shape.num_elements for shape in group.tensors if shape.trainable)


def with_biases_first(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """Return groups with each bias before its weight.

    Their gradients come in reverse. torch's linear layer makes that of the bias first; DeepSpeed's
    (deepspeed 0.19.8, zero/linear.py), convolutions and norms that of the weight.
    """

    def ordered(shapes: tuple[WeightShape, ...]) -> tuple[WeightShape, ...]:
        found: list[WeightShape] = []
        rows = 0  # of the weight before, if it has had no bias yet
        for shape in shapes:
            is_bias = shape.is_bias and shape.num_elements == rows
            found.insert(len(found) - is_bias, shape)
            rows = 0 if is_bias else shape.rows
        return tuple(found)

    return tuple(replace(group, tensors=ordered(group.tensors)) for group in groups)


def largest_trainable_size(*groups: LayerGroup) -> int:
    """Return the elements of the largest trainable parameter, or 0."""
    return max((size for group in groups for size in trainable_param_sizes(group)), default=0)


def num_finished_gradients(model: ModelSpec, step: MicroBatchStep) -> int:
    """Return the gradient elements that a backward has made before it reaches a step's group."""
    own = model.groups[step.group_index]
    later = model.groups[step.group_index + 1 :]
    rest = (own.count - 1 - step.block_index) * own.trainable
    late = sum(late_trainable_sizes(model.groups)) if step.group_index else 0
    return rest + late + sum(group.count * group.trainable for group in later)


def tied_head_size(model: ModelSpec) -> int:
    """Return the elements of a tied head, or 0."""
    # Its gradient is complete only after the embedding's contribution.
    return largest_trainable_size(model.groups[-1]) if model.tied else 0


def num_pending_gradients(model: ModelSpec, step: MicroBatchStep, bucket: int | None = None) -> int:
    """Return the gradient elements of a step that are not yet stored with the other gradients.

    These are those just made and, before the tail's group, the tied head's. A gradient that
    exceeds a bucket is pending until the next one is made.
    """
    if step.phase != "backward":
        return 0
    newest = step.new_grads
    if bucket is not None and step.num_grads > bucket:
        latest = min(step.num_grads, largest_trainable_size(model.groups[step.group_index]))
        newest = latest if latest > bucket else newest
    return newest + (0 if step.group_index == len(model.groups) - 1 else tied_head_size(model))


def late_trainable_sizes(groups: tuple[LayerGroup, ...]) -> tuple[int, ...]:
    """Return the elements of each trainable parameter of the root that follows the last block."""
    shapes = groups[0].tensors
    late = shapes[len(shapes) - groups[0].num_late_tensors :]
    return tuple(shape.num_elements for shape in late if shape.trainable)


@lru_cache(maxsize=64)
def trainable_parameters(
    groups: tuple[LayerGroup, ...], *, tied: bool
) -> tuple[TrainableParameter, ...]:
    """Return all trainable parameters in the module's order; a tied head comes first."""
    row = [
        TrainableParameter(size, number, index)
        for number, group in enumerate(groups)
        for index in range(group.count)
        for size in trainable_param_sizes(group)
    ]
    if late := len(late_trainable_sizes(groups)):
        begin = len(trainable_param_sizes(groups[0]))
        end = len(row) - len(trainable_param_sizes(groups[-1]))
        row[begin - late : end] = [*row[begin:end], *row[begin - late : begin]]
    head = max((slot for slot in row if slot.group_index == len(groups) - 1), default=None)
    if tied and head is not None:
        row.remove(head)
        row.insert(0, TrainableParameter(head.num_elements, 0, 0))
    return tuple(row)


def partition_size(elements: int, world_size: int) -> int:
    """Return the elements of one rank's partition."""
    # ZeRO-1/2 aligns to 2 elements per rank.
    return 2 * -(-elements // (2 * world_size))


class PartitionContents(NamedTuple):
    """Contents of one rank's partition."""

    num_touched: int
    """Elements of all parameters that overlap with it, including their other pieces."""
    largest_piece: int
    """Elements of its largest piece."""


@lru_cache(maxsize=256)
def partition_contents(
    groups: tuple[LayerGroup, ...], *, tied: bool, world_size: int
) -> tuple[PartitionContents, ...]:
    """Return the contents of each rank's equal piece of the whole row."""
    row = trainable_parameters(groups, tied=tied)
    each = partition_size(sum(slot.num_elements for slot in row), world_size)
    touched, pieces = [0] * world_size, [0] * world_size
    begin = 0
    for size, _, _ in row:
        end = begin + size
        for rank in range(begin // each, (end - 1) // each + 1):
            touched[rank] += size
            piece = min(end, (rank + 1) * each) - max(begin, rank * each)
            pieces[rank] = max(pieces[rank], piece)
        begin = end
    return tuple(map(PartitionContents, touched, pieces))


@lru_cache(maxsize=256)
def bucket_reductions(
    groups: tuple[LayerGroup, ...], *, tied: bool, world_size: int, bucket: int, backward: bool
) -> tuple[BucketReduction, ...]:
    """Return the reductions of one backward, as the bucket fills and is emptied.

    Args:
        groups: groups of the model.
        tied: True if the head comes first.
        world_size: number of partitions.
        bucket: elements of a bucket; a larger parameter is reduced alone.
        backward: True if gradients come from the last parameter to the first, else reversed.
    """
    row = trainable_parameters(groups, tied=tied)
    total = sum(slot.num_elements for slot in row)
    each = max(1, partition_size(total, world_size))
    reduced: list[BucketReduction] = []
    done: Counter[tuple[int, int] | None] = Counter()
    """Elements of each instance of a group."""
    moved = filled = largest = 0
    for slot in (*(reversed(row) if backward else row), None):
        place = None if slot is None else (slot.group_index, slot.block_index)
        done[place] += 0 if slot is None else slot.num_elements
        if filled and (slot is None or filled + slot.num_elements > bucket):
            low = total - moved if backward else moved - filled
            copied = _largest_copy(low, low + filled, each, bucket)
            reduced.append(BucketReduction(slot, done[place], filled, largest, moved, copied))
            filled = largest = 0
        if slot is not None:
            filled += slot.num_elements
            largest = max(largest, slot.num_elements)
            moved += slot.num_elements
    return tuple(reduced)


def _largest_copy(low: int, high: int, each: int, bucket: int) -> int:
    """Return the elements of the largest flat copy while a stretch of the row is reduced.

    It is cut at the partitions' borders; pieces are put together until they exceed a bucket
    (deepspeed 0.19.8, stage_1_and_2.py, `allreduce_and_scatter`). A single piece is not copied.
    """
    largest = together = pieces = 0
    while low < high:
        border = min(high, (low // each + 1) * each)
        together, pieces = together + border - low, pieces + 1
        low = border
        if together > bucket or low == high:
            largest = max(largest, together if pieces > 1 else 0)
            together = pieces = 0
    return largest


class RetainedGradients(NamedTuple):
    """Reduced gradients on the fullest rank, in elements, as a bucket is emptied."""

    reduction: BucketReduction
    before: int
    during: int
    """While the bucket is copied out, without the bucket itself."""
    after: int


@lru_cache(maxsize=256)
def retained_gradients(
    groups: tuple[LayerGroup, ...],
    *,
    tied: bool,
    world_size: int,
    bucket: int,
    backward: bool,
    buffered: bool,
    large_stay: Literal["owners", "elsewhere"] | None,
) -> tuple[RetainedGradients, ...]:
    """Return the gradients that a rank keeps at each of the `bucket_reductions` of a backward.

    Args:
        groups: groups of the model.
        tied: as in `bucket_reductions`, like `world_size`, `bucket` and `backward`.
        world_size: number of partitions.
        bucket: elements of a bucket.
        backward: True if gradients come from the last parameter to the first, else reversed.
        buffered: True if a rank has a buffer for everything that overlaps with its partition, from
            its first gradient on.
        large_stay: which ranks keep a gradient above the bucket size in place: those whose
            partition overlaps with it, or the others.
    """
    contents = partition_contents(groups, tied=tied, world_size=world_size)
    total = sum(slot.num_elements for slot in trainable_parameters(groups, tied=tied))
    each = max(1, partition_size(total, world_size))
    own = [share.num_touched if buffered else 0 for share in contents]
    """Elements that a rank has in addition to all large gradients that stay."""
    stay, passed, before = 0, -total, 0
    retained: list[RetainedGradients] = []
    row = bucket_reductions(
        groups, tied=tied, world_size=world_size, bucket=bucket, backward=backward
    )
    for reduction in row:
        low = (
            total - reduction.num_reduced
            if backward
            else reduction.num_reduced - reduction.num_in_bucket
        )
        first, last = low // each, (low + reduction.num_in_bucket - 1) // each
        edge, to_come = (first, first) if backward else (last, world_size - 1 - last)
        others = max(passed, 0 if to_come else -total)
        during = stay + max(others, *own[first : last + 1])
        if large_stay and reduction.num_in_bucket > bucket:
            stay += reduction.num_in_bucket * (large_stay == "elsewhere")
            for rank in range(first, last + 1):
                own[rank] += reduction.num_in_bucket * (1 if large_stay == "owners" else -1)
        after = stay + max(others, *own[first : last + 1])
        retained.append(RetainedGradients(reduction, before, during, after))
        before = after
        complete = [own[rank] for rank in range(first, last + 1) if rank != edge]
        passed = max(passed, *complete) if complete else passed
    return tuple(retained)
