"""What every thread of the ranks is doing now, also where a rank does not answer.

Runs in the notebook's kernel. A rank's control thread is asked first. Where C code holds the
interpreter, or the rank has not come so far, a signal makes faulthandler write to a file.
"""

from __future__ import annotations

import os
import re
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import psutil

from nbdist import wire
from nbdist.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nbdist.kernel.gang import Gang

ANSWER_S = 2.0
"""For each of the two ways."""
_POLL_S = 0.02
_CELL = re.compile(r'File "[^"]*/ipykernel_\d+/(\d+\.py)"')
_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}


def of_ranks(gang: Gang, cells: Mapping[str, int]) -> dict[int, str]:
    """The Python stacks of all threads, by rank; takes four seconds at most.

    Args:
        gang: the ranks.
        cells: numbers of the session's cells by the name of their code's file.
    """
    answered = _asked(gang)
    silent = {rank: pid for rank, pid in gang.pids.items() if rank not in answered}
    files = {f"rank{rank}": pid for rank, pid in silent.items()}
    written = signalled(gang.folder, files, launcher=gang.launcher_pid)
    return {
        rank: answered[rank] if rank in answered else named(written[f"rank{rank}"], cells)
        for rank in sorted(gang.pids)
    }


def of_start(gang: Gang) -> str:
    """The stacks of the launcher and of the ranks that it has forked, for an error message."""
    pid = gang.launcher_pid
    parts = signalled(gang.run_dir.path, {"launcher": pid}, launcher=pid)
    ranks = {f"rank{rank}": pid for rank, pid in sorted(gang.pids.items())}
    parts |= signalled(gang.folder, ranks, launcher=pid)
    return "\n".join(f"-- {name} --\n{text}" for name, text in parts.items())


def signalled(folder: Path, pids: Mapping[str, int], *, launcher: int) -> dict[str, str]:
    """Ask by signal, wait for the files; says why where there is nothing to show.

    Args:
        folder: where the processes write.
        pids: by the name of the file.
        launcher: itself and its children are ours; nothing else gets a signal.
    """
    files = {name: wire.stacks_file(folder, name) for name in pids}
    told = {name: _unable(pid, launcher, files[name]) for name, pid in pids.items()}
    able = [name for name, why in told.items() if not why]
    files = {name: files[name] for name in able}
    before = {name: _size(file) for name, file in files.items()}
    for name in able:
        os.kill(pids[name], wire.STACKS_SIGNAL)
    deadline = time.monotonic() + ANSWER_S
    sizes = before
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        earlier, sizes = sizes, {name: _size(file) for name, file in files.items()}
        if sizes == earlier and all(sizes[name] > before[name] for name in able):
            break
    for name in able:
        text = files[name].read_bytes()[before[name] :].decode(errors="replace").strip()
        told[name] = text or f"no answer from process {pids[name]}, state {_state(pids[name])}"
    return told


def named(dump: str, cells: Mapping[str, int]) -> str:
    """A dump of faulthandler, the main thread first, with cells by their numbers."""
    blocks = reversed(dump.split("\n\n"))  # the oldest thread is the last
    text = "\n\n".join(blocks)
    return _CELL.sub(lambda cell: f"In[{cells.get(cell[1], '?')}]", text)


def _asked(gang: Gang) -> dict[int, str]:
    """Ask the ranks' control threads."""
    answers: SimpleQueue[tuple[int, str, Any]] = SimpleQueue()
    requests: list[str] = []
    told: dict[int, str] = {}
    try:
        ranks = range(len(gang.members))
        requests += [
            gang.post(rank, "control", wire.STACKS, {}, lambda *answer: answers.put(answer))
            for rank in ranks
        ]
        gang.wake()
        deadline = time.monotonic() + ANSWER_S
        while len(told) < len(ranks):
            rank, channel, message = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if channel == "control":
                content: Any = message["content"]
                told[rank] = content["error" if content.get("status") == "error" else "text"]
    except (Empty, SessionError):
        return told  # the time is up, or the ranks are being ended
    finally:
        gang.forget(requests)
    return told


def _unable(pid: int, launcher: int, file: Path) -> str:
    """Why a process cannot be asked; "" where it can."""
    if not file.exists():
        return f"process {pid} has not come so far"  # the signal would end it
    try:
        process = psutil.Process(pid)
        if pid != launcher and process.ppid() != launcher:
            return f"process {pid} is gone"
        if process.status() in _STOPPED:
            return f"process {pid} is stopped (state T): kill -CONT {pid} lets it go on"
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {pid} has ended"
    except psutil.NoSuchProcess:
        return f"process {pid} is gone"
    return ""


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def _size(file: Path) -> int:
    return file.stat().st_size
