"""Resharding of state across ranks.

The ranks all-gather which intervals they own and which they need. Each rank copies what it owns
itself; the rest is sent in all-to-all batches of about 64 MB, small tensors together and large
ones in windows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbdist.errors import SwitchError
from nbdist.state import collectives
from nbdist.state.shards import pieces_within

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from nbdist.state.shards import Shard, ShardMap, ShardPiece

BATCH_BYTES = 64 << 20
"""Size of one all-to-all over all ranks together; a rank needs at most twice that memory."""

_ALIGNED = 16
"""Alignment of segments in bytes, so that each can be viewed in its dtype."""

_MAY_BE_ZERO = "optim"
"""Prefix of keys of optimizer state, which becomes zero if no rank owns it."""

Interval = tuple[int, int]


class _KeyIntervals(NamedTuple):
    """One rank's intervals of one key."""

    shapes: frozenset[tuple[int, ...]]
    """Shapes in source and target; a single one if they agree."""
    dtype: torch.dtype | None
    """Dtype of the owned elements; None if it owns none."""
    owned: list[Interval]
    wanted: list[Interval]


class _TransferWindow(NamedTuple):
    """Elements of a key that are sent in the same batch."""

    key: str
    start: int
    stop: int


@torch.no_grad()
def zero_unsaved(targets: dict[str, Shard], saved: Container[str]) -> None:
    """Set optimizer state that was not saved to zero, and remove it from the targets."""
    for key in [key for key in targets if key.startswith(_MAY_BE_ZERO) and key not in saved]:
        for piece in targets.pop(key).pieces:
            piece.view.zero_()


@torch.no_grad()
def reshard(source: ShardMap, target: ShardMap) -> int:
    """Fill this rank's target shards from the source shards of all ranks; a collective.

    Values are cast if the dtype of a key differs. Keys that are in no target are ignored.
    Optimizer state (`optim...`) that no rank owns is set to zero: engines with flat tensors have
    such state for parameters that were never stepped.

    Args:
        source: owned pieces: each element on exactly one rank. On any device.
        target: pieces to fill, in place. Ranks may need the same elements.

    Returns:
        Bytes that this rank sent to other ranks.

    Raises:
        SwitchError: a target key is missing or has another shape, or its elements are not owned
            exactly once; raised on all ranks, before anything is written.
    """
    plan = _ReshardPlan(source, target)
    for key in plan.zeros & target.keys():
        for piece in target[key].pieces:
            piece.view.zero_()
    for key in plan.keys:
        if key in target and key in source:
            # what this rank both owns and needs
            for piece in target[key].pieces:
                own = pieces_within(source[key].pieces, piece.start, piece.stop)
                for start, stop, view in own:
                    target_view = piece.view[start - piece.start : stop - piece.start]
                    target_view.copy_(view, non_blocking=True)
    sent = sum(plan.exchange(batch) for batch in plan.busy()) if plan.world > 1 else 0
    if torch.cuda.is_available():  # the copies are asynchronous
        torch.cuda.current_stream().synchronize()
    return sent


class _ReshardPlan:
    """Owned and needed intervals of all ranks; the same on every rank."""

    def __init__(self, source: ShardMap, target: ShardMap) -> None:
        """All-gather the intervals; a collective. Raises SwitchError if they do not match."""
        self._source, self._target = source, target
        self.world, self._rank = collectives.group_size(), collectives.rank()
        rows = {key: _row(source.get(key), target.get(key)) for key in {*source, *target}}
        self._tables: list[dict[str, _KeyIntervals]] = collectives.all_gather_values(rows)
        wanted = {key for table in self._tables for key, row in table.items() if row.wanted}
        self.zeros = {
            key
            for key in wanted
            if key.startswith(_MAY_BE_ZERO) and not any(row.owned for row in self._rows(key))
        }
        self.keys = sorted(wanted - self.zeros)
        self._numel: dict[str, int] = {}
        self._dtypes = {key: self._dtype_of(key) for key in self.keys}

    def _rows(self, key: str) -> list[_KeyIntervals]:
        return [table[key] for table in self._tables if key in table]

    def _dtype_of(self, key: str) -> torch.dtype:
        """Return the dtype of a key; raise if it cannot be filled."""
        rows = self._rows(key)
        shapes = {shape for row in rows for shape in row.shapes}
        dtypes = {row.dtype for row in rows if row.dtype is not None}
        if len(shapes) > 1:
            shown = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise SwitchError(f"{key} has the shapes {shown}. All ranks must have the same model.")
        if len(dtypes) != 1:
            kinds = " and ".join(sorted(map(str, dtypes))) or "no owner"
            raise SwitchError(f"{key} has different dtypes on different ranks: {kinds}.")
        self._numel[key] = numel = math.prod(shapes.pop())
        owned = sorted(interval for row in rows for interval in row.owned)
        position = 0
        for start, stop in owned:
            if start != position:
                break
            position = stop
        if position != numel or sum(stop - start for start, stop in owned) != numel:
            raise SwitchError(
                f"Element {position} of {key} ({numel} elements) is not owned by exactly one rank."
                " This is a bug in nbdist: please report it with the versions of torch and"
                " deepspeed."
            )
        return next(iter(dtypes))

    def busy(self) -> list[list[_TransferWindow]]:
        """Return the batches in which any rank sends elements; a collective."""
        batches = list(self._batches())
        crosses = [any(map(any, self._sends(batch))) for batch in batches]
        flags = collectives.all_reduce_sum(list(map(int, crosses)))
        return [batch for batch, flag in zip(batches, flags, strict=True) if flag]

    def _batches(self) -> Iterator[list[_TransferWindow]]:
        batch: list[_TransferWindow] = []
        free_bytes = BATCH_BYTES
        for key in self.keys:
            itemsize = self._dtypes[key].itemsize
            numel = self._numel[key]
            position = 0
            while position < numel:
                end = min(numel, position + max(1, free_bytes // itemsize))
                batch.append(_TransferWindow(key, position, end))
                free_bytes -= (end - position) * itemsize
                position = end
                if free_bytes < itemsize:
                    yield batch
                    batch, free_bytes = [], BATCH_BYTES
        if batch:
            yield batch

    def _sends(self, batch: Sequence[_TransferWindow]) -> list[list[ShardPiece]]:
        """Return the segments that this rank owns and sends to each rank."""
        sends: list[list[ShardPiece]] = [[] for _ in range(self.world)]
        for rank, (table, segments) in enumerate(zip(self._tables, sends, strict=True)):
            for key, first, last in batch:
                if rank == self._rank or key not in self._source or key not in table:
                    continue
                pieces = self._source[key].pieces
                for start, stop in table[key].wanted:
                    low, high = max(start, first), min(stop, last)
                    segments.extend(pieces_within(pieces, low, high))
        return sends

    def _segments_from(self, other: int, window: _TransferWindow) -> Iterator[ShardPiece]:
        """Yield the segments of a window that this rank needs and another rank owns."""
        if window.key not in self._target or window.key not in self._tables[other]:
            return
        owned = self._tables[other][window.key].owned
        for piece in sorted(self._target[window.key].pieces, key=lambda piece: piece.start):
            begin = max(0, bisect_right(owned, (piece.start, piece.start)) - 1)
            for start, stop in owned[begin:]:
                if start >= piece.stop:
                    break
                low, high = max(start, window.start), min(stop, window.stop)
                yield from pieces_within([piece], low, high)

    def exchange(self, batch: Sequence[_TransferWindow]) -> int:
        """Send and receive a batch; return the bytes that this rank sent. A collective."""
        outgoing, sizes, sent = self._pack(batch)
        received = [
            [
                (part, self._dtypes[window.key])
                for window in batch
                if rank != self._rank
                for part in self._segments_from(rank, window)
            ]
            for rank in range(self.world)
        ]
        splits = [sum(_padded_size(part, dtype) for part, dtype in parts) for parts in received]
        incoming = collectives.all_to_all_bytes(outgoing, sizes, splits)
        offset = 0
        for part, dtype in (segment for parts in received for segment in parts):
            size = (part.stop - part.start) * dtype.itemsize
            part.view.copy_(incoming[offset : offset + size].view(dtype))
            offset += _padded_size(part, dtype)
        return sent

    def _pack(self, batch: Sequence[_TransferWindow]) -> tuple[torch.Tensor, list[int], int]:
        """Pack this rank's segments for others.

        Returns:
            The buffer, its bytes for each rank, and its bytes without padding.
        """
        sends = self._sends(batch)
        splits = [sum(_padded_size(part, part.view.dtype) for part in parts) for parts in sends]
        buffer = torch.empty(sum(splits), dtype=torch.uint8, device=collectives.comm_device())
        offset = sent = 0
        for part in (segment for parts in sends for segment in parts):
            size = (part.stop - part.start) * part.view.element_size()
            buffer[offset : offset + size].view(part.view.dtype).copy_(part.view, non_blocking=True)
            offset += _padded_size(part, part.view.dtype)
            sent += size
        return buffer, splits, sent


def _row(source: Shard | None, target: Shard | None) -> _KeyIntervals:
    return _KeyIntervals(
        frozenset(shard.shape for shard in (source, target) if shard),
        source.dtype if source and source.pieces else None,
        _intervals(source),
        _intervals(target),
    )


def _intervals(shard: Shard | None) -> list[Interval]:
    return sorted((piece.start, piece.stop) for piece in shard.pieces) if shard else []


def _padded_size(part: ShardPiece, dtype: torch.dtype) -> int:
    return -(-(part.stop - part.start) * dtype.itemsize // _ALIGNED) * _ALIGNED
