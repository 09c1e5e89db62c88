"""Atomic commit of a checkpoint folder: a private draft that is renamed once it is complete.

    create_draft   one process creates .tmp-<32 hex>/ and writes its owner file
    (ranks)        each writes and syncs its files, then its report (see ``rank_reports``)
    commit_draft   one process writes manifest.json, syncs, renames the folder, syncs the root
    remove_draft   removes the draft after a failure

If a process dies before the commit, the draft is never listed and the next ``create_draft``
removes it. A checkpoint with the same name is renamed first, then the draft gets the name;
``catalog`` finds one of the two at any time.
"""

from __future__ import annotations

import secrets
import shutil
from typing import TYPE_CHECKING

from nbdist.checkpoint import durable_io, retention
from nbdist.checkpoint.names import (
    DRAFT_PATTERN,
    MANIFEST_NAME,
    check_name,
    checkpoint_path,
    is_rank_report_name,
    printable,
)
from nbdist.checkpoint.reader import CheckpointReader
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import OWNER_FILE, ProcessIdentity

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.checkpoint.manifest import Manifest


def create_draft(root: Path, name: str, *, overwrite: bool = False, size_bytes: int = 0) -> Path:
    """Create the draft folder that all ranks write into, and `root` if needed.

    Removes drafts that processes of this user left in `root` before they died. Blocks up to
    30 s while another process creates or commits a draft there.

    Args:
        root: folder of the checkpoints.
        name: name of the checkpoint. Checked here so that an invalid one fails early.
        overwrite: whether an existing checkpoint of this name may be replaced.
        size_bytes: bytes that all ranks together will write.

    Raises:
        CheckpointError: the name is invalid or taken, the folder is not writable, or there is
            not enough free space.
    """
    check_name(name)
    garbage: list[Path] = []
    try:
        _make(root)
        _check_room(root, size_bytes)
        with durable_io.exclusive_lock(root):
            garbage += retention.repair_names(root)
            _check_free(root, name, overwrite=overwrite)
            tmp = root / f".tmp-{secrets.token_hex(16)}"
            tmp.mkdir(mode=0o700)
            ProcessIdentity.current_process().write_owner_file(tmp)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write checkpoints to {root} ({error.strerror}). Use a folder that this"
            " process can write to."
        ) from error
    finally:
        for path in garbage:
            durable_io.remove_folder(path)
    return tmp


def commit_draft(tmp: Path, name: str, manifest: Manifest, *, overwrite: bool = False) -> Path:
    """Write the manifest and rename the draft to the name of the checkpoint.

    Call it in one process, after every rank has reported. Blocks up to 30 s while another
    process renames checkpoints there. If it raises, call ``remove_draft``: the name still
    refers to the previous checkpoint (unless only the last sync failed).

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the name is taken, files are missing, or the folder cannot be written.
    """
    root, path = tmp.parent, checkpoint_path(tmp.parent, name)
    _check_draft(tmp)
    try:
        _seal(tmp, manifest)
        with durable_io.exclusive_lock(root):
            _check_free(root, name, overwrite=overwrite)
            replaced = _take_name(tmp, path)
            (path / OWNER_FILE).unlink(missing_ok=True)
            durable_io.sync_folder(root)
            garbage = replaced and retention.retire(replaced)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {path} ({error.strerror}). Free space, or use another folder."
        ) from error
    if garbage:
        durable_io.remove_folder(garbage)
    return path


def remove_draft(tmp: Path) -> None:
    """Remove the draft. Does nothing if it was already removed or committed."""
    if DRAFT_PATTERN.fullmatch(tmp.name):
        durable_io.remove_folder(tmp)


def _make(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        durable_io.sync_folder(root.parent)


def _check_room(root: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if size_bytes > free:
        raise CheckpointError(
            f"The checkpoint needs {size_bytes >> 20} MiB, but {root} has {free >> 20} MiB free."
            " Free space, or use another folder."
        )


def _check_free(root: Path, name: str, *, overwrite: bool) -> None:
    """Check that the name is free, or with `overwrite`, that it refers to a checkpoint.

    Raises:
        CheckpointError: the name is taken; or the folder is not a checkpoint or holds other
            files, which are never overwritten.
    """
    path = checkpoint_path(root, name)
    if not path.exists():
        return
    if not overwrite:
        raise CheckpointError(
            f"{path} exists. Save under another name, or use --overwrite (overwrite=True) to"
            " replace it."
        )
    try:
        with CheckpointReader.open_folder(path) as existing:
            strange = existing.unknown_files()
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is not a complete nbdist checkpoint and is not overwritten. Save under"
            " another name, or remove it."
        ) from error
    if strange:
        raise CheckpointError(
            f"{path} contains {printable(strange[0])}, which was not written by nbdist. Move it"
            " elsewhere, or save under another name."
        )


def _check_draft(tmp: Path) -> None:
    if not DRAFT_PATTERN.fullmatch(tmp.name) or not tmp.is_dir():
        raise CheckpointError(f"{tmp} is not a checkpoint draft. Save again.")


def _seal(tmp: Path, manifest: Manifest) -> None:
    """Compare the files with the manifest, then write the manifest and sync the folder.

    Raises:
        CheckpointError: a file is missing, has the wrong size, or is not in the manifest.
    """
    text = manifest.to_json()
    for path in list(tmp.iterdir()):
        if is_rank_report_name(path.name):
            path.unlink()
    sizes = {path.name: path.stat().st_size for path in tmp.iterdir() if path.name != OWNER_FILE}
    named = {file.name: file.size_bytes for file in manifest.files}
    if sizes != named:
        wrong = sorted(name for name in {*sizes, *named} if sizes.get(name) != named.get(name))
        raise CheckpointError(
            f"Size of {printable(wrong[0])} in {tmp} differs from what its rank reported."
            " Save again."
        )
    durable_io.write_new(tmp / MANIFEST_NAME, text)
    tmp.chmod(tmp.parent.stat().st_mode & 0o777)  # the draft was private (0o700)
    durable_io.sync_folder(tmp)


def _take_name(tmp: Path, path: Path) -> Path | None:
    """Rename the draft to `path`. Return the new path of the replaced checkpoint, if any."""
    aside = None
    if path.exists():
        aside = path.with_name(f".old-{secrets.token_hex(16)}-{path.name}")
        path.rename(aside)
    try:
        tmp.rename(path)
    except OSError:
        if aside is not None:
            aside.rename(path)
        raise
    return aside
