"""Writes Python stacks to files on a crash or on a signal, with faulthandler.

Installed first in the launcher and in each rank. The kernel reads the crash file of a process that
crashed, and the stacks file of one that does not respond.
"""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING, TextIO

from nbdist.protocol import messages

if TYPE_CHECKING:
    from pathlib import Path

_files: list[TextIO] = []
"""Keeps the files open: faulthandler stores only their descriptors."""


def install_crash_dump(folder: str | Path, name: str) -> None:
    """Write stacks into `folder` on a crash and on `messages.STACKS_SIGNAL`.

    A rank calls it again after the fork to use its own files.
    """
    crash = _open_private_file(messages.crash_file(folder, name))
    stacks = _open_private_file(messages.stacks_file(folder, name))
    faulthandler.enable(crash)
    faulthandler.register(messages.STACKS_SIGNAL, stacks, all_threads=True, chain=False)
    for file in _files:
        file.close()
    _files[:] = [crash, stacks]


def _open_private_file(path: Path) -> TextIO:
    """Open a file with mode 0600, whatever the umask."""
    path.touch(mode=0o600)
    return path.open("w")
