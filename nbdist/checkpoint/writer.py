"""Streaming writer of a safetensors file.

Data is passed to the system without a copy, while a second thread computes the checksum.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Self

from nbdist.checkpoint.durable_io import write_all
from nbdist.checkpoint.manifest import CheckpointFile
from nbdist.checkpoint.safetensors_header import build_header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from nbdist.checkpoint.safetensors_header import StoredTensor

_MIN_THREADED_CRC_BYTES = 1 << 20
"""Smaller buffers are checksummed in the same thread: waking another one takes longer."""
_WRITEBACK_BYTES = 64 << 20
"""Writeback to the disk is started after so many bytes, so that the final fsync is short."""


class SafetensorsWriter:
    """Writer of one safetensors file. `close`, or the end of `with`, syncs it to the disk.

        with SafetensorsWriter(path, [StoredTensor(name="w", dtype="F32", shape=(2,))]) as file:
            file.write(content)
        file.result  # its size and checksum

    If the `with` block raises, the file is removed.
    """

    def __init__(self, path: PurePath, tensors: Sequence[StoredTensor]) -> None:
        """Create the file and write its header.

        Raises:
            OSError: the file exists or cannot be written.
            ValueError: a duplicate or misaligned tensor (see ``build_header``).
        """
        head = build_header(tensors)
        self._path = path
        self._part: CheckpointFile | None = None
        self._left = [tensor.size_bytes for tensor in reversed(tensors)]
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
        """Write the next bytes of the current tensor. Blocks until they are written.

        Args:
            content: contiguous bytes, at most the remaining bytes of the tensor. The buffer may
                be reused after the call.

        Raises:
            OSError: the disk is full, or a quota or file size limit is exceeded.
            ValueError: `content` is larger than the rest of the tensor.
        """
        while self._left and not self._left[-1]:
            self._left.pop()
        if not content.nbytes:
            return
        if not self._left or content.nbytes > self._left[-1]:
            raise ValueError(f"{content.nbytes} bytes are more than the rest of the tensor.")
        self._left[-1] -= content.nbytes
        self._put(content.cast("B"))

    def close(self) -> CheckpointFile:
        """Sync and close the file. Return its name, size and checksum.

        Raises:
            OSError: the file cannot be synced.
            ValueError: not all bytes of the tensors were written.
        """
        if self._part is None:
            if any(self._left):
                raise ValueError(f"{sum(self._left)} bytes of {self._path.name} are missing.")
            self._settle()
            self._release()
            self._part = CheckpointFile(
                name=self._path.name, size_bytes=self._size_bytes, crc32=self._crc32
            )
        return self._part

    @property
    def result(self) -> CheckpointFile:
        """Name, size and checksum of the file. Closes it if it is open."""
        return self.close()

    def abort(self) -> None:
        """Stop writing and remove the file."""
        self._release()
        self._remove()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file, or remove it after an exception."""
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise

    def _put(self, content: memoryview) -> None:
        if content.nbytes < _MIN_THREADED_CRC_BYTES:
            self._take(content)
            self._crc32 = zlib.crc32(content, self._crc32)
        else:
            checksum = self._pool.submit(zlib.crc32, content, self._crc32)
            try:
                self._send(content)
            finally:
                self._crc32 = checksum.result()
        self._size_bytes += content.nbytes

    # -- output (overridden for URLs)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def _take(self, content: memoryview) -> None:
        """Write a whole buffer."""
        write_all(self._fd, content)

    def _settle(self) -> None:
        """Wait until the file is durable."""
        os.fsync(self._fd)

    def _remove(self) -> None:
        Path(self._path).unlink(missing_ok=True)

    def _send(self, content: memoryview) -> None:
        """Write a large buffer and start its writeback to the disk."""
        for start in range(0, content.nbytes, _WRITEBACK_BYTES):
            piece = content[start : start + _WRITEBACK_BYTES]
            write_all(self._fd, piece)
            # On Linux, POSIX_FADV_DONTNEED starts writeback of dirty pages; it drops clean ones.
            os.posix_fadvise(
                self._fd, self._size_bytes + start, piece.nbytes, os.POSIX_FADV_DONTNEED
            )

    def _release(self) -> None:
        self._pool.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
