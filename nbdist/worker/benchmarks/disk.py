"""Benchmarks writing to and reading from a disk, bypassing the page cache.

All ranks of a node run it at the same time, each with an unnamed temporary file, which disappears
even if the process is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

CHUNK_BYTES = 8 << 20
MAX_WRITE_BYTES = 256 << 20
"""Maximum bytes that one rank writes."""
MAX_WRITE_S = 1.0
"""Maximum duration of writing to a slow disk."""
FREE_SPACE_DIVISOR = 32
"""One rank writes at most 1/32 of the free space."""
_MOUNTS = Path("/proc/self/mountinfo")
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
_DASH = "-"
"""Field of mountinfo before the type of the file system."""


class DiskBenchmark:
    """Benchmark of one rank: open, write, read and close a file.

    All ranks call each step at the same time.

    Args:
        folder: a folder on the disk.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()
        self._chunk = mmap.mmap(-1, CHUNK_BYTES)  # aligned, which direct I/O requires
        self._chunk.write(os.urandom(CHUNK_BYTES))  # some file systems compress
        self._direct = False
        self._written = 0

    def open(self) -> None:
        """Create the file, with direct I/O if the file system supports it.

        Raises:
            OSError: the folder cannot be written to or has too little free space.
        """
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed by `close`
        limit = shutil.disk_usage(self._folder).free // FREE_SPACE_DIVISOR
        self._size = min(MAX_WRITE_BYTES, limit // CHUNK_BYTES * CHUNK_BYTES)
        if not self._size:
            message = f"Not enough free space in {self._folder} to benchmark its disk. Free some."
            raise OSError(message)
        fd = self._file.fileno()
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _DIRECT)
            self._direct = bool(_DIRECT)
        except OSError:
            self._direct = False  # not supported here: fsync and fadvise are used instead

    def measure_write(self) -> float:
        """Return the bytes/s of writing, including fsync.

        Raises:
            OSError: the file cannot be written.
        """
        fd, start = self._file.fileno(), time.perf_counter()
        while self._written < self._size and time.perf_counter() - start < MAX_WRITE_S:
            self._written += os.write(fd, self._chunk)
        os.fsync(fd)
        return self._written / (time.perf_counter() - start)

    def measure_read(self) -> float:
        """Return the bytes/s of reading the written file.

        Raises:
            OSError: the file cannot be read.
        """
        fd, left = self._file.fileno(), self._written
        os.lseek(fd, 0, os.SEEK_SET)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while left > 0 and (size := os.readv(fd, [self._chunk])):
            left -= size
        return self._written / (time.perf_counter() - start)

    def close(self) -> None:
        """Close and so delete the file."""
        if hasattr(self, "_file"):
            self._file.close()
        self._chunk.close()

    def describe(self) -> dict[str, Any]:
        """Return the file system and whether direct I/O is used."""
        return {"filesystem": describe_filesystem(self._folder), "direct": self._direct}


def describe_filesystem(folder: Path) -> str:
    """Return the file system of a folder, e.g. "ext4 on /dev/nvme0n1p1", or "unknown"."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else []
    for fields in map(str.split, lines):
        if fields[2] == number and _DASH in fields:
            kind, source = fields[fields.index(_DASH) + 1 :][:2]
            return f"{kind} on {source}"
    return "unknown"
