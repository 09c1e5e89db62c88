"""Atomic creation of an export folder: write to a temporary folder, then rename it.

With ``overwrite`` it replaces an existing folder. Files in the old folder that were not written
by nbdist are moved into the new one.
"""

from __future__ import annotations

import glob
import os
import re
import secrets
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from nbdist.checkpoint.durable_io import rename_over, sync_folder
from nbdist.errors import CheckpointError, NotEmptyError
from nbdist.hardware import process_identity
from nbdist.hardware.process_identity import OWNER_FILE

if TYPE_CHECKING:
    from pathlib import Path

_OURS = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors|(adapter_)?model\.safetensors\.index\.json"
)
"""Files written by an export. The next export replaces them even if its file names differ."""


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
        writer = process_identity.read_owner(old)
        if writer is not None and writer.has_abandoned(old):
            shutil.rmtree(old, ignore_errors=True)
    folder = target.parent / f".{target.name}.tmp-{secrets.token_hex(16)}"
    folder.mkdir()
    process_identity.ProcessIdentity.current_process().write_owner_file(folder)
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


def abort(folder: Path) -> None:
    """Remove the temporary folder of an export that failed."""
    shutil.rmtree(folder, ignore_errors=True)


def commit(folder: Path, target: Path, *, overwrite: bool) -> None:
    """Rename a finished folder to its target and sync the parent folder.

    Its files must have been synced. After a crash either the old or the new folder exists; a
    crash between the two renames leaves the old one under a temporary name next to the target.

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
    if replaced:
        _move_other_files(aside, target)


def _move_other_files(aside: Path, target: Path) -> None:
    """Move files not written by nbdist into the new folder, then remove the old one."""
    for old in aside.iterdir():
        if not _OURS.fullmatch(old.name) and not os.path.lexists(target / old.name):
            old.rename(target / old.name)
    for replaced in aside.iterdir():
        if replaced.is_dir() and not replaced.is_symlink():
            continue  # nbdist writes no subfolders, so keep it in the renamed old folder
        with suppress(OSError):
            replaced.unlink()
    with suppress(OSError):
        aside.rmdir()
    sync_folder(target)
