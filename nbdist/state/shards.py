"""Common representation of all engines' state: intervals of flattened tensors.

A `Shard` of a live model shares its storage; one from ``copy_to_host`` does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK_BYTES = 256 << 20
"""Size of one allocation of pinned memory; torch 2.13 rounds each up to a power of two."""


class Piece(NamedTuple):
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
    pieces: tuple[Piece, ...] = ()
    """Sorted by start, disjoint; empty if the rank has no elements."""


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
def copy_to_host(shards: ShardMap, *, like: ShardMap | None = None) -> dict[str, Shard]:
    """Copy this rank's pieces to host memory; pinned memory if they are on a GPU.

    Blocks until the copies are complete. A piece may be returned as several consecutive pieces.

    Args:
        shards: shards to copy.
        like: earlier copy of the same state; its memory is reused, and overwritten, for keys with
            the same intervals and dtype.
    """
    memory = _HostBuffer()
    copies = {}
    for key, shard in shards.items():
        previous = like.get(key) if like is not None else None
        pieces = _again(shard, previous) or tuple(_copies(shard, memory))
        copies[key] = Shard(shape=shard.shape, dtype=shard.dtype, pieces=pieces)
    if any(piece.view.is_cuda for shard in shards.values() for piece in shard.pieces):
        torch.cuda.current_stream().synchronize()
    return copies


def give_back() -> None:
    """Free unused pinned memory, which torch 2.13 caches otherwise."""
    if torch.cuda.is_initialized():
        torch._C._host_emptyCache()  # noqa: SLF001


def _again(shard: Shard, old: Shard | None) -> tuple[Piece, ...]:
    """Copy into the memory of an earlier copy; return no pieces if it does not fit."""
    if old is None or old.dtype != shard.dtype or _joined(shard) != _joined(old):
        return ()
    for piece in shard.pieces:
        for target in old.pieces:
            if piece.start <= target.start < piece.stop:
                part = piece.view[target.start - piece.start : target.stop - piece.start]
                target.view.copy_(part, non_blocking=True)
    return old.pieces


def _joined(shard: Shard) -> list[tuple[int, int]]:
    """Return the intervals of a shard, with consecutive ones merged."""
    joined: list[tuple[int, int]] = []
    for start, stop, _ in shard.pieces:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _copies(shard: Shard, memory: _HostBuffer) -> Iterator[Piece]:
    """Copy a shard's pieces, split where an allocation ends."""
    for start, stop, view in shard.pieces:
        position = start
        while position < stop:
            room = memory.room(stop - position, shard.dtype, locked=view.is_cuda)
            end = position + room.numel()
            room.copy_(view[position - start : end - start], non_blocking=True)
            yield Piece(position, end, room)
            position = end


class _HostBuffer:
    """Host memory; pinned memory is handed out from large allocations."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def room(self, numel: int, dtype: torch.dtype, *, locked: bool) -> torch.Tensor:
        """Return memory for at least one and at most `numel` elements."""
        if not locked:
            return torch.empty(numel, dtype=dtype)
        if self._free.numel() < dtype.itemsize:
            self._free = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        size = min(numel, self._free.numel() // dtype.itemsize) * dtype.itemsize
        room = self._free[:size].view(dtype)
        self._free = self._free[-(-size // 16) * 16 :]
        return room
