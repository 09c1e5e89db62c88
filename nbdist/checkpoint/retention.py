"""What may be removed from a folder of checkpoints, and what never; pure.

Removed are drafts of dead processes, checkpoints that were replaced, and old ones that
`keep` does not count; never what is foreign, in use, or the newest. Removing first takes
the name away, then the manifest: nobody sees half a checkpoint.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nbdist.checkpoint import catalog as roots
from nbdist.checkpoint import durable_io
from nbdist.checkpoint.names import DRAFT, MANIFEST
from nbdist.checkpoint.reader import Opened
from nbdist.errors import CheckpointError
from nbdist.hardware import process_identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def keep(root: Path, count: int, *, written: str | None = None) -> list[str]:
    """Remove the oldest checkpoints beyond `count`; give the names of those removed.

    Not counted and never removed: folders without a manifest of ours, damaged ones, and
    those that hold other files too. Not removed: the newest, `written`, and those in use.

    Args:
        root: of the checkpoints.
        count: how many stay, 1 or more.
        written: the name just saved; the clock may say that it is old.

    Raises:
        CheckpointError: `count` is not 1 or more, or the folder cannot be written.
    """
    if type(count) is not int or count < 1:
        raise CheckpointError(f"keep={count!r} is not allowed; give 1 or more, or leave it out.")
    removed, garbage = [], []
    try:
        with durable_io.locked(root):
            found = [one for one in roots.listed(root) if one.path.name == one.name]
            found.sort(key=lambda one: one.name == written)  # stable: the written one last
            for one in found[:-count]:
                if path := discard(root / one.name):
                    removed.append(one.name)
                    garbage.append(path)
    except OSError as error:
        raise CheckpointError(
            f"old checkpoints in {root} cannot be removed ({error.strerror}); remove them yourself."
        ) from error
    for path in garbage:
        durable_io.remove_folder(path)
    return removed


def tidy(root: Path) -> None:
    """Remove what dead processes of this user left in `root`; what cannot go now goes later."""
    garbage: list[Path] = []
    with suppress(OSError, CheckpointError), durable_io.locked(root):
        garbage += sort_out(root)
    for path in garbage:
        durable_io.remove_folder(path)


def sort_out(root: Path) -> list[Path]:
    """Put back what lost its name in a crash; give the folders that can be removed.

    The lock of `root` is held by the caller.
    """
    for name, path in sorted(roots.aside(root), key=_newest_first):
        taken = (root / name).exists() or (root / name).is_symlink()
        if not taken and roots.entry(path, name):
            path.rename(root / name)
            durable_io.sync_folder(root)
    replaced = [discard(path) for name, path in roots.aside(root) if _is_replaced(root, name, path)]
    drafts = [path for path in root.iterdir() if _is_dead_draft(path)]
    return [path for path in replaced if path] + drafts


def discard(path: Path) -> Path | None:
    """Take a checkpoint's name away; give the folder to remove, None where it has to stay.

    The lock of the root is held by the caller.
    """
    if not _is_ours_alone(path):
        return None
    with suppress(OSError), _unused(path) as unused:
        if unused:
            gone = path.with_name(f".tmp-{secrets.token_hex(16)}")
            process_identity.Owner.me().write(path)
            path.rename(gone)
            (gone / MANIFEST).unlink()
            return gone
    return None


def _is_ours_alone(path: Path) -> bool:
    try:
        with Opened.at(path) as opened:
            return not opened.strange()
    except CheckpointError:
        return False


@contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Whether nobody reads the checkpoint; nobody can begin to before the end of `with`."""
    # For writing: locks on NFS ask for it.
    fd = os.open(path / MANIFEST, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield durable_io.try_lock(fd, alone=True)
    finally:
        durable_io.unlock_and_close(fd)


def _newest_first(found: tuple[str, Path]) -> float:
    one = roots.entry(found[1], found[0])
    return -one.created.timestamp() if one else 0.0


def _is_replaced(root: Path, name: str, path: Path) -> bool:
    return path.stat().st_uid == os.getuid() and roots.entry(root / name, name) is not None


def _is_dead_draft(path: Path) -> bool:
    """Whether it is one of ours, and nobody is at work on it."""
    if not DRAFT.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    if path.stat().st_uid != os.getuid():
        return False
    of = process_identity.of(path)
    if of is None:
        # Its process died before it could sign, or signed with the disk full.
        return not any(name.name != process_identity.OWNER for name in path.iterdir())
    return of.gone(path)
