"""A folder for others to read that appears whole: written beside its place, then renamed; pure.

It takes the place of an older one only where that is wanted, and then files in it that are
not its own move into the new one.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from nbdist.checkpoint.durable_io import sync_folder, write_all
from nbdist.errors import CheckpointError, NotEmptyError
from nbdist.hardware import process_identity
from nbdist.hardware.process_identity import OWNER

if TYPE_CHECKING:
    from pathlib import Path

_OURS = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors|(adapter_)?model\.safetensors\.index\.json"
)
"""What an export writes and the next one replaces, under whatever name."""


def check(target: Path, *, overwrite: bool) -> None:
    """Refuse a place where no folder can appear.

    Raises:
        NotEmptyError: files are there and may not be replaced.
        CheckpointError: a file is there.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; give a folder.")
    if not overwrite and target.is_dir() and next(target.iterdir(), None) is not None:
        raise NotEmptyError(
            f"{target} exists and is not empty; give another folder, or --overwrite to replace"
            " the model in it (other files in it are kept)."
        )


def begin(target: Path) -> Path:
    """Make a folder beside the target; removes those that dead processes left there.

    Raises:
        OSError: it cannot be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in target.parent.glob(f".{_escaped(target.name)}.tmp-*"):
        writer = process_identity.of(old)
        if writer is not None and writer.gone(old):
            shutil.rmtree(old, ignore_errors=True)
    folder = target.parent / f".{target.name}.tmp-{secrets.token_hex(16)}"
    folder.mkdir()
    process_identity.Owner.me().write(folder)
    return folder


def make_room(path: Path, head: bytes, size_bytes: int) -> None:
    """Make a file of a size of which only the head is written; a full disk is known now.

    Raises:
        OSError: there is no room.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        write_all(fd, memoryview(head))
    finally:
        os.close(fd)


def sync_files(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def abort(folder: Path) -> None:
    """Remove a folder that will not be finished."""
    shutil.rmtree(folder, ignore_errors=True)


def commit(folder: Path, target: Path, *, overwrite: bool) -> None:
    """Give a finished folder its name; returns once that is on the disk.

    Its files have been synced. A crash leaves the old folder, or the new one; in the moment
    between the two renames the old one under a name beside it.

    Raises:
        CheckpointError: the place has been taken meanwhile.
        OSError: the system refuses.
    """
    check(target, overwrite=overwrite)
    (folder / OWNER).unlink(missing_ok=True)
    sync_folder(folder)
    aside = None
    if target.is_dir() and any(target.iterdir()):
        aside = target.parent / f".{target.name}.old-{secrets.token_hex(16)}"
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if aside is not None:
            aside.rename(target)
        raise
    sync_folder(target.parent)
    if aside is not None:
        _keep_foreign(aside, target)


def _keep_foreign(aside: Path, target: Path) -> None:
    """Move what is not ours from an old folder into the new one, then remove the old one."""
    for old in aside.iterdir():
        if not _OURS.fullmatch(old.name) and not os.path.lexists(target / old.name):
            old.rename(target / old.name)
    for replaced in aside.iterdir():
        if replaced.is_dir() and not replaced.is_symlink():
            continue  # not ours, whatever its name: the folder stays beside the new one
        with suppress(OSError):
            replaced.unlink()
    with suppress(OSError):
        aside.rmdir()
    sync_folder(target)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
