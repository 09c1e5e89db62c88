"""What survives a power cut, and who may write now; pure.

A file is there for certain once it and its folder have been synced. One process at a time
changes the names in a folder of checkpoints: it holds a lock that the system takes back
when the process dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nbdist.checkpoint.names import LOCK
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import OWNER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_WITHIN_S = 30.0
LOOK_WITHIN_S = 1.0
_POLL_S = 0.01
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Lustre without the mount option `flock` has none: then one notebook at a time, please."""


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist, and wait until it is on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, memoryview(content))
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, content: memoryview) -> None:
    """Write all of it; one call of the system may take less."""
    while content:
        content = content[os.write(fd, content) :]


def open_regular(name: str, *, folder: int, flags: int = os.O_RDONLY) -> int:
    """Open a file of an open folder; never a link, and never waits on a pipe.

    Raises:
        OSError: it is not there, or is not a regular file.
    """
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd


def read_at(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer with what a file has at `offset`.

    Raises:
        OSError: the file ends before the buffer is full.
    """
    while buffer:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            raise OSError(errno.EIO, "the file was cut short")
        buffer, offset = buffer[count:], offset + count


def read_small(name: str, *, folder: int, limit: int) -> bytes:
    """Read a file of an open folder.

    Raises:
        OSError: it is not there, is not a regular file, or is larger than `limit` bytes.
    """
    fd = open_regular(name, folder=folder)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", name)
        content = bytearray(size_bytes)
        read_at(fd, memoryview(content), 0)
    finally:
        os.close(fd)
    return bytes(content)


def try_lock(fd: int, *, alone: bool) -> bool:
    """Lock an open file, alone or beside other readers; False where somebody is in the way."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def unlock_and_close(fd: int) -> None:
    """Close a locked file; its lock ends even if a process forked meanwhile has it open too."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextmanager
def locked(root: Path, *, within_s: float = LOCK_WITHIN_S) -> Iterator[None]:
    """Be the only process that changes names in `root`; waits for its turn.

    Raises:
        CheckpointError: another process has held the lock for `within_s`.
    """
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if not _wait_for_lock(fd, within_s, alone=True):
            raise CheckpointError(
                f"another process has been changing {root} for {within_s:g} s; wait for its save,"
                " or give another folder."
            )
        yield
    finally:
        unlock_and_close(fd)


@contextmanager
def at_rest(root: Path, *, within_s: float = LOOK_WITHIN_S) -> Iterator[None]:
    """Let nobody change names in `root`; goes on without that where it cannot be had in time."""
    try:
        fd = os.open(root / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # no name was ever changed here, or the folder is another user's
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
    """Remove a folder of files; what is gone already, or cannot go, is left to the next save.

    Who removes it is said in it to the end, so that the next save knows.
    """
    with suppress(OSError):
        files = sorted(os.scandir(path), key=lambda entry: entry.name == OWNER)
        for entry in files:
            with suppress(OSError):
                os.unlink(entry.path)  # noqa: PTH108 - never follows a link
        path.rmdir()
