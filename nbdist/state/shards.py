"""Common representation of all engines' state: intervals of flattened tensors.

Every engine holds intervals [start, stop) of the row-major flattened tensor. A `Shard` of a live
model shares its storage; one from ``copy_to_host`` does not. Files hold chunks (offsets, sizes),
which is the format other readers understand: ``interval_to_chunks`` and ``chunk_to_intervals``
convert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_CHUNK_BYTES = 256 << 20
"""Size of one allocation of pinned memory; torch 2.13 rounds each up to a power of two."""


class ShardPiece(NamedTuple):
    """One interval of a flattened tensor, with a view of its elements."""

    start: int
    stop: int
    view: torch.Tensor
    """1-D, contiguous, with stop - start elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Elements of one tensor that are on this rank."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    pieces: tuple[ShardPiece, ...] = ()
    """Sorted by start, disjoint; empty if the rank has no elements."""


class ShapeAndDtype(NamedTuple):
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


ShardMap = Mapping[str, Shard]
"""Key (`model.<fqn>`, `optim.state.<fqn>.<name>`) -> shard of this rank."""


def total_bytes(shards: ShardMap) -> int:
    """Return the size of this rank's pieces in bytes."""
    return sum(
        (piece.stop - piece.start) * shard.dtype.itemsize
        for shard in shards.values()
        for piece in shard.pieces
    )


@torch.no_grad()
def copy_to_host(shards: ShardMap) -> dict[str, Shard]:
    """Copy this rank's pieces to host memory; pinned memory if they are on a GPU.

    Blocks until the copies are complete. A piece may be returned as several consecutive pieces.
    """
    memory = _HostBuffer()
    copies = {
        key: Shard(shape=shard.shape, dtype=shard.dtype, pieces=tuple(_copies(shard, memory)))
        for key, shard in shards.items()
    }
    if any(piece.view.is_cuda for shard in shards.values() for piece in shard.pieces):
        torch.cuda.current_stream().synchronize()
    return copies


def empty_pinned_cache() -> None:
    """Free unused pinned memory, which torch 2.13 caches otherwise."""
    if torch.cuda.is_initialized():
        torch._C._host_emptyCache()  # noqa: SLF001


def pieces_within(pieces: Iterable[ShardPiece], start: int, stop: int) -> Iterator[ShardPiece]:
    """Yield the parts of pieces that are in an interval, as views."""
    for piece in pieces:
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            yield ShardPiece(low, high, piece.view[low - piece.start : high - piece.start])


def joined_intervals(shard: Shard) -> list[tuple[int, int]]:
    """Return the intervals of a shard, with consecutive ones merged."""
    joined: list[tuple[int, int]] = []
    for start, stop, _ in shard.pieces:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _copies(shard: Shard, memory: _HostBuffer) -> Iterator[ShardPiece]:
    """Copy a shard's pieces, split where an allocation ends."""
    for start, stop, view in shard.pieces:
        position = start
        while position < stop:
            target = memory.allocate(stop - position, shard.dtype, pinned=view.is_cuda)
            end = position + target.numel()
            target.copy_(view[position - start : end - start], non_blocking=True)
            yield ShardPiece(position, end, target)
            position = end


class _HostBuffer:
    """Host memory; pinned memory is handed out from large allocations."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        """Return memory for at least one and at most `numel` elements."""
        if not pinned:
            return torch.empty(numel, dtype=dtype)
        if self._free.numel() < dtype.itemsize:
            self._free = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        size = min(numel, self._free.numel() // dtype.itemsize) * dtype.itemsize
        memory = self._free[:size].view(dtype)
        self._free = self._free[-(-size // 16) * 16 :]
        return memory


# ---------------------------------------------------------------------------- chunks


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
        box = _largest_chunk_at(shape, strides, start, stop)
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
    # The first dimension from which the chunk is contiguous.
    outer = len(shape)
    while outer and box.sizes[outer:] == tuple(shape[outer:]):
        outer -= 1
    while outer and box.sizes[outer - 1] == 1 and math.prod(box.sizes[:outer]) == 1:
        outer -= 1
    run = math.prod(box.sizes[outer:])
    base = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    for index in product(*map(range, box.sizes[:outer])):
        start = base + sum(at * stride for at, stride in zip(index, strides, strict=False))
        yield start, start + run


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major stride of each dimension, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _largest_chunk_at(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Chunk:
    """Return the largest contiguous chunk that begins at `start` and ends at or before `stop`."""
    for dim, stride in enumerate(strides):
        if start % stride == 0 and start + stride <= stop:
            index = tuple(
                start // step % length for step, length in zip(strides, shape, strict=True)
            )
            count = min((stop - start) // stride, shape[dim] - index[dim])
            return Chunk(index, (1,) * dim + (count,) + tuple(shape[dim + 1 :]))
    return Chunk((), ())  # a 0-dimensional tensor has one element
