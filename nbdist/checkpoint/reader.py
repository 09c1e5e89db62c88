"""A checkpoint that is being read; pure.

It is held open as a folder: whatever name it is given meanwhile, what is read stays the
same checkpoint, and nobody removes it.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nbdist.checkpoint import durable_io
from nbdist.checkpoint.manifest import MAX_BYTES, FilePart, Manifest
from nbdist.checkpoint.names import MANIFEST, shown
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open checkpoint; `with` closes it."""

    path: Path
    """Where it was when it was opened."""
    manifest: Manifest
    _folder: int
    _lock: int
    """The open manifest: a lock on it says that the checkpoint is in use."""

    @classmethod
    def at(cls, path: Path) -> Opened:
        """Open the checkpoint in a folder.

        Raises:
            CheckpointError: there is none, or it cannot be trusted.
        """
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(_no_checkpoint(path, error)) from error
        try:
            return cls._in(folder, path)
        except BaseException:
            os.close(folder)
            raise

    @classmethod
    def _in(cls, folder: int, path: Path) -> Opened:
        try:
            lock = durable_io.open_regular(MANIFEST, folder=folder)
        except OSError as error:
            raise CheckpointError(_no_checkpoint(path, error)) from error
        try:
            _check_stays(lock, path)
            text = durable_io.read_small(MANIFEST, folder=folder, limit=MAX_BYTES)
            return cls(path=path, manifest=Manifest.from_json(text), _folder=folder, _lock=lock)
        except OSError as error:
            durable_io.unlock_and_close(lock)
            raise CheckpointError(_no_checkpoint(path, error)) from error
        except BaseException:
            durable_io.unlock_and_close(lock)
            raise

    def open(self, file: FilePart) -> int:
        """Open one of its files, which has the size that the manifest says.

        Raises:
            CheckpointError: it is missing, or of another size.
        """
        try:
            fd = durable_io.open_regular(file.name, folder=self._folder)
        except OSError as error:
            raise CheckpointError(
                f"{file.name} of {self.path} cannot be opened ({error.strerror}); take another"
                " checkpoint."
            ) from error
        found = os.fstat(fd).st_size
        if found != file.size_bytes:
            os.close(fd)
            raise CheckpointError(
                f"{file.name} of {self.path} has {found} bytes where {file.size_bytes} were"
                " written; take another checkpoint."
            )
        return fd

    def strange(self) -> list[str]:
        """Names of files that the manifest does not know; hidden ones do not count."""
        known = {MANIFEST, *(file.name for file in self.manifest.files)}
        found = sorted(os.listdir(self._folder))  # noqa: PTH208 - an open folder has no path
        return [name for name in found if name not in known and not name.startswith(".")]

    def complete(self) -> bool:
        """Whether every file is there and has its size."""
        return all(map(self._is_there, self.manifest.files))

    def _is_there(self, file: FilePart) -> bool:
        try:
            found = os.stat(file.name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == file.size_bytes

    def close(self) -> None:
        """Let others remove it."""
        durable_io.unlock_and_close(self._lock)
        os.close(self._folder)

    def __enter__(self) -> Self:
        """Give the open checkpoint."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


def _check_stays(lock: int, path: Path) -> None:
    """Keep others from removing the checkpoint; refuse one that is being removed."""
    if not durable_io.try_lock(lock, alone=False) or not os.fstat(lock).st_nlink:
        raise CheckpointError(f"{path} is being removed; take another checkpoint.")


def _no_checkpoint(path: Path, error: OSError) -> str:
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL}:
        why = "there is no finished checkpoint of nbdist"
    else:
        why = f"it cannot be read ({error.strerror})"
    return f"{shown(str(path))} cannot be loaded: {why}; nbdist lists those that can."
