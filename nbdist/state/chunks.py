"""Conversion between intervals of a flattened tensor and n-dimensional chunks.

Every engine holds intervals [start, stop) of the row-major flattened tensor. Files hold
chunks (offsets, sizes), which is the format other readers understand. A chunk made by
``interval_to_chunks`` is contiguous in the flattened tensor.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Chunk(NamedTuple):
    """Rectangular part of a tensor: first index and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def interval_to_chunks(shape: Sequence[int], start: int, stop: int) -> list[Chunk]:
    """Split an interval into chunks, in the order of the flattened tensor.

    Returns:
        At most 2 * ndim - 1 chunks; none for an empty interval.

    Raises:
        ValueError: the interval exceeds the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"Interval [{start}, {stop}) exceeds a tensor of shape {tuple(shape)}.")
    strides, chunks = _strides(shape), []
    while start < stop:
        box = _first(shape, strides, start, stop)
        chunks.append(box)
        start += box.numel
    return chunks


def chunk_to_intervals(shape: Sequence[int], box: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the intervals [start, stop) of the flattened tensor that a chunk covers, in order.

    A chunk from ``interval_to_chunks`` has one interval; other chunks may have many.

    Raises:
        ValueError: the chunk exceeds the tensor.
    """
    whole = zip(shape, box.offsets, box.sizes, strict=True)
    if any(offset < 0 or size < 0 or offset + size > length for length, offset, size in whole):
        raise ValueError(f"{box} exceeds a tensor of shape {tuple(shape)}.")
    if not box.numel:
        return
    strides = _strides(shape)
    outer = _first_dense(shape, box)
    run = math.prod(box.sizes[outer:])
    base = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    for index in product(*map(range, box.sizes[:outer])):
        start = base + sum(at * stride for at, stride in zip(index, strides, strict=False))
        yield start, start + run


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major stride of each dimension, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _first(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Chunk:
    """Return the largest contiguous chunk that begins at `start` and ends at or before `stop`."""
    for dim, stride in enumerate(strides):
        if start % stride == 0 and start + stride <= stop:
            index = tuple(
                start // step % length for step, length in zip(strides, shape, strict=True)
            )
            count = min((stop - start) // stride, shape[dim] - index[dim])
            return Chunk(index, (1,) * dim + (count,) + tuple(shape[dim + 1 :]))
    return Chunk((), ())  # a 0-dimensional tensor has one element


def _first_dense(shape: Sequence[int], box: Chunk) -> int:
    """Return the first dimension from which the chunk is contiguous."""
    dim = len(shape)
    while dim and box.sizes[dim:] == tuple(shape[dim:]):
        dim -= 1
    while dim and box.sizes[dim - 1] == 1 and math.prod(box.sizes[:dim]) == 1:
        dim -= 1
    return dim
