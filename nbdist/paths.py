"""Paths as a user writes them; pure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.errors import OptionError

if TYPE_CHECKING:
    import os


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with its "~" or "~user" replaced.

    Raises:
        OptionError: this machine has no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        message = f"{str(path)!r} begins with the home of a user who is not here; write it in full."
        raise OptionError(message) from error
