"""Processes of a session that are stopped (SIGSTOP, a debugger): alive, and not answering.

Runs in the notebook's kernel, on the reader thread. Told after a few seconds, never taken
for dead: SIGCONT lets them go on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.cluster.interfaces import Process

UNRESPONSIVE_S = 3.0
_STOPPED = {
    psutil.STATUS_STOPPED: "stopped, state T",
    psutil.STATUS_TRACING_STOP: "traced, state t",
}


class Pulse:
    """What is known of each process, by its name: "rank 1", "the launcher"."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._since: dict[str, float] = {}
        self._told: dict[str, str] = {}
        self._status: dict[str, str] = {}

    def words(self, name: str) -> str:
        """Why a process does not answer: "unresponsive (stopped, state T)"; "" if it does."""
        return self._told.get(name, "")

    def status(self, name: str) -> str:
        """How a process was at the last look, as psutil names it; "" before that."""
        return self._status.get(name, "")

    def look(self, processes: Mapping[str, Process]) -> list[str]:
        """Look at all of them; returns a line for each that has changed."""
        lines = []
        for name, process in processes.items():
            self._status[name] = process.status
            state = _STOPPED.get(process.status)
            if state is None:
                self._since.pop(name, None)
                if self._told.pop(name, None):
                    lines.append(f"nbdist: {name} goes on")
            elif name not in self._told and self._long_enough(name):
                self._told[name] = f"unresponsive ({state})"
                lines.append(
                    f"nbdist: {name} is {self._told[name]}: kill -CONT {process.pid} lets it go on,"
                    " %nbdist restart takes new ranks"
                )
        return lines

    def _long_enough(self, name: str) -> bool:
        now = time.monotonic()
        return now - self._since.setdefault(name, now) > UNRESPONSIVE_S
