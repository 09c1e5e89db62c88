"""Parameters one by one, in the module's order: what partitions and buckets are cut from.

Pure arithmetic over `spec.Group`s, in elements. For the engines that do not follow the
groups: DeepSpeed lays all parameters out in one row, cuts it into equal partitions, and
reduces gradients in the order in which a backward makes them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.planner.memory.timeline import records

if TYPE_CHECKING:
    from nbdist.planner.model_spec import Group, ModelSpec, Step


class Place(NamedTuple):
    """One trainable parameter."""

    size: int
    """Elements."""
    group: int
    nth: int
    """Which of the group's `count`."""


class Reduction(NamedTuple):
    """A bucket that is being reduced."""

    at: Place | None
    """The gradient that found no room in it; None at the end of the backward."""
    own: int
    """Elements of that gradient's group that are done, itself included."""
    filled: int
    """Elements in the bucket."""
    moved: int
    """Elements reduced so far, the bucket's included."""
    split: bool
    """The bucket holds gradients of more than one rank's partition."""


def sizes(group: Group) -> tuple[int, ...]:
    """Elements of each trainable parameter of one group.

    Where they are not known: as many of the largest as fit, after what is left over, which
    is how a transformer's block has them (attention, then the wider MLP). Beside frozen
    parameters the trainable ones are adapters, small, and taken as one.
    """
    if not group.trainable:
        return ()
    if group.frozen:
        return (group.trainable,)
    return tuple(size for _, size in group.tensors) or _chunks(group.trainable, group.largest)


def frozen_sizes(group: Group) -> tuple[int, ...]:
    """Elements of each frozen parameter of one group."""
    if not group.trainable and group.tensors:
        return tuple(size for _, size in group.tensors)
    return _chunks(group.frozen, group.largest)


def _chunks(elements: int, largest: int) -> tuple[int, ...]:
    """Return what is left over, then pieces of the largest size."""
    if not elements:
        return ()
    each = min(largest or elements, elements)
    many, rest = divmod(elements, each)
    return ((rest,) if rest else ()) + (each,) * many


def finished(model: ModelSpec, step: Step) -> int:
    """Elements of the gradients that a backward has made before it comes to a step's group."""
    own = model.groups[step.group]
    later = model.groups[step.group + 1 :]
    rest = (own.count - 1 - step.nth) * own.trainable
    return rest + sum(group.count * group.trainable for group in later)


def shared(model: ModelSpec) -> int:
    """Elements of a tied head: its gradient waits for the embedding's part of it."""
    return max(sizes(model.groups[-1]), default=0) if model.tied else 0


def coming(model: ModelSpec, step: Step) -> int:
    """Elements of the gradients of a step that are on their way to where gradients are kept.

    The newest, and in the groups before the tail a tied head's.
    """
    if step.phase != "backward":
        return 0
    newest = min(step.grads, model.groups[step.group].largest)
    return newest + (0 if step.group == len(model.groups) - 1 else shared(model))


@lru_cache(maxsize=64)
def places(groups: tuple[Group, ...], *, tied: bool) -> tuple[Place, ...]:
    """All trainable parameters in the module's order; a tied head stands in front."""
    row = [
        Place(size, number, index)
        for number, group in enumerate(groups)
        for index in range(group.count)
        for size in sizes(group)
    ]
    head = max((place for place in row if place.group == len(groups) - 1), default=None)
    if tied and head is not None:
        row.remove(head)
        row.insert(0, Place(head.size, 0, 0))
    return tuple(row)


def partition(elements: int, world_size: int) -> int:
    """Elements of one rank's partition; ZeRO-1/2 aligns to 2 elements a rank."""
    return 2 * -(-elements // (2 * world_size))


class Share(NamedTuple):
    """What one rank's partition has pieces of."""

    touched: int
    """Elements of all parameters that reach into it, their other pieces included."""
    piece: int
    """Elements of its largest piece."""


@lru_cache(maxsize=256)
def shares(groups: tuple[Group, ...], *, tied: bool, world_size: int) -> tuple[Share, ...]:
    """For each rank what its equal piece of the whole row is made of."""
    row = places(groups, tied=tied)
    each = partition(sum(place.size for place in row), world_size)
    touched, pieces = [0] * world_size, [0] * world_size
    begin = 0
    for size, _, _ in row:
        end = begin + size
        for rank in range(begin // each, (end - 1) // each + 1):
            touched[rank] += size
            piece = min(end, (rank + 1) * each) - max(begin, rank * each)
            pieces[rank] = max(pieces[rank], piece)
        begin = end
    return tuple(map(Share, touched, pieces))


@lru_cache(maxsize=256)
def reductions(
    groups: tuple[Group, ...], *, tied: bool, world_size: int, bucket: int, backward: bool
) -> tuple[Reduction, ...]:
    """The reductions of one backward, as a bucket fills and is emptied.

    Args:
        groups: the model's.
        tied: the head stands in front.
        world_size: number of partitions.
        bucket: elements of a bucket; a larger parameter is reduced alone.
        backward: gradients come from the last parameter to the first; else from the first.
    """
    row = places(groups, tied=tied)
    total = sum(place.size for place in row)
    each = max(1, partition(total, world_size))
    made: list[Reduction] = []
    moved = filled = own = 0
    at: Place | None = None
    for place in (*(reversed(row) if backward else row), None):
        same = place is not None and at is not None and place[1:] == at[1:]
        own = (own if same else 0) + (place.size if place is not None else 0)
        if filled and (place is None or filled + place.size > bucket):
            low = total - moved if backward else moved - filled
            split = low // each != (low + filled - 1) // each
            made.append(Reduction(place, own, filled, moved, split))
            filled = 0
        if place is not None:
            filled += place.size
            moved += place.size
        at = place
    return tuple(made)


class Kept(NamedTuple):
    """Reduced gradients on the fullest rank, in elements, as a bucket is emptied."""

    of: Reduction
    before: int
    during: int
    """While the bucket is copied out, but for the bucket itself."""
    after: int


@lru_cache(maxsize=256)
def kept(
    groups: tuple[Group, ...],
    *,
    tied: bool,
    world_size: int,
    bucket: int,
    backward: bool,
    buffered: bool,
    large_stay: bool,
) -> tuple[Kept, ...]:
    """What a rank keeps of each of the `reductions` of one backward.

    Args:
        groups: the model's.
        tied: as in `reductions`, as are `world_size`, `bucket` and `backward`.
        world_size: number of partitions.
        bucket: elements of a bucket.
        backward: gradients come from the last parameter to the first; else from the first.
        buffered: a rank has a buffer for all that reaches into its partition, from the first
            gradient of it on.
        large_stay: a gradient above the bucket's size stays where it is, on ranks that have no
            buffer for it.
    """
    found = shares(groups, tied=tied, world_size=world_size)
    total = sum(place.size for place in places(groups, tied=tied))
    each = max(1, partition(total, world_size))
    own = [share.touched if buffered else 0 for share in found]
    """What a rank has more than all large gradients that stay."""
    stay, passed, before = 0, -total, 0
    told: list[Kept] = []
    made = reductions(groups, tied=tied, world_size=world_size, bucket=bucket, backward=backward)
    for one in made:
        low = total - one.moved if backward else one.moved - one.filled
        first, last = low // each, (low + one.filled - 1) // each
        edge, to_come = (first, first) if backward else (last, world_size - 1 - last)
        others = max(passed, 0 if to_come else -total)
        during = stay + max(others, *own[first : last + 1])
        if large_stay and one.filled > bucket:
            stay += one.filled
            for rank in range(first, last + 1):
                own[rank] -= one.filled
        after = stay + max(others, *own[first : last + 1])
        told.append(Kept(one, before, during, after))
        before = after
        complete = [own[rank] for rank in range(first, last + 1) if rank != edge]
        passed = max(passed, *complete) if complete else passed
    return tuple(told)


@lru_cache(maxsize=256)
def telling(groups: tuple[Group, ...], **how: Any) -> tuple[Kept, ...]:
    """What is `kept` at those reductions that may be the fullest, whatever an element's bytes.

    Of alike ones the first has the most activations, and leaves the most to be reduced.
    """
    return tuple(
        records(
            ((*alike(one.of), one.of.split), (one.before, one.during), one)
            for one in kept(groups, **how)
        )
    )


def alike(one: Reduction) -> tuple[int, ...]:
    """What equal reductions of a group's equal blocks have in common."""
    waits = (one.at.group, one.at.size) if one.at is not None else ()
    return (*waits, one.own, one.filled)
