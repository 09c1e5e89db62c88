"""A process that no signal ends, as one in state D: its wait never returns."""

from __future__ import annotations

import subprocess
from typing import Any


class Unkillable:
    """Stands in front of a launcher's Popen; signals get lost, it never ends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.real = process
        self.pid = process.pid

    def poll(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "a wait without a deadline"
        raise subprocess.TimeoutExpired("launcher", timeout)

    def kill(self) -> None:
        """Do nothing: it sits in a call of the operating system."""

    def send_signal(self, number: int) -> None:
        """Do nothing."""
