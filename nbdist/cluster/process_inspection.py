"""Processes of a launcher, looked at on their own machine: status, stacks, what the dead left.

Runs in the kernel for this machine, in the agent for a node.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import psutil

from nbdist.cluster.interfaces import GONE, Left
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ANSWER_S = 2.0
_POLL_S = 0.02
STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})


def status(pid: int, created: float | None = None) -> str:
    """How a process is; `GONE` where it has ended, or its number is another's by now.

    Args:
        pid: its number.
        created: when it started (psutil); None: whenever.
    """
    try:
        process = psutil.Process(pid)
        if created is not None and process.create_time() != created:
            return GONE
        now = str(process.status())
    except psutil.NoSuchProcess:
        return GONE
    return GONE if now == psutil.STATUS_ZOMBIE else now


def left(folder: Path) -> Left:
    """Read what the ranks of one start left in its folder."""
    crashes = {
        int(file.stem.removeprefix("rank")): file.read_text(errors="replace")
        for file in folder.glob("rank*.crash")
    }
    notes = sorted(folder.glob("*.died"), key=lambda note: note.stat().st_mtime)
    told = [(int(note.stem.removeprefix("rank")), note.read_text()) for note in notes]
    return Left(crashes, told)


def stacks(folder: Path, pids: Mapping[str, int], *, launcher: int) -> dict[str, str]:
    """Ask by signal, wait for the files; says why where there is nothing to show.

    Args:
        folder: where the processes write.
        pids: by the name of the file.
        launcher: itself and its children are ours; nothing else gets a signal.
    """
    files = {name: messages.stacks_file(folder, name) for name in pids}
    told = {name: _unable(pid, launcher, files[name]) for name, pid in pids.items()}
    able = [name for name, why in told.items() if not why]
    files = {name: files[name] for name in able}
    before = {name: _size(file) for name, file in files.items()}
    for name in able:
        os.kill(pids[name], messages.STACKS_SIGNAL)
    deadline = time.monotonic() + ANSWER_S
    sizes = before
    while able and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        earlier, sizes = sizes, {name: _size(file) for name, file in files.items()}
        if sizes == earlier and all(sizes[name] > before[name] for name in able):
            break
    for name in able:
        text = files[name].read_bytes()[before[name] :].decode(errors="replace").strip()
        told[name] = text or f"no answer from process {pids[name]}, state {status(pids[name])}"
    return told


def _unable(pid: int, launcher: int, file: Path) -> str:
    """Why a process cannot be asked; "" where it can."""
    if not file.exists():
        return f"process {pid} has not come so far"  # the signal would end it
    try:
        process = psutil.Process(pid)
        if pid != launcher and process.ppid() != launcher:
            return f"process {pid} is gone"
        if process.status() in STOPPED:
            return f"process {pid} is stopped (state T): kill -CONT {pid} lets it go on"
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {pid} has ended"
    except psutil.NoSuchProcess:
        return f"process {pid} is gone"
    return ""


def _size(file: Path) -> int:
    return file.stat().st_size
