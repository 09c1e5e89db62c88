"""Watches for stopped processes of a session (SIGSTOP, a debugger): alive but not replying.

Runs in the notebook's kernel, on the reader thread. A stopped process is reported after a few
seconds and not treated as dead: SIGCONT resumes it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.cluster.interfaces import ProcessStatus

UNRESPONSIVE_AFTER_S = 3.0
_STOPPED = {
    psutil.STATUS_STOPPED: "stopped, state T",
    psutil.STATUS_TRACING_STOP: "traced, state t",
}


class StoppedProcessWatch:
    """State of each process, by name: "rank 1", "the launcher"."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._reported: dict[str, str] = {}
        self._status: dict[str, str] = {}

    def describe(self, name: str) -> str:
        """Return why a process does not reply: "unresponsive (stopped, state T)"; "" if it does."""
        return self._reported.get(name, "")

    def status(self, name: str) -> str:
        """Return the last known psutil status of a process; "" if unknown."""
        return self._status.get(name, "")

    def update(self, processes: Mapping[str, ProcessStatus]) -> list[str]:
        """Update all processes; return a line for each that has changed."""
        lines = []
        for name, process in processes.items():
            self._status[name] = process.status
            state = _STOPPED.get(process.status)
            if state is None:
                self._since.pop(name, None)
                if self._reported.pop(name, None):
                    lines.append(f"nbdist: {name} is running again")
            elif name not in self._reported and self._long_enough(name):
                self._reported[name] = f"unresponsive ({state})"
                lines.append(
                    f"nbdist: {name} is {self._reported[name]}: kill -CONT {process.pid} resumes"
                    " it, %nbdist restart starts new ranks"
                )
        return lines

    def _long_enough(self, name: str) -> bool:
        now = time.monotonic()
        return now - self._since.setdefault(name, now) > UNRESPONSIVE_AFTER_S
