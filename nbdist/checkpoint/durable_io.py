"""Durable file I/O with fsync, and the file lock on a folder of checkpoints.

A new file survives a power failure once both it and its folder are synced. Only the process
that holds the lock renames checkpoints in a folder; the kernel releases it when the process dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nbdist.checkpoint.names import LOCK_NAME
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import OWNER_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_TIMEOUT_S = 30.0
SHARED_LOCK_TIMEOUT_S = 1.0
_POLL_S = 0.01
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of file systems without locks, such as Lustre without the mount option `flock`.

Locking is skipped there, so only one notebook at a time may save to such a folder.
"""


def sync_folder(path: Path) -> None:
    """Call fsync on a folder, so that created and renamed entries are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: Path, content: bytes) -> None:
    """Create a file, write its content and call fsync.

    Raises:
        FileExistsError: the file exists.
        OSError: it cannot be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, memoryview(content))
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, content: memoryview) -> None:
    """Write the whole buffer; ``os.write`` may write only a part of it."""
    while content:
        content = content[os.write(fd, content) :]


def open_regular(name: str, *, folder: int, flags: int = os.O_RDONLY) -> int:
    """Open a regular file in an open folder. Links are not followed, pipes do not block.

    Raises:
        OSError: the file does not exist or is not a regular file.
    """
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer from a file, starting at `offset`.

    Raises:
        OSError: the file ends before the buffer is full.
    """
    while buffer:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            raise OSError(errno.EIO, "the file is truncated")
        buffer, offset = buffer[count:], offset + count


def read_small(name: str, *, folder: int, limit: int) -> bytes:
    """Read a whole file in an open folder.

    Raises:
        OSError: it does not exist, is not a regular file, or is larger than `limit` bytes.
    """
    fd = open_regular(name, folder=folder)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", name)
        content = bytearray(size_bytes)
        read_into(fd, memoryview(content), 0)
    finally:
        os.close(fd)
    return bytes(content)


def try_lock(fd: int, *, alone: bool) -> bool:
    """Lock an open file, exclusive or shared. Return False if another process holds the lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def unlock_and_close(fd: int) -> None:
    """Unlock and close a file."""
    # A forked process may hold the same open file, and then closing alone keeps the lock.
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextmanager
def exclusive_lock(root: Path, *, within_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the exclusive lock of `root`, which is required to rename checkpoints.

    Raises:
        CheckpointError: the lock was not acquired within `within_s`.
    """
    fd = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if not _wait_for_lock(fd, within_s, alone=True):
            raise CheckpointError(
                f"Timed out after {within_s:g} s: another process is writing to {root}. Wait for"
                " its save, or use another folder."
            )
        yield
    finally:
        unlock_and_close(fd)


@contextmanager
def shared_lock(root: Path, *, within_s: float = SHARED_LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the shared lock of `root`. Continues without it after `within_s`."""
    try:
        fd = os.open(root / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # nothing was saved here yet, or the folder belongs to another user
        yield
        return
    try:
        _wait_for_lock(fd, within_s, alone=False)
        yield
    finally:
        unlock_and_close(fd)


def _wait_for_lock(fd: int, within_s: float, *, alone: bool) -> bool:
    deadline = time.monotonic() + within_s
    while not try_lock(fd, alone=alone):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder of files. Errors are ignored; the next save removes what remains."""
    with suppress(OSError):
        # The owner file goes last: by it the next save identifies an unfinished removal.
        files = sorted(os.scandir(path), key=lambda entry: entry.name == OWNER_FILE)
        for entry in files:
            with suppress(OSError):
                os.unlink(entry.path)  # noqa: PTH108 - never follows a link
        path.rmdir()
