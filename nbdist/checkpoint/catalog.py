"""What lies in a folder of checkpoints; pure, writes nothing.

checkpoints/
    step-100/            a checkpoint: it has a manifest, so it is whole
    .tmp-<32 hex>/       being written, or being removed; its owner is named inside
    .old-<32 hex>-best/  gives its name to a new checkpoint; if the process died right
                         there it is still the one that "best" means
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.checkpoint import durable_io
from nbdist.checkpoint.names import ASIDE, is_name, path_of
from nbdist.checkpoint.reader import Opened
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from nbdist.checkpoint.manifest import Manifest
    from nbdist.checkpoint.url import Url

_TRIES = 5
_AGAIN_S = 0.01
_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint in a list."""

    name: str
    step: int
    size_bytes: int
    backend: str
    created: datetime
    path: Path | Url


def entries(root: Path) -> list[Entry]:
    """List the whole checkpoints of a folder, the newest last.

    What is half written, foreign or damaged in its manifest or sizes is left out; other
    bytes than were written are only found by `verify`. Waits up to 1 s while another process
    gives names.
    """
    with durable_io.at_rest(root):
        return listed(root)


def listed(root: Path) -> list[Entry]:
    """List as `entries` does; for who holds the lock of `root`."""
    found = {one.name: one for one in _scan(root, aside=False)}
    for one in _scan(root, aside=True):
        kept = found.get(one.name)
        if kept is None or (kept.path.name != kept.name and kept.created < one.created):
            found[one.name] = one
    return sorted(found.values(), key=lambda one: (one.created, one.step, one.name))


def latest(root: Path) -> Entry | None:
    """Give the checkpoint that was made last; None where there is none."""
    found = entries(root)
    return found[-1] if found else None


def find(root: Path, name: str) -> Path:
    """Give the folder of a checkpoint.

    Raises:
        CheckpointError: not a name, or there is no checkpoint of this name; says which are.
    """
    path = path_of(root, name)
    if path.is_dir():
        return path  # opening it says what is wrong with it
    found = entries(root)
    for one in found:
        if one.name == name:
            return root / one.path.name
    raise missing(root, name, [one.name for one in found])


def missing(root: Path | Url, name: str, there: list[str]) -> CheckpointError:
    """Say that there is no checkpoint of this name, and which are there."""
    names = there[::-1][:_LISTED]
    more = ", ..." if len(there) > _LISTED else ""
    others = f"there are {', '.join(names)}{more}" if names else "there is none"
    return CheckpointError(f"{root} has no checkpoint {name}; {others}.")


def opened(root: Path, name: str) -> Opened:
    """Open a checkpoint by name, also while it is being replaced by a new one.

    Raises:
        CheckpointError: there is none of this name, or it cannot be trusted.
    """
    for _ in range(_TRIES):
        with suppress(CheckpointError):
            return Opened.at(find(root, name))
        time.sleep(_AGAIN_S)  # two renames of another process are between
    return Opened.at(find(root, name))


def entry(path: Path, name: str) -> Entry | None:
    """Describe the checkpoint in a folder; None where there is no whole one."""
    try:
        with Opened.at(path) as found:
            return described(path, name, found.manifest) if found.complete() else None
    except CheckpointError:
        return None


def aside(root: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints that gave their names away: the name and the folder."""
    for path in _folders(root):
        if match := ASIDE.fullmatch(path.name):
            yield match["name"], path


def _scan(root: Path, *, aside: bool) -> Iterator[Entry]:
    for path in _folders(root):
        match = ASIDE.fullmatch(path.name)
        name = match["name"] if match else path.name
        if bool(match) == aside and is_name(name) and (one := entry(path, name)):
            yield one


def _folders(root: Path) -> list[Path]:
    """Folders in `root`; links are none."""
    try:
        with os.scandir(root) as found:
            return [Path(one.path) for one in found if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def described(path: Path | Url, name: str, manifest: Manifest) -> Entry:
    """Describe a checkpoint by its manifest."""
    return Entry(
        name=name,
        step=manifest.step,
        size_bytes=manifest.size_bytes,
        backend=manifest.backend,
        created=manifest.created,
        path=path,
    )
