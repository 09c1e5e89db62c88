"""Private folders of one launcher: sockets, connection files, bulk values.

Made by the kernel (0700), removed by whoever sees the end: the kernel when the launcher
is closed, the launcher when the kernel is gone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nbdist.errors import StartError

PREFIX = f"nbdist-{os.getpid()}-"
"""Names the kernel, so that what a killed one left behind can be told from what is in use."""
MAX_SOCKET_PATH = 107  # bytes of sun_path on Linux without the closing zero
ROOM_FOR_NAMES = 45  # "/nbdist-<pid>-XXXXXXXX/<generation>/r<rank>-<port>" with room to spare
MIN_BULK_BYTES = 512 * 2**20  # containers often give /dev/shm 64 MB: not worth using
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - tmpfs; the folder made in it is 0700


@dataclass(frozen=True, slots=True)
class RunDir:
    """The two private folders of a launcher."""

    path: Path
    """Sockets and connection files; short enough for Unix sockets."""
    bulk: Path
    """Payload files; in shared memory where there is room."""

    @classmethod
    def create(cls) -> RunDir:
        """Make both folders, mode 0700.

        Raises:
            StartError: no writable folder with a path short enough for a socket.
        """
        path = _make_private(_socket_folders(), "sockets", max_bytes=MAX_SOCKET_PATH)
        bulk = _make_private(_bulk_folders(), "bulk values")
        return cls(path, bulk)

    def generation(self, number: int) -> Path:
        """Make and return the folder of one start of the ranks."""
        folder = self.path / str(number)
        folder.mkdir(mode=0o700)
        return folder

    def remove(self) -> None:
        """Delete both folders; a second call finds nothing to do."""
        for folder in (self.path, self.bulk):
            shutil.rmtree(folder, ignore_errors=True)


def private_folders() -> list[Path]:
    """Make an empty folder (0700) wherever bulk values may lie, best first; the caller's to remove.

    Raises:
        StartError: no folder can be made.
    """
    return [_make_private([folder], "bulk values") for folder in _bulk_folders()]


def _socket_folders() -> list[Path]:
    named = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]  # noqa: S108
    return [Path(name) for name in dict.fromkeys(named) if name]


def _bulk_folders() -> list[Path]:
    room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= MIN_BULK_BYTES
    return [*([SHARED_MEMORY] if room else []), Path(tempfile.gettempdir())]


def _make_private(folders: list[Path], purpose: str, *, max_bytes: int | None = None) -> Path:
    reasons = []
    for folder in folders:
        if max_bytes and len(os.fsencode(folder)) + ROOM_FOR_NAMES > max_bytes:
            reasons.append(f"{folder}: too long for a Unix socket ({max_bytes} bytes)")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))  # mkdtemp makes it 0700
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    msg = f"No folder for {purpose}: {'; '.join(reasons)}. Set TMPDIR to a short, writable folder."
    raise StartError(msg)
