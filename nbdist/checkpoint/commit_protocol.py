"""A checkpoint that is being written: private until it is whole, then it gets its name; pure.

    begin        one process makes .tmp-<32 hex>/ and marks it as its own
    (ranks)      each writes its files, syncs them, and reports (see `told`)
    commit       one process: manifest.json, sync, sync of the folder, rename, sync of the root
    abort        or removes it

A process that dies on the way leaves a folder that is never listed and that the next
`begin` removes. A checkpoint under the same name is renamed aside, then the new one gets
the name: at every moment one of the two is found (see `root`).
"""

from __future__ import annotations

import secrets
import shutil
from typing import TYPE_CHECKING

from nbdist.checkpoint import durable_io, retention
from nbdist.checkpoint.names import DRAFT, MANIFEST, checked, is_part, path_of, shown
from nbdist.checkpoint.reader import Opened
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import OWNER, Owner

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.checkpoint.manifest import Manifest


def begin(root: Path, name: str, *, overwrite: bool = False, size_bytes: int = 0) -> Path:
    """Make the private folder that all ranks write into; `root` too.

    Removes what dead processes of this user left in `root`. Blocks up to 30 s while
    another process begins or commits there.

    Args:
        root: of the checkpoints.
        name: that it shall get; looked at now, so that nobody trains on for nothing.
        overwrite: whether a checkpoint may be there that it replaces.
        size_bytes: what all ranks will write.

    Raises:
        CheckpointError: the name is not allowed or taken, the folder cannot be written, or
            has too little room.
    """
    checked(name)
    garbage: list[Path] = []
    try:
        _make(root)
        _check_room(root, size_bytes)
        with durable_io.locked(root):
            garbage += retention.sort_out(root)
            _check_free(root, name, overwrite=overwrite)
            tmp = root / f".tmp-{secrets.token_hex(16)}"
            tmp.mkdir(mode=0o700)
            Owner.me().write(tmp)
    except OSError as error:
        raise CheckpointError(
            f"{root} cannot take checkpoints ({error.strerror}); give a folder that this process"
            " may write."
        ) from error
    finally:
        for path in garbage:
            durable_io.remove_folder(path)
    return tmp


def commit(tmp: Path, name: str, manifest: Manifest, *, overwrite: bool = False) -> Path:
    """Give the folder its name, once all that the manifest says is on the disk.

    Call it in one process, after every rank has reported. Blocks up to 30 s while another
    process changes names there. If it raises, `abort` is to be called: what had the name
    before has it still (only a disk that fails at the very last sync may have the new one).

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the name is taken, files are missing, or the disk refuses.
    """
    root, path = tmp.parent, path_of(tmp.parent, name)
    _check_draft(tmp)
    try:
        _seal(tmp, manifest)
        with durable_io.locked(root):
            _check_free(root, name, overwrite=overwrite)
            replaced = _take_name(tmp, path)
            (path / OWNER).unlink(missing_ok=True)
            durable_io.sync_folder(root)
            garbage = replaced and retention.discard(replaced)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}); free room, or give another folder."
        ) from error
    if garbage:
        durable_io.remove_folder(garbage)
    return path


def abort(tmp: Path) -> None:
    """Remove the folder; a second call, or one after `commit`, finds nothing to do."""
    if DRAFT.fullmatch(tmp.name):
        durable_io.remove_folder(tmp)


def _make(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        durable_io.sync_folder(root.parent)


def _check_room(root: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if size_bytes > free:
        raise CheckpointError(
            f"the checkpoint needs {size_bytes >> 20} MiB and {root} has {free >> 20} MiB; free"
            " room, or give another folder."
        )


def _check_free(root: Path, name: str, *, overwrite: bool) -> None:
    """Refuse a name that is taken, always where it is not by a checkpoint alone."""
    path = path_of(root, name)
    if not path.exists():
        return
    if not overwrite:
        raise CheckpointError(
            f"{path} exists; save under another name, or with --overwrite (overwrite=True) to"
            " replace it."
        )
    try:
        with Opened.at(path) as there:
            strange = there.strange()
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is no whole checkpoint of nbdist and is not replaced; save under another"
            " name, or remove it."
        ) from error
    if strange:
        raise CheckpointError(
            f"{path} also holds {shown(strange[0])}, which no save of nbdist put there; move it"
            " away, or save under another name."
        )


def _check_draft(tmp: Path) -> None:
    if not DRAFT.fullmatch(tmp.name) or not tmp.is_dir():
        raise CheckpointError(f"{tmp} is no checkpoint that is being written; save again.")


def _seal(tmp: Path, manifest: Manifest) -> None:
    """Write the manifest, after the files that it names are seen to be there, and sync.

    Raises:
        CheckpointError: a file is missing, has another size, or is not in the manifest.
    """
    text = manifest.to_json()
    for path in list(tmp.iterdir()):
        if is_part(path.name):
            path.unlink()
    there = {path.name: path.stat().st_size for path in tmp.iterdir() if path.name != OWNER}
    named = {file.name: file.size_bytes for file in manifest.files}
    if there != named:
        odd = sorted(name for name in {*there, *named} if there.get(name) != named.get(name))
        raise CheckpointError(f"{shown(odd[0])} in {tmp} is not as its rank said; save again.")
    durable_io.write_new(tmp / MANIFEST, text)
    tmp.chmod(tmp.parent.stat().st_mode & 0o777)  # private until now; then as its surroundings
    durable_io.sync_folder(tmp)


def _take_name(tmp: Path, path: Path) -> Path | None:
    """Rename the folder to its name, and aside what has it; give where that is now."""
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
