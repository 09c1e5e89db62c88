"""What sessions left behind whose kernel was killed, found and removed: only this user's.

Runs in the kernel: on a thread when a launcher starts, and for `%nbdist doctor`. A folder is
removed when it is private, signed, and its maker has ended; a process is killed when its
environment names a kernel that has ended. The launcher of a killed kernel cleans up itself:
only what is still there after some seconds was left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cluster import run_dir
from nbdist.hardware import process_identity, shm_cleanup
from nbdist.hardware.process_identity import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

GRACE_S = 4.0
"""For a launcher that has just lost its kernel to end everything itself."""
POLL_S = 0.05
KILL_S = 2.0
"""For killed processes to be gone before their folders go."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A process of a launcher whose kernel has ended."""

    pid: int
    name: str

    def __str__(self) -> str:
        """Say which: "python (pid 4711)"."""
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What killed sessions of this user left."""

    processes: tuple[Stray, ...] = ()
    folders: tuple[Path, ...] = ()
    shared: tuple[Path, ...] = ()
    """Files in shared memory."""

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.processes or self.folders or self.shared)


def find(roots: Sequence[Path] | None = None) -> Leftovers:
    """Look for what was left behind; changes nothing.

    Args:
        roots: folders that may hold private folders. Default: those that sessions use.
    """
    places = run_dir.roots() if roots is None else roots
    folders: list[Path] = []
    waiting = [path for root in places for path in _private(root)]
    while waiting:
        path = waiting.pop()
        if path not in folders and process_identity.abandoned(path):
            folders.append(path)
            waiting += process_identity.elsewhere(path)
    shared = [file for folder in folders for file in shm_cleanup.left(folder)]
    strays = [Stray(pid, _name(pid)) for pid in process_identity.processes() if _is_stray(pid)]
    return Leftovers(tuple(strays), tuple(sorted(folders)), tuple(shared))


def sweep(roots: Sequence[Path] | None = None, *, grace_s: float = GRACE_S) -> None:
    """Remove what was left behind.

    Args:
        roots: as in `find`.
        grace_s: how long processes may still end by themselves.
    """
    _wait_until(lambda: not any(map(_is_stray, process_identity.processes())), grace_s)
    kill(_is_stray)
    found = find(roots)  # anew: a dying launcher has removed much of it meanwhile
    for file in found.shared:
        file.unlink(missing_ok=True)
    for folder in found.folders:
        process_identity.remove(folder)


def sweep_in_background() -> None:
    """Do the same on a thread of its own; a start neither waits for it nor fails by it."""
    threading.Thread(target=_try_to_sweep, name="nbdist-leftovers", daemon=True).start()


def _try_to_sweep() -> None:
    try:
        sweep()
    except OSError as error:
        log.warning("what killed sessions left stays for the next start: %s", error)


def kill(is_meant: Callable[[int], bool]) -> set[int]:
    """Kill all processes that are meant, and wait until they have ended; returns the immortal.

    Again and again, since each may have started another just before.
    """
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        meant = {
            pid: process_identity.started(pid)
            for pid in process_identity.processes()
            if is_meant(pid)
        }
        if not meant:
            return set()
        for pid in meant:
            _kill(pid, is_meant)
        _wait_until(partial(_all_ended, meant), deadline - time.monotonic())
    return {pid for pid in process_identity.processes() if is_meant(pid)}


def of_launcher(folder: Path) -> Callable[[int], bool]:
    """Make the question whether a process belongs to the launcher of a private folder."""
    return lambda pid: process_identity.environ(pid).get(process_identity.RUN_DIR) == str(folder)


def of_this_kernel() -> list[int]:
    """Launchers that this kernel has started, and all that they have: ranks, their children."""
    me = Owner.me().to_json()
    return [
        pid
        for pid in process_identity.processes()
        if process_identity.environ(pid).get(process_identity.KERNEL) == me
    ]


def _kill(pid: int, is_meant: Callable[[int], bool]) -> None:
    """Kill one process.

    It is looked at again once it is held by a descriptor: its number cannot be given to
    another process between that look and the signal. Where there are no such descriptors
    (Linux before 5.3, some builds of Python, gVisor), that look is the last thing before it.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or must not be
        held = _held(pid)
        if held is None:
            if is_meant(pid):
                os.kill(pid, signal.SIGKILL)
            return
        try:
            if is_meant(pid):
                signal.pidfd_send_signal(held, signal.SIGKILL)
        finally:
            os.close(held)


def _all_ended(meant: dict[int, int]) -> bool:
    """Whether none of these runs any more, by number and start time."""
    return not any(born and process_identity.started(pid) == born for pid, born in meant.items())


def _held(pid: int) -> int | None:
    """A descriptor of a process; None where the system has none to give."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def _is_stray(pid: int) -> bool:
    """Whether a process was started by a launcher of this user whose kernel has ended."""
    kernel = Owner.from_json(process_identity.environ(pid).get(process_identity.KERNEL, ""))
    return kernel is not None and kernel.ended and pid != os.getpid()


def _private(root: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(root.glob("nbdist-*"))
    return []


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return "ended"


def _wait_until(happened: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not happened() and time.monotonic() < deadline:
        time.sleep(POLL_S)
