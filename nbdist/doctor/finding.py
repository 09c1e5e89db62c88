"""One thing that was found, and what to do about it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Level = Literal["problem", "note", "ok"]
LEVELS: tuple[Level, ...] = ("problem", "note", "ok")
"""A problem stops something from working; a note is worth knowing."""

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"
_LONGEST = 60
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_GIB = 3  # place of a unit of which tenths are told


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    level: Level
    topic: str
    says: str
    """One sentence, or a few words where all is well."""
    do: str = ""
    """What to do; empty where nothing."""


def ok(topic: str, says: str) -> Finding:
    """All is well."""
    return Finding("ok", topic, says)


def note(topic: str, says: str, do: str) -> Finding:
    """Worth knowing."""
    return Finding("note", topic, says, do)


def problem(topic: str, says: str, do: str) -> Finding:
    """Something does not work."""
    return Finding("problem", topic, says, do)


def is_secret(name: str) -> bool:
    """Whether a variable of this name may hold what nobody should read."""
    return _SECRET.search(name) is not None


def shown(name: str, value: str) -> str:
    """A variable as it may be shown: NAME=value, without what may be secret."""
    text = _HIDDEN if is_secret(name) else _IN_URL.sub(_HIDDEN, value)
    text = text if text.isprintable() else repr(text)
    return f"{name}={text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"


def size(num_bytes: float) -> str:
    """As limits of containers are given: "64 MiB", "1.5 GiB"."""
    step = 0
    while num_bytes >= _STEP and step < len(_UNITS) - 1:
        num_bytes, step = num_bytes / _STEP, step + 1
    return f"{num_bytes:.{1 if step >= _GIB else 0}f} {_UNITS[step]}"


def listed(things: Iterable[object], most: int = 4) -> str:
    """Name the first few and count the others: "a, b and 3 more"."""
    words = [str(thing) for thing in things]
    more = len(words) - most
    return ", ".join(words) if more <= 0 else f"{', '.join(words[:most])} and {more} more"


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder; where it is missing, in the one it would lie in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
