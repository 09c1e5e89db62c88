"""Stacks that survive their process: written by faulthandler, from signals alone.

Called first thing in the launcher and in each rank. The files are read by the kernel: one
when the process has crashed, the other when it does not answer.
"""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING, TextIO

from nbdist.protocol import messages

if TYPE_CHECKING:
    from pathlib import Path

_files: list[TextIO] = []
"""faulthandler keeps the number of a file only: these hold the files open."""


def install(folder: str | Path, name: str) -> None:
    """Write stacks into `folder`, on a crash and on `wire.STACKS_SIGNAL`.

    A rank calls it again after the fork: its stacks are its own.
    """
    crash = _own_file(messages.crash_file(folder, name))
    stacks = _own_file(messages.stacks_file(folder, name))
    faulthandler.enable(crash)
    faulthandler.register(messages.STACKS_SIGNAL, stacks, all_threads=True, chain=False)
    for file in _files:
        file.close()
    _files[:] = [crash, stacks]


def _own_file(path: Path) -> TextIO:
    """Open a file that nobody else can read, whatever the umask."""
    path.touch(mode=0o600)
    return path.open("w")
