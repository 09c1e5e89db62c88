"""How fast a disk is written and read, past the page cache; runs on a rank.

All ranks of a machine do it at once, each with a file that has no name, so that nothing is left
whatever ends the process.
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

CHUNK = 8 << 20
MOST = 256 << 20
"""Bytes that one rank writes."""
LONGEST_S = 1.0
"""A slow disk is written for no longer."""
SHARE_OF_ROOM = 32
"""Of what is free on it, one rank writes no more than one part in so many."""
_MOUNTS = Path("/proc/self/mountinfo")
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
_DASH = "-"
"""In mountinfo, before the type of the file system."""


class Trial:
    """One rank's file: opened, written, read, closed, each step by all ranks together.

    Args:
        folder: on the disk.
    """

    def __init__(self, folder: str) -> None:
        """Open nothing yet."""
        self._folder = Path(folder).expanduser()
        self._chunk = mmap.mmap(-1, CHUNK)  # aligned as direct access needs it
        self._chunk.write(os.urandom(CHUNK))  # some file systems compress
        self._direct = False
        self._written = 0

    def open(self) -> None:
        """Make the file, past the page cache where the file system can.

        Raises:
            OSError: the folder cannot be written to, or has no room.
        """
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed by `close`
        room = shutil.disk_usage(self._folder).free // SHARE_OF_ROOM
        self._size = min(MOST, room // CHUNK * CHUNK)
        if not self._size:
            message = f"{self._folder} has no room to measure its disk; free some."
            raise OSError(message)
        number = self._file.fileno()
        try:
            fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | _DIRECT)
            self._direct = bool(_DIRECT)
        except OSError:
            self._direct = False  # this file system has none: fsync and fadvise instead

    def write(self) -> float:
        """Bytes/s of writing, to the disk itself.

        Raises:
            OSError: it cannot be written.
        """
        number, since = self._file.fileno(), time.perf_counter()
        while self._written < self._size and time.perf_counter() - since < LONGEST_S:
            self._written += os.write(number, self._chunk)
        os.fsync(number)
        return self._written / (time.perf_counter() - since)

    def read(self) -> float:
        """Bytes/s of reading what was written.

        Raises:
            OSError: it cannot be read.
        """
        number, left = self._file.fileno(), self._written
        os.lseek(number, 0, os.SEEK_SET)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        since = time.perf_counter()
        while left > 0 and (size := os.readv(number, [self._chunk])):
            left -= size
        return self._written / (time.perf_counter() - since)

    def close(self) -> None:
        """Let the file go."""
        if hasattr(self, "_file"):
            self._file.close()
        self._chunk.close()

    def told(self) -> dict[str, Any]:
        """What the disk is."""
        return {"filesystem": filesystem(self._folder), "direct": self._direct}


def filesystem(folder: Path) -> str:
    """Say what a folder is on: "ext4 on /dev/nvme0n1p1"; "unknown" where nobody tells."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else []
    for fields in map(str.split, lines):
        if fields[2] == number and _DASH in fields:
            kind, source = fields[fields.index(_DASH) + 1 :][:2]
            return f"{kind} on {source}"
    return "unknown"
