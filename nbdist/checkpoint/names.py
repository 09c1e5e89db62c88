"""Names of checkpoints and of the files in them: what is allowed, and where they lead; pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
LOCK = ".lock"
DRAFT = re.compile(r"\.tmp-[0-9a-f]{32}")
ASIDE = re.compile(r"\.old-[0-9a-f]{32}-(?P<name>[A-Za-z0-9_-][A-Za-z0-9._-]{0,63})")
"""A checkpoint that gives its name to a new one."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"part-[0-9]{5,9}\.json")
_SHOWN = 60


def checked(name: object) -> str:
    """Give back the name of a checkpoint.

    Raises:
        CheckpointError: not 1 to 64 of the allowed characters.
    """
    if is_name(name):
        return str(name)
    raise CheckpointError(
        f"{shown(name)} is no name for a checkpoint; allowed are 1 to 64 of A-Z, a-z, 0-9, dots,"
        " dashes and underscores, without a dot or dash in front."
    )


def is_name(name: object) -> bool:
    """Whether a checkpoint may bear this name."""
    return type(name) is str and _NAME.fullmatch(name) is not None


def is_file(name: object) -> bool:
    """Whether a manifest may name this file."""
    reserved = type(name) is str and (name == MANIFEST or _PART.fullmatch(name) is not None)
    return type(name) is str and _FILE.fullmatch(name) is not None and not reserved


def part(rank: int) -> str:
    """Name of the file in which a rank says what it has written."""
    return f"part-{rank:05d}.json"


def is_part(name: str) -> bool:
    """Whether the file is a rank's report, which no finished checkpoint has."""
    return _PART.fullmatch(name) is not None


def path_of(root: Path, name: object) -> Path:
    """Where a checkpoint of this name is, or would be.

    Raises:
        CheckpointError: not a name, or a link: what it points to is not in `root`.
    """
    path = root / checked(name)
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link, and only folders are taken; give the folder that holds what it"
            " points to, or remove it."
        )
    return path


def shown(value: object) -> str:
    """Show a value that a stranger chose, short and on one line."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
