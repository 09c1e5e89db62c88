"""Shards of all ranks into files that they write together: each puts its own parts in place.

Where every tensor lies in which file is known before the first byte is written, so a rank
needs nothing of the others: no tensor is gathered and nothing crosses between ranks. The
files are whole once all ranks have written; whoever made them sees to that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nbdist.state.shards import ShardMap

SLICE_BYTES = 64 << 20
"""Through host memory at a time: from a GPU, or into another dtype."""
_SEND_BYTES = 8 << 20
"""So often the disk is asked to begin, so that it is busy while the rest is copied."""


class Slot(NamedTuple):
    """Room for elements [start, stop) of a flattened tensor in a file."""

    path: Path
    offset: int
    """Of its first byte."""
    dtype: torch.dtype
    """In the file."""
    key: str
    start: int
    stop: int


@dataclass(slots=True)
class _Open:
    """An open file, and what of it the disk has not been asked to write."""

    fd: int
    low: int = 0
    high: int = 0
    waiting: int = 0
    """Bytes of ours between the two."""

    def wrote(self, start: int, stop: int) -> None:
        """Take note of bytes, and send them off once they are many."""
        self.low = min(self.low, start) if self.waiting else start
        self.high = max(self.high, stop) if self.waiting else stop
        self.waiting += stop - start
        if self.waiting >= _SEND_BYTES:
            # Linux begins to write what it is told to forget, and forgets only what is written.
            os.posix_fadvise(self.fd, self.low, self.high - self.low, os.POSIX_FADV_DONTNEED)
            self.waiting = 0


class Files:
    """Files that exist and are written to, each opened once.

    A context; its end without an error waits until what was written is on the disk.
    """

    def __init__(self, *, durable: bool = True) -> None:
        """Open none yet.

        Args:
            durable: whether the disk is waited for.
        """
        self._open: dict[Path, _Open] = {}
        self._durable = durable

    def put(self, path: Path, content: memoryview, offset: int) -> None:
        """Write bytes at a place.

        Raises:
            OSError: the disk is full, or a limit was met.
        """
        if path not in self._open:
            fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._open[path] = _Open(fd)
        file, start = self._open[path], offset
        while content:
            count = os.pwrite(file.fd, content, offset)
            content, offset = content[count:], offset + count
        if self._durable:
            file.wrote(start, offset)

    def put_tensor(self, path: Path, tensor: torch.Tensor, dtype: torch.dtype, offset: int) -> int:
        """Write a tensor's elements in a type, row by row; returns their bytes."""
        flat = tensor.detach().reshape(-1)
        for part in flat.split(SLICE_BYTES // max(flat.element_size(), dtype.itemsize)):
            content = octets(part.to("cpu", dtype))
            self.put(path, content, offset)
            offset += content.nbytes
        return flat.numel() * dtype.itemsize

    def __enter__(self) -> Self:
        """Give the files themselves."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the files."""
        try:
            if kind is None and self._durable:
                for file in self._open.values():
                    os.fsync(file.fd)
        finally:
            for file in self._open.values():
                os.close(file.fd)
            self._open.clear()


@torch.no_grad()
def write(
    files: Files, slots: Sequence[Slot], share: ShardMap, *, told: Callable[[int], object]
) -> int:
    """Write what this rank owns of each slot; returns the bytes.

    Args:
        files: where to.
        slots: of all tensors.
        share: of all ranks together, each element stands in one.
        told: hears after each slot how many bytes have been written.

    Raises:
        OSError: the disk is full, or a limit was met.
    """
    written = 0
    for path, offset, dtype, key, start, stop in slots:
        for piece in share[key].pieces if key in share else ():
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                view = piece.view[low - piece.start : high - piece.start]
                place = offset + (low - start) * dtype.itemsize
                written += files.put_tensor(path, view, dtype, place)
        told(written)
    return written


def rotated(slots: Sequence[Slot], rank: int, world_size: int) -> list[Slot]:
    """Let each rank begin elsewhere: the system lets one process at a time write to a file."""
    first = rank * len(slots) // world_size
    return [*slots[first:], *slots[:first]]


def octets(view: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of one dimension, as they are."""
    found: memoryview = view.view(torch.uint8).numpy().data if view.numel() else memoryview(b"")
    return found
