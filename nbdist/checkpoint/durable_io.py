"""Durable file I/O with fsync, file locks, and atomic creation of a folder for an export.

A new file survives a power failure once both it and its folder are synced. Locks are those of
flock(2), which the kernel releases when the process dies. filelock has no shared locks, and treats
file systems without locks in another way.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nbdist.checkpoint.name_validation import LOCK_NAME
from nbdist.errors import CheckpointError, NotEmptyError
from nbdist.hardware.process_identity import OWNER_FILE, ProcessIdentity, read_owner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_TIMEOUT_S = 30.0
SHARED_LOCK_TIMEOUT_S = 1.0
_POLL_S = 0.01
_WRITEBACK_BYTES = 64 << 20
"""Most bytes of one call, after which their writeback to the disk is started."""
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of file systems without locks, such as Lustre without the mount option `flock`.

Locking is skipped there, so only one notebook at a time may save to such a folder.
"""
_EXPORTED = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|(adapter_)?model\.safetensors\.index\.json"
    r"|adapter_config\.json"
)
"""Files written by an export. The next export replaces them even if its file names differ."""


class DurableFile:
    """A new file that is on the disk once it is closed."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            FileExistsError: the file exists.
            OSError: it cannot be created.
        """
        self._file, self._path = path.open("xb", buffering=0), path
        self._size_bytes = 0

    def write(self, content: memoryview) -> None:
        """Write all of the content.

        Raises:
            OSError: the disk is full, or a quota or file size limit is exceeded.
        """
        while content:
            count = self._file.write(content[:_WRITEBACK_BYTES])
            # Linux: DONTNEED starts writeback of dirty pages, so that the final fsync is short.
            os.posix_fadvise(self._file.fileno(), self._size_bytes, count, os.POSIX_FADV_DONTNEED)
            content, self._size_bytes = content[count:], self._size_bytes + count

    def close(self) -> None:
        """Sync the file and close it.

        Raises:
            OSError: the file cannot be synced.
        """
        with self._file:
            os.fsync(self._file.fileno())

    def abort(self) -> None:
        """Close the file and remove it."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Call fsync on a folder, so that created and renamed entries are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename_over(folder: Path, target: Path, aside: Path) -> bool:
    """Rename a folder to `target`; what exists there is renamed to `aside` first.

    Returns:
        Whether `target` existed.

    Raises:
        OSError: a folder cannot be renamed; what existed at `target` is there again.
    """
    existed = target.exists()
    if existed:
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if existed:
            aside.rename(target)
        raise
    return existed


def open_regular(name: str, *, folder: int) -> int:
    """Open a regular file in an open folder. Links are not followed, pipes do not block.

    Raises:
        OSError: the file does not exist or is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Lock an open file, exclusive or shared. Return False if another process holds the lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
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
        if not _wait_for_lock(fd, within_s, exclusive=True):
            raise CheckpointError(
                f"Timed out after {within_s:g} s: another process is writing to {root}. Wait for"
                " its save, or use another folder."
            )
        yield
    finally:
        unlock_and_close(fd)


@contextmanager
def shared_lock(root: Path) -> Iterator[None]:
    """Hold the shared lock of `root`. Continues without it after `SHARED_LOCK_TIMEOUT_S`."""
    try:
        fd = os.open(root / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # nothing was saved here yet, or the folder belongs to another user
        yield
        return
    try:
        _wait_for_lock(fd, SHARED_LOCK_TIMEOUT_S, exclusive=False)
        yield
    finally:
        unlock_and_close(fd)


def _wait_for_lock(fd: int, within_s: float, *, exclusive: bool) -> bool:
    deadline = time.monotonic() + within_s
    while not try_lock(fd, exclusive=exclusive):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder of files. Errors are ignored; the next save removes what remains."""
    with suppress(OSError):
        # The owner file goes last: by it the next save identifies an unfinished removal.
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name == OWNER_FILE):
            with suppress(OSError):
                os.unlink(entry.path)  # noqa: PTH108 - never follows a link
        path.rmdir()


# -- folder of an export: written under a temporary name, then renamed


def check_target(target: Path, *, overwrite: bool) -> None:
    """Check that a folder can be created at `target`.

    Raises:
        NotEmptyError: the folder is not empty and `overwrite` is False.
        CheckpointError: `target` is a file.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file. Use a folder.")
    if not overwrite and target.is_dir() and next(target.iterdir(), None) is not None:
        raise NotEmptyError(
            f"{target} exists and is not empty. Use another folder, or --overwrite to replace"
            " the model in it (other files in it are kept)."
        )


def create_temporary(target: Path) -> Path:
    """Create a temporary folder next to the target.

    Also removes temporary folders of processes that have exited.

    Raises:
        OSError: the folder cannot be created.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in target.parent.glob(f".{glob.escape(target.name)}.tmp-*"):
        writer = read_owner(old)
        if writer is not None and writer.has_abandoned(old):
            shutil.rmtree(old, ignore_errors=True)
    folder = target.parent / f".{target.name}.tmp-{secrets.token_hex(16)}"
    folder.mkdir()
    ProcessIdentity.current_process().write_owner_file(folder)
    return folder


def preallocate(path: Path, head: bytes, size_bytes: int) -> None:
    """Create a file, allocate its full size and write its header.

    Allocating first reports a full disk before any tensor is written.

    Raises:
        OSError: there is not enough space.
    """
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        file.write(head)


def sync_files(folder: Path) -> None:
    """Call fsync on all files of a folder, recursively."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def commit_folder(folder: Path, target: Path, *, overwrite: bool) -> None:
    """Rename a finished folder to its target and sync the parent folder.

    Its files must have been synced. Files at the target that nbdist did not write are moved into
    the new folder. After a crash either the old or the new folder exists; a crash between the two
    renames leaves the old one under a temporary name next to the target.

    Raises:
        NotEmptyError: another process has written files to `target` and `overwrite` is False.
        CheckpointError: another process has created a file at `target`.
        OSError: a folder cannot be renamed or synced.
    """
    check_target(target, overwrite=overwrite)
    (folder / OWNER_FILE).unlink(missing_ok=True)
    sync_folder(folder)
    aside = target.parent / f".{target.name}.old-{secrets.token_hex(16)}"
    replaced = rename_over(folder, target, aside)
    sync_folder(target.parent)
    if not replaced:
        return
    for old in aside.iterdir():
        if not _EXPORTED.fullmatch(old.name) and not os.path.lexists(target / old.name):
            old.rename(target / old.name)
    for left in aside.iterdir():
        if left.is_dir() and not left.is_symlink():
            continue  # nbdist writes no subfolders, so keep it in the renamed old folder
        with suppress(OSError):
            left.unlink()
    with suppress(OSError):
        aside.rmdir()
    sync_folder(target)
