"""The launcher's descendants: adopted, ended and reaped; touches no other process."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 1.0
"""Between SIGTERM and SIGKILL."""
POLL_S = 0.005


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends.

    DataLoader processes and user subprocesses of a killed rank stay findable.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal, SIGKILL, when the thread that forked it ends.

    torch's own guard is SIGINT, which an idle ipykernel ignores (ipykernel 7.4).
    """
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def end_descendants(*, grace_s: float = GRACE_S) -> list[int]:
    """SIGTERM every descendant, then SIGKILL; returns when all are gone, or after `grace_s` each.

    Never waits for a process in the sense of waitpid: torch elastic's main thread wants
    the exit codes of the ranks itself.

    Returns:
        Processes that cannot be killed: they sit in a call of the operating system.
    """
    living: list[psutil.Process] = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        # asked anew: what a dead rank left behind now hangs on the launcher
        living = [process for process in _descendants() if _alive(process)]
        for process in living:
            _signal(process, number)
            _signal(process, signal.SIGCONT)  # one that is stopped takes its SIGTERM only then
        deadline = time.monotonic() + grace_s
        while any(map(_alive, living)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return [process.pid for process in living if _alive(process)]


def reap() -> None:
    """Collect adopted orphans that have ended; call only when torch elastic waits for none."""
    for process in psutil.Process().children():
        if not _alive(process):
            os.waitpid(process.pid, os.WNOHANG)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # gone, which is what was wanted


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
