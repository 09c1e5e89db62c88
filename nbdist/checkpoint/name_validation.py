"""Allowed names of checkpoints and of the files in them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MANIFEST_NAME = "manifest.json"
LOCK_NAME = ".lock"
DRAFT_PATTERN = re.compile(r"\.tmp-[0-9a-f]{32}")
REPLACED_PATTERN = re.compile(r"\.old-[0-9a-f]{32}-(?P<name>[A-Za-z0-9_-][A-Za-z0-9._-]{0,63})")
"""Folder of a checkpoint that is being replaced by a new one of the same name."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"part-[0-9]{5,9}\.json")
_SHOWN = 60
_LISTED = 10


def check_name(name: object) -> str:
    """Return the name if it is a valid checkpoint name.

    Raises:
        CheckpointError: the name is invalid.
    """
    if is_checkpoint_name(name):
        return str(name)
    raise CheckpointError(
        f"Invalid checkpoint name {printable(name)}. Use 1 to 64 characters of A-Z, a-z, 0-9, dot,"
        " dash and underscore, not starting with a dot or dash."
    )


def is_checkpoint_name(name: object) -> bool:
    """Return whether this is a valid checkpoint name."""
    return type(name) is str and _NAME.fullmatch(name) is not None


def is_data_file_name(name: object) -> bool:
    """Return whether a manifest may list a file of this name."""
    reserved = type(name) is str and (name == MANIFEST_NAME or _PART.fullmatch(name) is not None)
    return type(name) is str and _FILE.fullmatch(name) is not None and not reserved


def rank_report_name(rank: int) -> str:
    """Return the file name of a rank's report."""
    return f"part-{rank:05d}.json"


def is_rank_report_name(name: str) -> bool:
    """Return whether this is the file name of a rank's report."""
    return _PART.fullmatch(name) is not None


def checkpoint_path(root: Path, name: object) -> Path:
    """Return the folder of a checkpoint of this name, which may not exist.

    Raises:
        CheckpointError: the name is invalid, or the folder is a symbolic link.
    """
    path = root / check_name(name)
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which is not supported. Use the folder that contains its"
            " target, or remove the link."
        )
    return path


def printable(value: object) -> str:
    """Return an untrusted value as ASCII text on one line, at most 60 characters long."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def list_first(names: Iterable[str]) -> str:
    """Return the first ten names as text."""
    listed = list(names)
    return ", ".join(listed[:_LISTED]) + (", ..." if len(listed) > _LISTED else "")
