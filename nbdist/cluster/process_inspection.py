"""Inspects a launcher's processes on their own machine: status, stacks, crash artifacts.

Runs in the kernel for this machine, and in the agent for a node.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import psutil

from nbdist.cluster.interfaces import EXITED, CrashArtifacts
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ANSWER_S = 2.0
_POLL_S = 0.02
STOPPED_STATUSES = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})


def process_status(pid: int, created: float | None = None) -> str:
    """Return the status of a process; ``EXITED`` if it ended or its id was reused.

    Args:
        pid: process id.
        created: start time (psutil); None: not checked.
    """
    try:
        process = psutil.Process(pid)
        if created is not None and process.create_time() != created:
            return EXITED
        now = str(process.status())
    except psutil.NoSuchProcess:
        return EXITED
    return EXITED if now == psutil.STATUS_ZOMBIE else now


def read_crash_artifacts(folder: Path) -> CrashArtifacts:
    """Read the crash artifacts of one start's ranks from its folder."""
    crashes = {
        int(file.stem.removeprefix("rank")): file.read_text(errors="replace")
        for file in folder.glob("rank*.crash")
    }
    notes = sorted(folder.glob("*.died"), key=lambda note: note.stat().st_mtime)
    tracebacks = [(int(note.stem.removeprefix("rank")), note.read_text()) for note in notes]
    return CrashArtifacts(crashes, tracebacks)


def dump_stacks(folder: Path, pids: Mapping[str, int], *, launcher: int) -> dict[str, str]:
    """Request stacks by signal and read them from the files; a text explains missing ones.

    Args:
        folder: folder in which the processes write.
        pids: process ids by name of the file.
        launcher: the launcher's pid. Only it and its children are signalled.
    """
    files = {name: messages.stacks_file(folder, name) for name in pids}
    texts = {name: _unable(pid, launcher, files[name]) for name, pid in pids.items()}
    able = [name for name, reason in texts.items() if not reason]
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
        missing = f"no response from process {pids[name]}, state {process_status(pids[name])}"
        texts[name] = text or missing
    return texts


def _unable(pid: int, launcher: int, file: Path) -> str:
    """Return why a process cannot be signalled; "" if it can."""
    if not file.exists():
        return f"process {pid} is still starting"  # the signal would end it
    try:
        process = psutil.Process(pid)
        if pid != launcher and process.ppid() != launcher:
            return f"process {pid} has exited"
        if process.status() in STOPPED_STATUSES:
            return f"process {pid} is stopped (state T): resume it with kill -CONT {pid}"
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {pid} has exited"
    except psutil.NoSuchProcess:
        return f"process {pid} has exited"
    return ""


def _size(file: Path) -> int:
    return file.stat().st_size
