"""What nbdist has learned on this machine and keeps: JSON files in the user's cache folder.

They may be deleted at any time. Whatever stands in them is looked at as if a stranger had
written it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def folder() -> Path:
    """The folder: nbdist in XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nbdist"


def read(file: Path) -> dict[str, Any]:
    """The entries of a file; none where it cannot be read."""
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}  # none yet, or torn: it is only a cache
    return entries if isinstance(entries, dict) else {}


def write(file: Path, entries: dict[str, Any]) -> None:
    """Write whole or not at all; a folder that cannot be written costs only what was learned."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(entries, new, indent=1)
        Path(new.name).replace(file)


def today() -> str:
    """The day as entries have it: 2026-11-21."""
    return dt.datetime.now().astimezone().date().isoformat()


def day(given: object) -> str:
    """A day of an entry; empty for anything else."""
    try:
        return dt.date.fromisoformat(str(given)).isoformat()
    except ValueError:
        return ""
