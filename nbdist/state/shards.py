"""The form in which all engines' state is described: intervals of flattened tensors.

Pure description; a `Shard` of a living model shares its storage, one of `snapshot` does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK_BYTES = 256 << 20
"""Of page-locked memory in one allocation; torch 2.13 rounds each up to a power of two."""


class Piece(NamedTuple):
    """One interval of a flattened tensor, and where its elements are."""

    start: int
    stop: int
    view: torch.Tensor
    """Of one dimension, contiguous, stop - start elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What this rank has of one tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = ()
    """In order of their start, disjoint; none where the rank has nothing of it."""


ShardMap = Mapping[str, Shard]
"""Key (`model.<fqn>`, `optim.state.<fqn>.<name>`) -> what this rank has of it."""


def bytes_of(shards: ShardMap) -> int:
    """Bytes of this rank's pieces."""
    return sum(
        (piece.stop - piece.start) * shard.dtype.itemsize
        for shard in shards.values()
        for piece in shard.pieces
    )


@torch.no_grad()
def snapshot(shards: ShardMap, *, like: ShardMap | None = None) -> dict[str, Shard]:
    """Copy this rank's pieces into host memory; page-locked where they come from a GPU.

    Blocks until the copies are made: what is trained later does not show in them. A piece may
    come back as several that follow each other.

    Args:
        shards: what to copy.
        like: an earlier snapshot of the same state; its memory is used again where a key has
            the same intervals and type, so its values are lost.
    """
    memory = _Host()
    made = {}
    for key, shard in shards.items():
        old = like.get(key) if like is not None else None
        pieces = _again(shard, old) or tuple(_copies(shard, memory))
        made[key] = Shard(shape=shard.shape, dtype=shard.dtype, pieces=pieces)
    if any(piece.view.is_cuda for shard in shards.values() for piece in shard.pieces):
        torch.cuda.current_stream().synchronize()
    return made


def give_back() -> None:
    """Free the page-locked memory that nothing uses; torch 2.13 keeps it for the next copies."""
    if torch.cuda.is_initialized():
        torch._C._host_emptyCache()  # noqa: SLF001


def _again(shard: Shard, old: Shard | None) -> tuple[Piece, ...]:
    """Copy into the memory of an earlier snapshot, or return no pieces."""
    if old is None or old.dtype != shard.dtype or not _same_intervals(shard, old):
        return ()
    for piece in shard.pieces:
        for target in old.pieces:
            if piece.start <= target.start < piece.stop:
                part = piece.view[target.start - piece.start : target.stop - piece.start]
                target.view.copy_(part, non_blocking=True)
    return old.pieces


def _same_intervals(one: Shard, two: Shard) -> bool:
    """Whether two shards cover the same elements."""
    pairs = zip_longest(_joined(one), _joined(two))
    return all(first == second for first, second in pairs)


def _joined(shard: Shard) -> list[tuple[int, int]]:
    """Intervals of a shard, those that follow each other as one."""
    found: list[tuple[int, int]] = []
    for start, stop, _ in shard.pieces:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _copies(shard: Shard, memory: _Host) -> Iterator[Piece]:
    """Copy a shard's pieces, each cut where a chunk of memory ends."""
    for start, stop, view in shard.pieces:
        at = start
        while at < stop:
            room = memory.room(stop - at, shard.dtype, locked=view.is_cuda)
            end = at + room.numel()
            room.copy_(view[at - start : end - start], non_blocking=True)
            yield Piece(at, end, room)
            at = end


class _Host:
    """Host memory that is given out in order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._free = torch.empty(0, dtype=torch.uint8)

    def room(self, numel: int, dtype: torch.dtype, *, locked: bool) -> torch.Tensor:
        """Return room for at most `numel` elements and at least one."""
        if not locked:
            return torch.empty(numel, dtype=dtype)
        if self._free.numel() < dtype.itemsize:
            self._free = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        size = min(numel, self._free.numel() // dtype.itemsize) * dtype.itemsize
        taken = self._free[:size].view(dtype)
        self._free = self._free[-(-size // 16) * 16 :]
        return taken
