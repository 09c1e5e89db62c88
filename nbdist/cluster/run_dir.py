"""Private folders of one launcher: sockets, connection files, bulk values.

Made by the kernel (0700) and signed with its identity, removed by whoever sees the end: the
kernel when the launcher is closed, the launcher when the kernel is gone, the next start of
any kernel when both were killed (`leftovers`).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nbdist.errors import StartError
from nbdist.hardware import process_identity, shm_cleanup

PREFIX = f"nbdist-{os.getpid()}-"
"""Names the kernel, so that what a killed one left behind can be told from what is in use."""
MAX_SOCKET_PATH = 107  # bytes of sun_path on Linux without the closing zero
ROOM_FOR_NAMES = 45  # "/nbdist-<pid>-XXXXXXXX/<generation>/r<rank>-<port>" with room to spare
MIN_BULK_BYTES = 512 * 2**20  # containers often give /dev/shm 64 MB: not worth using
SHARED_MEMORY = shm_cleanup.FOLDER


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
        # the temp folder of the next start may be another
        process_identity.note_elsewhere(bulk, path)
        return cls(path, bulk)

    def generation(self, number: int) -> Path:
        """Make and return the folder of one start of the ranks; those of earlier starts go."""
        for earlier in self.path.iterdir():
            if earlier.name.isdigit():
                shutil.rmtree(earlier, ignore_errors=True)
        folder = self.path / str(number)
        folder.mkdir(mode=0o700)
        return folder

    def remove(self) -> None:
        """Delete both folders; a second call finds nothing to do."""
        shm_cleanup.remove_left(self.path)
        for folder in (self.path, self.bulk):
            process_identity.remove(folder)


def private_folders() -> list[Path]:
    """Make an empty folder (0700) wherever bulk values may lie, best first; the caller's to remove.

    Raises:
        StartError: no folder can be made.
    """
    return [_make_private([folder], "bulk values") for folder in _bulk_folders()]


def roots() -> list[Path]:
    """Every folder in which private folders may lie."""
    runtime = Path(f"/run/user/{os.getuid()}")
    return [*dict.fromkeys([*_socket_folders(), runtime, SHARED_MEMORY])]


def _socket_folders() -> list[Path]:
    named = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]  # noqa: S108
    return [Path(name) for name in dict.fromkeys(named) if name]


def _bulk_folders() -> list[Path]:
    room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= MIN_BULK_BYTES
    return [*([SHARED_MEMORY] if room else []), Path(tempfile.gettempdir())]


def _make_private(folders: list[Path], purpose: str, *, max_bytes: int | None = None) -> Path:
    reasons = []
    # one where others may rename what is ours only for want of a better: containers have such
    for folder in sorted(folders, key=lambda folder: bool(danger(folder))):
        if max_bytes and len(os.fsencode(folder)) + ROOM_FOR_NAMES > max_bytes:
            reasons.append(f"{folder}: too long for a Unix socket ({max_bytes} bytes)")
            continue
        try:
            return _made_in(folder)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    msg = (
        f"No folder for {purpose}: {'; '.join(reasons)}."
        " Set TMPDIR to a short, writable folder of your own."
    )
    raise StartError(msg)


def _made_in(folder: Path) -> Path:
    """Make and sign a private folder; nothing of it stays where that fails."""
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))  # mkdtemp makes it 0700
    try:
        process_identity.Owner.me().write(made)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        raise
    if process_identity.is_private(made):
        return made
    shutil.rmtree(made, ignore_errors=True)
    raise OSError(errno.EPERM, "its file system lets others into what is ours")


def danger(folder: Path) -> str:
    """Why a private folder would not be safe here; empty where it is.

    Whoever may rename what lies in a folder could put one of their own in the place of ours.
    """
    try:
        status = folder.stat()
    except OSError as error:
        return error.strerror or "it cannot be looked at"
    if status.st_uid not in {0, os.getuid()}:
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        return "other users may rename what lies in it (it has no sticky bit)"
    return ""
