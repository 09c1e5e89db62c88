"""Paths of the built front end, which `hatch_build.py` builds from widgets/ at installation."""

from __future__ import annotations

from pathlib import Path

SCRIPT = Path(__file__).parent / "static" / "panel.js"
STYLE = SCRIPT.with_suffix(".css")


def has_built_assets() -> bool:
    """Return whether the front end is built."""
    return SCRIPT.is_file() and STYLE.is_file()
