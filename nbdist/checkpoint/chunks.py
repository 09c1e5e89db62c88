"""Intervals of a flattened tensor <-> n-dimensional boxes of it; pure.

Every engine holds intervals [start, stop) of the row-major flattened tensor. Files hold
boxes (offsets, sizes), because that is what other readers know. A box that is made here is
one piece of memory: its elements follow each other in the flattened tensor.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Box(NamedTuple):
    """A part of a tensor: where it begins and how many elements it has in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut an interval into boxes, in the order of the flattened tensor.

    Returns:
        At most 2 * ndim - 1 boxes; none for an empty interval.

    Raises:
        ValueError: the interval is not inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"[{start}, {stop}) is no interval of a tensor of shape {tuple(shape)}")
    strides, found = _strides(shape), []
    while start < stop:
        box = _first(shape, strides, start, stop)
        found.append(box)
        start += box.numel
    return found


def intervals(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Give the intervals [start, stop) of the flattened tensor that a box covers, in order.

    One for each box that `boxes` makes; a box from elsewhere may have many.

    Raises:
        ValueError: the box is not inside the tensor.
    """
    whole = zip(shape, box.offsets, box.sizes, strict=True)
    if any(offset < 0 or size < 0 or offset + size > length for length, offset, size in whole):
        raise ValueError(f"{box} is not inside a tensor of shape {tuple(shape)}")
    if not box.numel:
        return
    strides = _strides(shape)
    outer = _first_dense(shape, box)
    run = math.prod(box.sizes[outer:])
    base = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    for place in product(*map(range, box.sizes[:outer])):
        start = base + sum(one * stride for one, stride in zip(place, strides, strict=False))
        yield start, start + run


def _strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next, for each dimension."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _first(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Box:
    """The largest box that begins at `start` and does not go beyond `stop`."""
    for dim, stride in enumerate(strides):
        if start % stride == 0 and start + stride <= stop:
            place = tuple(
                start // step % length for step, length in zip(strides, shape, strict=True)
            )
            count = min((stop - start) // stride, shape[dim] - place[dim])
            return Box(place, (1,) * dim + (count,) + tuple(shape[dim + 1 :]))
    return Box((), ())  # a tensor without dimensions has one element


def _first_dense(shape: Sequence[int], box: Box) -> int:
    """The first dimension from which on the box's elements follow each other."""
    dim = len(shape)
    while dim and box.sizes[dim:] == tuple(shape[dim:]):
        dim -= 1
    while dim and box.sizes[dim - 1] == 1 and math.prod(box.sizes[:dim]) == 1:
        dim -= 1
    return dim
