"""Crash dumps of the launcher and the ranks; adopts, ends and reaps the launcher's descendants.

Never affects other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
from multiprocessing import process as multiprocessing_process
from typing import TYPE_CHECKING, TextIO

import psutil

from nbdist.protocol import messages

if TYPE_CHECKING:
    from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL."""
POLL_S = 0.005
_dump_files: list[TextIO] = []
"""Keeps the files open: faulthandler stores only their descriptors."""


def install_crash_dump(folder: str | Path, name: str) -> None:
    """Write Python stacks into `folder` on a crash and on `messages.STACKS_SIGNAL`.

    The kernel reads the file of a process that crashed or does not respond. A rank calls it again
    after the fork to use its own files.
    """
    paths = messages.crash_file(folder, name), messages.stacks_file(folder, name)
    for path in paths:
        path.touch(mode=0o600)  # whatever the umask
    crash, stacks = (path.open("w") for path in paths)
    faulthandler.enable(crash)
    faulthandler.register(messages.STACKS_SIGNAL, stacks, all_threads=True, chain=False)
    for file in _dump_files:
        file.close()
    _dump_files[:] = [crash, stacks]


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends.

    DataLoader workers and user subprocesses of a killed rank thus remain descendants.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when the thread that forked it ends.

    torch itself uses SIGINT, which an idle ipykernel ignores (ipykernel 7.4).
    """
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


def end_descendants(*, grace_s: float = GRACE_S) -> list[int]:
    """Send SIGTERM to every descendant, then SIGKILL; wait up to `grace_s` after each.

    Ranks get SIGKILL immediately: they report a SIGTERM to the kernel and go on. Does not reap:
    torch elastic's main thread collects the exit codes of the ranks.

    Returns:
        Processes that cannot be killed: they are blocked in a system call.
    """
    running: list[psutil.Process] = []
    # torch elastic starts the ranks as multiprocessing children; active_children() would reap them
    ranks = {child.pid for child in list(multiprocessing_process._children)}  # type: ignore[attr-defined]  # noqa: SLF001
    for number in (signal.SIGTERM, signal.SIGKILL):
        # list again: the children of a dead rank are now children of the launcher
        running = [
            process for process in psutil.Process().children(recursive=True) if _alive(process)
        ]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):  # already ended
                process.send_signal(signal.SIGKILL if process.pid in ranks else number)
                process.send_signal(signal.SIGCONT)  # a stopped one gets SIGTERM when continued
        deadline = time.monotonic() + grace_s
        while any(map(_alive, running)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return [process.pid for process in running if _alive(process)]


def reap_orphans() -> None:
    """Reap adopted orphans that have ended; call only while torch elastic waits for no child."""
    for process in psutil.Process().children():
        if not _alive(process):
            os.waitpid(process.pid, os.WNOHANG)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
