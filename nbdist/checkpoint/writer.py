"""One safetensors file, written as the tensors come; pure.

Nothing is copied: the bytes go from where they are to the system, and a second thread
computes their checksum meanwhile.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Self

from nbdist.checkpoint.durable_io import write_all
from nbdist.checkpoint.manifest import FilePart
from nbdist.checkpoint.safetensors_header import header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from nbdist.checkpoint.safetensors_header import Stored

_BESIDE_BYTES = 1 << 20
"""Less than this is checksummed at once: waking a thread costs more."""
_SEND_BYTES = 64 << 20
"""So often the system is asked to begin to write to the disk, so that the end is near."""


class Writer:
    """A file that is being written; `close` or the end of `with` makes it certain.

        with Writer(path, [Stored(name="w", dtype="F32", shape=(2,), offsets=(0,))]) as file:
            file.write(content)
        file.part  # its size and checksum

    A file that was left with an exception is removed.
    """

    def __init__(self, path: PurePath, tensors: Sequence[Stored]) -> None:
        """Begin the file, which must not exist.

        Raises:
            OSError: it exists, or cannot be written.
            ValueError: the tensors cannot stand in this order (see `headers.header`).
        """
        head = header(tensors)
        self._path = path
        self._part: FilePart | None = None
        self._left = [one.size_bytes for one in reversed(tensors)]
        self._crc32 = self._size_bytes = self._sent = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nbdist-crc")
        self._fd = -1
        self._open()
        try:
            self._put(memoryview(head))
        except BaseException:
            self.abort()
            raise

    def write(self, content: memoryview) -> None:
        """Write the next bytes of the tensor whose turn it is; blocks until they are taken.

        Args:
            content: contiguous bytes, at most the rest of that tensor. It may be changed
                once this returns.

        Raises:
            OSError: the disk is full, or a limit was met.
            ValueError: more bytes than the tensor has.
        """
        while self._left and not self._left[-1]:
            self._left.pop()
        if not content.nbytes:
            return
        if not self._left or content.nbytes > self._left[-1]:
            raise ValueError(f"{content.nbytes} bytes are more than the tensor has left")
        self._left[-1] -= content.nbytes
        self._put(content.cast("B"))

    def close(self) -> FilePart:
        """Wait until the file is on the disk; say what was written.

        Raises:
            OSError: it did not get there.
            ValueError: bytes are missing.
        """
        if self._part is None:
            if any(self._left):
                raise ValueError(f"{sum(self._left)} bytes of {self._path.name} are missing")
            self._settle()
            self._release()
            self._part = FilePart(
                name=self._path.name, size_bytes=self._size_bytes, crc32=self._crc32
            )
        return self._part

    @property
    def part(self) -> FilePart:
        """What was written."""
        return self.close()

    def abort(self) -> None:
        """Remove the file."""
        self._release()
        self._remove()

    def __enter__(self) -> Self:
        """Give the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the file, or remove it."""
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise

    def _put(self, content: memoryview) -> None:
        if content.nbytes < _BESIDE_BYTES:
            self._take(content)
            self._crc32 = zlib.crc32(content, self._crc32)
        else:
            beside = self._pool.submit(zlib.crc32, content, self._crc32)
            try:
                self._send(content)
            finally:
                self._crc32 = beside.result()
        self._size_bytes += content.nbytes

    # -- where it goes

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def _take(self, content: memoryview) -> None:
        """Write all of it."""
        write_all(self._fd, content)

    def _settle(self) -> None:
        """Wait until it is certain."""
        os.fsync(self._fd)

    def _remove(self) -> None:
        Path(self._path).unlink(missing_ok=True)

    def _send(self, content: memoryview) -> None:
        """Write much; the disk begins meanwhile."""
        for start in range(0, content.nbytes, _SEND_BYTES):
            piece = content[start : start + _SEND_BYTES]
            write_all(self._fd, piece)
            # Linux begins to write what it is told to forget, and forgets only what is written.
            os.posix_fadvise(
                self._fd, self._size_bytes + start, piece.nbytes, os.POSIX_FADV_DONTNEED
            )

    def _release(self) -> None:
        self._pool.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
