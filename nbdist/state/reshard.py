"""From one cut of the state to another, across ranks.

Each rank says which intervals it owns and which it wants; what it owns itself it copies, and
the rest crosses in batches of about 64 MB, small tensors together and large ones in windows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbdist.errors import SwitchError
from nbdist.state import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbdist.state.shards import Piece, Shard, ShardMap

BATCH_BYTES = 64 << 20
"""Of one exchange, over all ranks together; a rank needs at most twice that for it."""

_ALIGNED = 16
"""Bytes; each segment begins at a multiple, so that it can be read in its type."""

_MAY_BE_ZERO = "optim"
"""Beginning of the keys of optimizer state."""

Interval = tuple[int, int]


class Entry(NamedTuple):
    """What all ranks together have of one key."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Row(NamedTuple):
    """What one rank says of one key."""

    shapes: frozenset[tuple[int, ...]]
    """One, where its own parts fit each other."""
    dtype: torch.dtype | None
    """Of what it owns; None where it owns nothing."""
    owned: list[Interval]
    wanted: list[Interval]


class _Window(NamedTuple):
    """Elements of a key that cross together."""

    key: str
    start: int
    stop: int


class _Segment(NamedTuple):
    """Elements of a key that one rank has and another one wants, with views here."""

    start: int
    stop: int
    view: torch.Tensor


def catalogue(shards: ShardMap, group: collectives.Group = None) -> dict[str, Entry]:
    """Return the keys that any rank has, in their order; the same on every rank.

    Under FSDP1 a rank does not know of optimizer state that it has nothing of. A collective.
    """
    own = [(key, Entry(shard.shape, shard.dtype)) for key, shard in shards.items()]
    return {key: entry for said in collectives.everyones(own, group) for key, entry in said}


@torch.no_grad()
def move(source: ShardMap, target: ShardMap, *, group: collectives.Group = None) -> int:
    """Fill this rank's part of the target from all ranks' parts of the source.

    A collective. Values are cast where a key's type differs. Keys that nobody wants stay where
    they are; optimizer state (`optim...`) that nobody owns becomes zero, for engines with flat
    tensors have some for parameters that were never stepped.

    Args:
        source: owned pieces: each element on exactly one rank. On any device.
        target: what this rank wants; its views are written to. Ranks may want the same.
        group: the ranks; all of them unless given.

    Returns:
        Bytes that this rank sent to others.

    Raises:
        SwitchError: on all ranks alike, before anything is written: a wanted key is missing or
            has another shape, or its elements are not each owned once.
    """
    plan = _Plan(source, target, group)
    for key in plan.zeros & target.keys():
        for piece in target[key].pieces:
            piece.view.zero_()
    for key in plan.keys:
        if key in target and key in source:
            _copy_own(source[key], target[key])
    sent = sum(plan.exchange(batch) for batch in plan.busy()) if plan.world > 1 else 0
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return sent


def _copy_own(source: Shard, target: Shard) -> None:
    """Copy what this rank owns and wants itself."""
    for wanted in target.pieces:
        for start, stop, view in _cut(source.pieces, wanted.start, wanted.stop):
            room = wanted.view[start - wanted.start : stop - wanted.start]
            room.copy_(view, non_blocking=True)


def _cut(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[_Segment]:
    """Return the parts of pieces that lie in an interval."""
    for piece in pieces:
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            yield _Segment(low, high, piece.view[low - piece.start : high - piece.start])


@dataclass(slots=True)
class _Outgoing:
    """Segments for all ranks, packed one after the other."""

    buffer: torch.Tensor
    splits: list[int]
    """Bytes for each rank, in their order."""


class _Plan:
    """Who has and who wants what; known to all ranks alike."""

    def __init__(self, source: ShardMap, target: ShardMap, group: collectives.Group) -> None:
        """Ask all ranks; raises SwitchError where the tables do not fit."""
        self._source, self._target, self._group = source, target, group
        self.world, self._rank = collectives.size(group), collectives.rank(group)
        own = {key: _row(source.get(key), target.get(key)) for key in {*source, *target}}
        self._tables: list[dict[str, _Row]] = collectives.everyones(own, group)
        wanted = {key for table in self._tables for key, row in table.items() if row.wanted}
        self.zeros = {key for key in wanted if key.startswith(_MAY_BE_ZERO) and not self._had(key)}
        self.keys = sorted(wanted - self.zeros)
        self._numel: dict[str, int] = {}
        self._dtypes = {key: self._checked(key) for key in self.keys}

    def _had(self, key: str) -> bool:
        """Whether any rank owns something of a key."""
        return any(row.owned for row in self._rows(key))

    def _rows(self, key: str) -> list[_Row]:
        """What the ranks say of a key, of those that know it."""
        return [table[key] for table in self._tables if key in table]

    def _checked(self, key: str) -> torch.dtype:
        """Return a key's type; refuse what cannot be filled."""
        rows = self._rows(key)
        shapes = {shape for row in rows for shape in row.shapes}
        dtypes = {row.dtype for row in rows if row.dtype is not None}
        if len(shapes) > 1:
            shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
            message = f"{key} has the shapes {shown}; state moves between equal models only."
            raise SwitchError(message)
        if len(dtypes) != 1:
            kinds = " and ".join(sorted(map(str, dtypes))) or "nowhere"
            message = f"{key} is wanted and owned {kinds}; state moves as a whole, in one type."
            raise SwitchError(message)
        self._numel[key] = math.prod(shapes.pop())
        _check_tiled(key, sorted(one for row in rows for one in row.owned), self._numel[key])
        return next(iter(dtypes))

    def busy(self) -> list[list[_Window]]:
        """Return the batches in which anything crosses; a collective."""
        batches = list(self._batches())
        crosses = [any(map(any, self._sends(batch))) for batch in batches]
        flags = collectives.sums(list(map(int, crosses)), self._group)
        return [batch for batch, flag in zip(batches, flags, strict=True) if flag]

    def _batches(self) -> Iterator[list[_Window]]:
        """Cut all wanted keys into batches."""
        batch: list[_Window] = []
        left = BATCH_BYTES
        for key in self.keys:
            itemsize = self._dtypes[key].itemsize
            numel = self._numel[key]
            at = 0
            while at < numel:
                end = min(numel, at + max(1, left // itemsize))
                batch.append(_Window(key, at, end))
                left -= (end - at) * itemsize
                at = end
                if left < itemsize:
                    yield batch
                    batch, left = [], BATCH_BYTES
        if batch:
            yield batch

    def _sends(self, batch: Sequence[_Window]) -> list[list[_Segment]]:
        """Return what this rank has for each other one."""
        return [
            []
            if other == self._rank
            else [part for window in batch for part in self._segments_for(other, window)]
            for other in range(self.world)
        ]

    def _segments_for(self, other: int, window: _Window) -> Iterator[_Segment]:
        """Return what this rank owns and another one wants of a window."""
        if window.key not in self._source or window.key not in self._tables[other]:
            return
        pieces = self._source[window.key].pieces
        for start, stop in self._tables[other][window.key].wanted:
            yield from _cut(pieces, max(start, window.start), min(stop, window.stop))

    def _segments_from(self, other: int, window: _Window) -> Iterator[_Segment]:
        """Return room for what this rank wants and another one owns of a window."""
        if window.key not in self._target or window.key not in self._tables[other]:
            return
        owned = self._tables[other][window.key].owned
        for piece in sorted(self._target[window.key].pieces, key=lambda one: one.start):
            begin = max(0, bisect_right(owned, (piece.start, piece.start)) - 1)
            for start, stop in owned[begin:]:
                if start >= piece.stop:
                    break
                low, high = max(start, window.start), min(stop, window.stop)
                yield from _cut([piece], low, high)

    def exchange(self, batch: Sequence[_Window]) -> int:
        """Let a batch cross; returns bytes that this rank sent. A collective."""
        outgoing, sent = self._packed(batch)
        rooms = [
            [
                (part, self._dtypes[window.key])
                for window in batch
                if other != self._rank
                for part in self._segments_from(other, window)
            ]
            for other in range(self.world)
        ]
        splits = [sum(_padded(part, dtype) for part, dtype in parts) for parts in rooms]
        incoming = collectives.exchange(outgoing.buffer, outgoing.splits, splits, self._group)
        at = 0
        for part, dtype in (one for parts in rooms for one in parts):
            size = (part.stop - part.start) * dtype.itemsize
            part.view.copy_(incoming[at : at + size].view(dtype))
            at += _padded(part, dtype)
        return sent

    def _packed(self, batch: Sequence[_Window]) -> tuple[_Outgoing, int]:
        """Pack what this rank has for others; also returns its bytes without padding."""
        sends = self._sends(batch)
        splits = [sum(_padded(part, part.view.dtype) for part in parts) for parts in sends]
        buffer = torch.empty(sum(splits), dtype=torch.uint8, device=collectives.device(self._group))
        at = sent = 0
        for part in (one for parts in sends for one in parts):
            size = (part.stop - part.start) * part.view.element_size()
            buffer[at : at + size].view(part.view.dtype).copy_(part.view, non_blocking=True)
            at += _padded(part, part.view.dtype)
            sent += size
        return _Outgoing(buffer, splits), sent


def _row(source: Shard | None, target: Shard | None) -> _Row:
    """Say what this rank owns and wants of a key."""
    owns = source is not None and bool(source.pieces)
    return _Row(
        frozenset(shard.shape for shard in (source, target) if shard is not None),
        source.dtype if source is not None and owns else None,
        _intervals(source),
        _intervals(target),
    )


def _intervals(shard: Shard | None) -> list[Interval]:
    """Return a shard's intervals in order."""
    return sorted((piece.start, piece.stop) for piece in shard.pieces) if shard else []


def _padded(part: _Segment, dtype: torch.dtype) -> int:
    """Bytes of a segment on its way."""
    return -(-(part.stop - part.start) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _check_tiled(key: str, owned: Sequence[Interval], numel: int) -> None:
    """Refuse a key of which an element has no owner, or two."""
    at = 0
    for start, stop in owned:
        if start != at:
            break
        at = stop
    if at == numel and sum(stop - start for start, stop in owned) == numel:
        return
    message = (
        f"element {at} of {key} ({numel} elements) is not owned by exactly one rank; this is a "
        "mistake of nbdist: please report it with the versions of torch and deepspeed."
    )
    raise SwitchError(message)
