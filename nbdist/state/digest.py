"""A 64-bit number per key that is the same however the key is cut over ranks.

The digest of a tensor is the sum over its elements of `bits * row(i // 4096) * column(i % 4096)`
modulo 2**64: `i` is the element's index in the row-major flattened tensor, `bits` its bytes read
as a signed integer, `row` and `column` fixed odd numbers that look random. So each rank digests
its own pieces and the sums add up. Zeros (but not -0.0) add nothing. Types of eight and sixteen
bytes count as two and four elements of four bytes, in memory order.

It finds mistakes of a layout and faults of hardware, not forgery. 3 GB/s on one core; a few
hundred on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nbdist.state import collectives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from nbdist.state.shards import Piece, ShardMap

    Words = NDArray[np.uint64]

_ROW = 4096
"""Words that share a row's multiplier."""
_ROWS_ON_CPU = 64
"""Rows at a time: what is made of them stays in the cache."""
_ROWS_ON_GPU = 1024
"""Rows at a time: 64 MB of temporaries."""
_CAST_AT_ONCE = _ROW * _ROWS_ON_GPU
_WRAP = 1 << 64
_BITS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16}
"""Element size -> its bits as an integer; int32 for larger ones."""


def digests(shards: ShardMap, *, dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, int]:
    """Sums of this rank's pieces, each in [0, 2**64); those of all ranks add up modulo 2**64.

    Args:
        shards: disjoint pieces.
        dtypes: key -> type in which its values count, where that is not their own: what the
            digest will be after a move into that type.
    """
    wanted = dtypes or {}
    return {
        key: sum(_digest(piece, wanted.get(key, shard.dtype)) for piece in shard.pieces) % _WRAP
        for key, shard in shards.items()
    }


def agreed(
    shards: ShardMap,
    group: collectives.Group = None,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, int]:
    """Digests of whole tensors, the same on every rank; a collective of all ranks.

    Args:
        shards: owned pieces: each element on exactly one rank. A key may be missing on ranks
            that have nothing of it.
        group: the ranks; all of them unless given.
        dtypes: as for `digests`.
    """
    own = digests(shards, dtypes=dtypes)
    if collectives.size(group) == 1:
        return own
    keys = sorted({key for others in collectives.everyones(sorted(own), group) for key in others})
    signed = np.array([own.get(key, 0) for key in keys], dtype=np.uint64).view(np.int64)
    sums = collectives.sums(signed.tolist(), group)
    return {key: one % _WRAP for key, one in zip(keys, sums, strict=True)}


@torch.no_grad()
def _digest(piece: Piece, dtype: torch.dtype) -> int:
    """Sum of one piece, its values taken in a type."""
    if piece.view.dtype == dtype:
        return _sum(piece.view, piece.start)
    parts = piece.view.split(_CAST_AT_ONCE)
    starts = range(piece.start, piece.stop, _CAST_AT_ONCE)
    return sum(_sum(part.to(dtype), at) for part, at in zip(parts, starts, strict=True))


def _sum(values: torch.Tensor, start: int) -> int:
    """Sum of values whose first has an index in the whole tensor."""
    words = values.detach().view(_BITS.get(values.element_size(), torch.int32))
    first = start * max(1, values.element_size() // 4)
    head = min(-first % _ROW, words.numel())
    body = (words.numel() - head) // _ROW * _ROW
    row = -(-first // _ROW)
    parts = [
        (words[:head][None], first // _ROW, first % _ROW),
        (words[head : head + body].view(-1, _ROW), row, 0),
        (words[head + body :][None], row + body // _ROW, 0),
    ]
    return sum(_sum_of_rows(rows, at, column) for rows, at, column in parts if rows.numel())


def _sum_of_rows(rows: torch.Tensor, row: int, column: int) -> int:
    """Sum of rows, given the first's number and the column where they begin."""
    columns = _COLUMNS[column : column + rows.shape[1]]
    sums = _on_gpu(rows, columns) if rows.is_cuda else _on_cpu(rows.numpy(), columns)
    numbers = np.arange(row, row + len(sums), dtype=np.uint64)
    return int((sums * _mixed(numbers)).sum())


def _on_cpu(rows: NDArray[np.signedinteger], columns: Words) -> Words:
    """Each row's sum with its columns' multipliers."""
    signed = columns.view(np.int64)
    sums = np.empty(len(rows), dtype=np.int64)
    wide = np.empty((min(len(rows), _ROWS_ON_CPU), rows.shape[1]), dtype=np.int64)
    for at in range(0, len(rows), _ROWS_ON_CPU):
        some = rows[at : at + _ROWS_ON_CPU]
        np.copyto(wide[: len(some)], some)
        # numpy 2: the fastest way to multiply and add integers without a temporary
        np.einsum("rc,c->r", wide[: len(some)], signed, out=sums[at : at + len(some)])
    return sums.view(np.uint64)


def _on_gpu(rows: torch.Tensor, columns: Words) -> Words:
    """The same in torch, which has no product of integer matrices there."""
    signed = torch.from_numpy(columns.view(np.int64)).to(rows.device)
    parts = rows.split(_ROWS_ON_GPU)
    sums = torch.cat([part.to(torch.int64).mul_(signed).sum(1) for part in parts])
    return sums.cpu().numpy().view(np.uint64)


def _mixed(numbers: Words) -> Words:
    """Odd numbers that look random: the finalizer of SplitMix64."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


_COLUMNS = _mixed(np.arange(1 << 40, (1 << 40) + _ROW, dtype=np.uint64))
