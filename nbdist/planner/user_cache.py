"""JSON files in the user's cache folder: what was measured on this machine, and traces of models.

They may be deleted at any time. Their contents are untrusted and validated on reading.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import tempfile
from pathlib import Path
from typing import Any


def read_entries(file: Path) -> dict[str, Any]:
    """Return the entries of a file, or {} if it cannot be read."""
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}  # missing or truncated: it is only a cache
    return entries if isinstance(entries, dict) else {}


def write_entries(file: Path, entries: dict[str, Any]) -> None:
    """Write a file atomically. Errors are ignored: only a cache is lost."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(entries, new, indent=1)
        Path(new.name).replace(file)


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the `count` files of a folder that were written last."""
    with contextlib.suppress(OSError):
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[count:]:
            file.unlink()


def today() -> str:
    """Return the current date as ISO text, such as "2026-11-21"."""
    return dt.datetime.now().astimezone().date().isoformat()


def parse_date(text: object) -> str:
    """Return a valid ISO date unchanged, and "" for anything else."""
    try:
        return dt.date.fromisoformat(str(text)).isoformat()
    except ValueError:
        return ""
