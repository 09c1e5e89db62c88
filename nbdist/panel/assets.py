"""The built front end; `hatch_build.py` makes it out of widgets/ when nbdist is installed."""

from __future__ import annotations

from pathlib import Path

SCRIPT = Path(__file__).parent / "static" / "panel.js"
STYLE = SCRIPT.with_suffix(".css")


def present() -> bool:
    """Whether it was built."""
    return SCRIPT.is_file() and STYLE.is_file()
