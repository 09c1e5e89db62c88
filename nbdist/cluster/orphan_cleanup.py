"""Finds and removes what sessions with a killed kernel have left behind, of this user only.

Runs in the kernel: on a thread when a launcher starts, and for `%nbdist doctor`. A folder is
removed if it is private, has an owner file, and its owner has ended. A process is killed if its
environment names a kernel that has ended. The launcher of a killed kernel cleans up itself, so only
what remains after a few seconds counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from nbdist.cluster import run_dir
from nbdist.hardware import process_identity
from nbdist.hardware.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

GRACE_S = 4.0
"""Time for a launcher that has lost its kernel to end everything itself."""
POLL_S = 0.05
KILL_S = 2.0
"""Time for killed processes to exit before their folders are removed."""


@dataclass(frozen=True, slots=True)
class OrphanProcess:
    """A process of a launcher whose kernel has ended."""

    pid: int
    name: str

    def __str__(self) -> str:
        """Return name and process id: "python (pid 4711)"."""
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class OrphanResources:
    """Resources that killed sessions of this user have left."""

    processes: tuple[OrphanProcess, ...] = ()
    folders: tuple[Path, ...] = ()
    shared_memory_files: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.folders or self.shared_memory_files)


def find_orphans(roots: Sequence[Path] | None = None) -> OrphanResources:
    """Find orphaned resources without changing anything.

    Args:
        roots: folders that may contain private folders. Default: those that sessions use.
    """
    places = run_dir.private_folder_roots() if roots is None else roots
    folders: list[Path] = []
    waiting: list[Path] = []
    for root in places:
        with contextlib.suppress(OSError):
            waiting += sorted(root.glob("nbdist-*"))
    while waiting:
        path = waiting.pop()
        if path not in folders and process_identity.is_abandoned(path):
            folders.append(path)
            waiting += process_identity.linked_folders(path)
    shared = [file for folder in folders for file in process_identity.find_orphaned_files(folder)]
    strays = []
    for pid in filter(_is_stray, psutil.pids()):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            strays.append(OrphanProcess(pid, psutil.Process(pid).name()))
    return OrphanResources(tuple(strays), tuple(sorted(folders)), tuple(shared))


def remove_orphans(roots: Sequence[Path] | None = None, *, grace_s: float = GRACE_S) -> None:
    """Remove orphaned resources.

    Args:
        roots: as in ``find_orphans``.
        grace_s: time for processes to end by themselves.
    """
    deadline = time.monotonic() + grace_s
    while True:
        while any(map(_is_stray, psutil.pids())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        survivors = kill_processes(_is_stray)
        found = find_orphans(roots)
        is_late = bool(survivors) or time.monotonic() > deadline + KILL_S
        # A rank that is ending has no environment, but uses files that only its folder lists.
        running = set(filter(process_identity.has_living_processes, found.folders))
        for folder in found.folders:
            if is_late or folder not in running:
                process_identity.remove_orphaned_files(folder)
                process_identity.remove_folder(folder)
        if is_late or not (running or found.processes):
            break
        time.sleep(POLL_S)


def remove_orphans_async() -> None:
    """Remove orphaned resources on a separate thread; errors are only logged."""

    def sweep() -> None:
        try:
            remove_orphans()
        except OSError as error:
            log.warning("cannot remove what killed sessions left: %s", error)

    threading.Thread(target=sweep, name="nbdist-leftovers", daemon=True).start()


def kill_processes(should_kill: Callable[[int], bool]) -> set[int]:
    """Kill all matching processes and wait for their end; return those that cannot be killed.

    Repeats the search, since a process may have forked another one before its end.
    """
    deadline, killed = time.monotonic() + KILL_S, set[int]()
    while time.monotonic() < deadline:
        found = [process for process in psutil.process_iter() if should_kill(process.pid)]
        for process in found:
            # psutil compares the start time, so that a process with a reused id is not killed.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        killed |= {process.pid for process in found}
        # A process that is ending no longer has an environment, but still uses its files.
        if not found and not any(map(process_identity.process_start_ticks, killed)):
            return set()
        time.sleep(POLL_S)
    return {pid for pid in psutil.pids() if should_kill(pid)}


def launcher_process_filter(folder: Path) -> Callable[[int], bool]:
    """Return a predicate: does a process belong to the launcher of this private folder?"""
    return lambda pid: (
        process_identity.process_environ(pid).get(process_identity.RUN_DIR_VARIABLE) == str(folder)
    )


def kernel_descendants() -> list[int]:
    """Return the processes of this kernel's launchers: launchers, ranks and their children."""
    me = ProcessIdentity.current_process().to_json()
    return [
        pid
        for pid in psutil.pids()
        if process_identity.process_environ(pid).get(process_identity.KERNEL_VARIABLE) == me
    ]


def _is_stray(pid: int) -> bool:
    """Return True if a process belongs to a launcher of this user whose kernel has ended."""
    kernel = ProcessIdentity.from_json(
        process_identity.process_environ(pid).get(process_identity.KERNEL_VARIABLE, "")
    )
    return kernel is not None and kernel.has_ended and pid != os.getpid()
