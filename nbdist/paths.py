"""Paths that users write, and the folder for what is kept between sessions."""

from __future__ import annotations

import os
from pathlib import Path

from nbdist.errors import OptionError

PACKAGE_DIR = Path(__file__).parent
"""Folder of the installed package."""


def cache_dir() -> Path:
    """Return the folder for files kept between sessions: NBDIST_CACHE_DIR or ~/.cache/nbdist."""
    if folder_variable := os.environ.get("NBDIST_CACHE_DIR"):
        return Path(folder_variable).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbdist"


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Return the path with "~" or "~user" expanded.

    Raises:
        OptionError: no such user on this machine.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        message = f"Cannot expand {str(path)!r}: no such user. Use an absolute path."
        raise OptionError(message) from error
