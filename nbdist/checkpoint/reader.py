"""Reading of a checkpoint folder.

The folder and its manifest are kept open. If the folder is renamed meanwhile, the same
checkpoint is read, and a shared lock on the manifest prevents its removal.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nbdist.checkpoint import durable_io
from nbdist.checkpoint.manifest import MAX_BYTES, CheckpointFile, Manifest
from nbdist.checkpoint.names import MANIFEST_NAME, printable
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReader:
    """Open checkpoint. A context manager that closes it."""

    path: Path
    """Path at the time of opening."""
    manifest: Manifest
    _folder: int
    _lock: int
    """Descriptor of the manifest. A shared lock on it marks the checkpoint as in use."""

    @classmethod
    def open_folder(cls, path: Path) -> CheckpointReader:
        """Open the checkpoint in a folder.

        Raises:
            CheckpointError: the folder has no checkpoint, or its manifest is invalid.
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
    def _in(cls, folder: int, path: Path) -> CheckpointReader:
        try:
            lock = durable_io.open_regular(MANIFEST_NAME, folder=folder)
        except OSError as error:
            raise CheckpointError(_no_checkpoint(path, error)) from error
        try:
            _check_stays(lock, path)
            text = durable_io.read_small(MANIFEST_NAME, folder=folder, limit=MAX_BYTES)
            return cls(path=path, manifest=Manifest.from_json(text), _folder=folder, _lock=lock)
        except OSError as error:
            durable_io.unlock_and_close(lock)
            raise CheckpointError(_no_checkpoint(path, error)) from error
        except BaseException:
            durable_io.unlock_and_close(lock)
            raise

    def open_file(self, file: CheckpointFile) -> int:
        """Open a file of the checkpoint and return its descriptor.

        Raises:
            CheckpointError: the file is missing, or its size differs from the manifest.
        """
        try:
            fd = durable_io.open_regular(file.name, folder=self._folder)
        except OSError as error:
            raise CheckpointError(
                f"Cannot open {self.path / file.name} ({error.strerror}). Load another checkpoint."
            ) from error
        size_bytes = os.fstat(fd).st_size
        if size_bytes != file.size_bytes:
            os.close(fd)
            raise CheckpointError(
                f"{self.path / file.name} has {size_bytes} bytes, but"
                f" {file.size_bytes} were written."
                " Load another checkpoint."
            )
        return fd

    def unknown_files(self) -> list[str]:
        """Return the names of files that the manifest does not list, without hidden files."""
        known = {MANIFEST_NAME, *(file.name for file in self.manifest.files)}
        names = sorted(os.listdir(self._folder))  # noqa: PTH208 - lists an open descriptor
        return [name for name in names if name not in known and not name.startswith(".")]

    def is_complete(self) -> bool:
        """Return whether all files exist and have the size in the manifest."""
        return all(map(self._is_there, self.manifest.files))

    def _is_there(self, file: CheckpointFile) -> bool:
        try:
            status = os.stat(file.name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == file.size_bytes

    def close(self) -> None:
        """Release the lock and close the folder."""
        durable_io.unlock_and_close(self._lock)
        os.close(self._folder)

    def __enter__(self) -> Self:
        """Return the open checkpoint."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the checkpoint."""
        self.close()


def _check_stays(lock: int, path: Path) -> None:
    """Lock the checkpoint against removal.

    Raises:
        CheckpointError: the checkpoint is being removed.
    """
    if not durable_io.try_lock(lock, alone=False) or not os.fstat(lock).st_nlink:
        raise CheckpointError(f"{path} is being removed. Load another checkpoint.")


def _no_checkpoint(path: Path, error: OSError) -> str:
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL}:
        why = "not a complete nbdist checkpoint"
    else:
        why = f"it cannot be read ({error.strerror})"
    return f"Cannot load {printable(str(path))}: {why}. Use a checkpoint that nbdist lists."
