"""What each rank says of its part of a checkpoint when it is done, in a file beside it; pure.

The folder is where the ranks meet: a rank that writes in the background takes part in no
collective, and one that fails says so here.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.checkpoint import json_validation
from nbdist.checkpoint.manifest import FilePart, Key, file_tree, key_tree, read_file, read_key
from nbdist.checkpoint.names import part
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_WRAP = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one rank says."""

    files: tuple[FilePart, ...] = ()
    keys: Mapping[str, Key] = field(default_factory=dict)
    """Tensors that it has a part in; the digest is of that part."""
    error: str = ""
    """Why it wrote nothing."""


def report(
    tmp: Path,
    rank: int,
    parts: Sequence[FilePart],
    *,
    keys: Mapping[str, Key] | None = None,
) -> None:
    """Say what a rank has written and synced; the last thing that it does.

    Raises:
        OSError: it cannot be written.
    """
    _say(tmp, rank, said(parts, keys))


def failed(tmp: Path, rank: int, why: str) -> None:
    """Say that a rank will write nothing more, as well as the disk allows."""
    try:
        _say(tmp, rank, said(error=why))
    except OSError as error:
        # A file without content needs no room.
        with suppress(OSError):
            (tmp / f"{part(rank)}.failed-{error.errno or 0}").touch()


def said(
    parts: Sequence[FilePart] = (), keys: Mapping[str, Key] | None = None, error: str | None = None
) -> str:
    """Give the content of a rank's file; half of it is no JSON, so nobody takes it for all."""
    why = ""
    if error is not None:
        why = (
            "".join(one if one.isprintable() else " " for one in error)[: json_validation.MAX_TEXT]
            or "?"
        )
    tree = {"files": list(map(file_tree, parts)), "keys": _tree(keys or {}), "error": why}
    return json.dumps(tree, separators=(",", ":"))


def read(text: bytes) -> Told | None:
    """Read what `said` gave; None where it is not all there yet."""
    with suppress(json_validation.Refused):
        return Told(**_TOLD(json_validation.loads(text), ""))
    return None


def told(tmp: Path, rank: int) -> Told | None:
    """What a rank has said; None where it has not yet."""
    with suppress(OSError):
        if (found := read((tmp / part(rank)).read_bytes())) is not None:
            return found
    for path in tmp.glob(f"{part(rank)}.failed-*"):
        number = path.name.rpartition("-")[2]
        words = os.strerror(int(number)) if number.isdecimal() else "no reason given"
        return Told(error=f"rank {rank} can write nothing there ({words}, errno {number})")
    return None


def parts(tmp: Path, world_size: int) -> tuple[FilePart, ...]:
    """Read the reports of all ranks, in their order.

    Raises:
        CheckpointError: a rank has not reported; says which.
    """
    found = {rank: told(tmp, rank) for rank in range(world_size)}
    missing = [rank for rank, one in found.items() if one is None or one.error]
    if missing:
        ranks = ", ".join(map(str, missing))
        raise CheckpointError(f"no finished part of rank {ranks} is in {tmp}; save again.")
    return tuple(file for one in found.values() if one is not None for file in one.files)


def keys(everyone: Iterable[Told]) -> dict[str, Key]:
    """Whole tensors: what the ranks have of them, put together."""
    found: dict[str, Key] = {}
    for one in everyone:
        for name, key in one.keys.items():
            before = found.get(name)
            digest = key.digest + (before.digest if before is not None else 0)
            found[name] = Key(shape=key.shape, dtype=key.dtype, digest=digest % _WRAP)
    return found


def _say(tmp: Path, rank: int, text: str) -> None:
    # Not synced: the committing process reads it now, and what it says comes into the manifest.
    (tmp / part(rank)).write_text(text)


def _tree(found: Mapping[str, Key]) -> json_validation.Plain:
    return {name: key_tree(key) for name, key in found.items()}


_TOLD = json_validation.fields(
    {
        "files": json_validation.sequence(read_file),
        "keys": json_validation.mapping(json_validation.text, read_key),
        "error": json_validation.text,
    }
)
