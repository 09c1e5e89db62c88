"""Parallel writing of sharded tensors: all ranks write their own parts to the same files.

The file and offset of every tensor are known in advance, so no tensor is gathered and the ranks
do not communicate. The files are complete when all ranks have written; the caller synchronizes
the ranks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from nbdist.state.tensor_index import tensor_as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nbdist.state.shards import ShardMap

SLICE_BYTES = 64 << 20
"""Bytes that pass through host memory at a time: from a GPU, or to another dtype."""
_WRITEBACK_BYTES = 1 << 20
"""Writeback is started after writes of at least so many bytes."""


class TensorFileRegion(NamedTuple):
    """Region of a file for elements [start, stop) of a flattened tensor."""

    path: Path
    offset: int
    """Offset of its first byte."""
    dtype: torch.dtype
    key: str
    start: int
    stop: int


class OpenFiles:
    """Existing files to write to, each opened once.

    A context manager; on exit without an error the files are flushed to disk with fsync.
    """

    def __init__(self, *, durable: bool = True) -> None:
        """Create the context; files are opened on first use."""
        self._descriptors: dict[Path, int] = {}
        self._durable = durable

    def write_tensor(
        self, path: Path, tensor: torch.Tensor, dtype: torch.dtype, offset: int
    ) -> int:
        """Write a tensor in row-major order, cast to a dtype; return the number of bytes.

        Raises:
            OSError: the disk is full or a limit was reached.
        """
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fd, flat = self._descriptors[path], tensor.detach().reshape(-1)
        for part in flat.split(SLICE_BYTES // max(flat.element_size(), dtype.itemsize)):
            content, start = tensor_as_bytes(part.to("cpu", dtype)), offset
            while content:
                count = os.pwrite(fd, content, offset)
                content, offset = content[count:], offset + count
            if self._durable and offset - start >= _WRITEBACK_BYTES:
                # The disk is busy while the rest is copied. Linux: DONTNEED starts writeback of
                # dirty pages and drops only clean ones.
                os.posix_fadvise(fd, start, offset - start, os.POSIX_FADV_DONTNEED)
        return flat.numel() * dtype.itemsize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._durable:
                for fd in self._descriptors.values():
                    os.fsync(fd)
        finally:
            for fd in self._descriptors.values():
                os.close(fd)
            self._descriptors.clear()


@torch.no_grad()
def write_shards(
    files: OpenFiles,
    regions: Sequence[TensorFileRegion],
    shards: ShardMap,
    *,
    on_progress: Callable[[int], object],
) -> None:
    """Write this rank's owned elements of each region.

    Args:
        shards: owned shards: each element on exactly one rank.
        on_progress: called after each region with the number of bytes written so far.

    Raises:
        OSError: the disk is full or a limit was reached.
    """
    written = 0
    for path, offset, dtype, key, start, stop in regions:
        for piece in shards[key].pieces if key in shards else ():
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                view = piece.view[low - piece.start : high - piece.start]
                place = offset + (low - start) * dtype.itemsize
                written += files.write_tensor(path, view, dtype, place)
        on_progress(written)
