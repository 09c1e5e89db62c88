"""Removal of old, replaced and abandoned checkpoints from a folder.

Never removed are foreign folders, checkpoints in use, and the newest checkpoint. A removal
first renames the folder and then deletes the manifest, so that no partly removed checkpoint is
ever listed.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nbdist.checkpoint import catalog as roots
from nbdist.checkpoint import durable_io
from nbdist.checkpoint.names import DRAFT_PATTERN, MANIFEST_NAME
from nbdist.checkpoint.reader import CheckpointReader
from nbdist.errors import CheckpointError
from nbdist.hardware import process_identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def remove_oldest(root: Path, count: int, *, written: str | None = None) -> list[str]:
    """Remove the oldest checkpoints except for the newest `count`; return the removed names.

    Folders without an nbdist manifest and damaged checkpoints are neither counted nor removed.
    Checkpoints in use, or with files that nbdist did not write, are not removed.

    Args:
        root: folder of the checkpoints.
        count: number of checkpoints to keep, at least 1.
        written: name of the checkpoint just saved. It is kept even if clocks differ and its
            creation time is not the newest.

    Raises:
        CheckpointError: `count` is less than 1, or the folder cannot be written.
    """
    if type(count) is not int or count < 1:
        raise CheckpointError(f"keep must be an integer >= 1, got {count!r}. Or omit it.")
    removed, garbage = [], []
    try:
        with durable_io.exclusive_lock(root):
            summaries = [
                item for item in roots.list_checkpoints_locked(root) if item.path.name == item.name
            ]
            summaries.sort(key=lambda item: item.name == written)  # stable: `written` goes last
            for summary in summaries[:-count]:
                if path := retire(root / summary.name):
                    removed.append(summary.name)
                    garbage.append(path)
    except OSError as error:
        raise CheckpointError(
            f"Cannot remove old checkpoints in {root} ({error.strerror}). Remove them manually."
        ) from error
    for path in garbage:
        durable_io.remove_folder(path)
    return removed


def remove_abandoned(root: Path) -> None:
    """Remove leftovers of this user's dead processes in `root`. Errors are ignored."""
    garbage: list[Path] = []
    with suppress(OSError, CheckpointError), durable_io.exclusive_lock(root):
        garbage += repair_names(root)
    for path in garbage:
        durable_io.remove_folder(path)


def repair_names(root: Path) -> list[Path]:
    """Restore the names of checkpoints after a crash, and return the folders to remove.

    The caller must hold the lock of `root`.
    """
    for name, path in sorted(roots.replaced_checkpoints(root), key=_newest_first):
        taken = (root / name).exists() or (root / name).is_symlink()
        if not taken and roots.summarize_folder(path, name):
            path.rename(root / name)
            durable_io.sync_folder(root)
    replaced = [
        retire(path)
        for name, path in roots.replaced_checkpoints(root)
        if _is_replaced(root, name, path)
    ]
    drafts = [path for path in root.iterdir() if _is_dead_draft(path)]
    return [path for path in replaced if path] + drafts


def retire(path: Path) -> Path | None:
    """Rename a checkpoint for removal and delete its manifest.

    The caller must hold the lock of the root.

    Returns:
        The renamed folder, which the caller removes. None if the checkpoint is in use, has
        files that nbdist did not write, or cannot be renamed.
    """
    if not _is_ours_alone(path):
        return None
    with suppress(OSError), _unused(path) as unused:
        if unused:
            renamed = path.with_name(f".tmp-{secrets.token_hex(16)}")
            process_identity.ProcessIdentity.current_process().write_owner_file(path)
            path.rename(renamed)
            (renamed / MANIFEST_NAME).unlink()
            return renamed
    return None


def _is_ours_alone(path: Path) -> bool:
    try:
        with CheckpointReader.open_folder(path) as opened:
            return not opened.unknown_files()
    except CheckpointError:
        return False


@contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Try to lock the checkpoint against readers. Yields False if a process is reading it."""
    # O_RDWR: an exclusive lock on NFS requires a descriptor open for writing.
    fd = os.open(path / MANIFEST_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield durable_io.try_lock(fd, alone=True)
    finally:
        durable_io.unlock_and_close(fd)


def _newest_first(found: tuple[str, Path]) -> float:
    summary = roots.summarize_folder(found[1], found[0])
    return -summary.created.timestamp() if summary else 0.0


def _is_replaced(root: Path, name: str, path: Path) -> bool:
    return (
        path.stat().st_uid == os.getuid() and roots.summarize_folder(root / name, name) is not None
    )


def _is_dead_draft(path: Path) -> bool:
    """Return whether it is a draft of this user whose process has exited."""
    if not DRAFT_PATTERN.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    if path.stat().st_uid != os.getuid():
        return False
    owner = process_identity.read_owner(path)
    if owner is None:
        # The process died before it wrote the owner file, or the disk was full.
        return not any(item.name != process_identity.OWNER_FILE for item in path.iterdir())
    return owner.has_abandoned(path)
