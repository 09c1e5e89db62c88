"""Paths as users write them; pure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.errors import OptionError

if TYPE_CHECKING:
    import os


PACKAGE_DIR = Path(__file__).parent
"""Folder of the installed package."""


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
