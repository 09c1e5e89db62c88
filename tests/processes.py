"""Processes and ports of this machine."""

from __future__ import annotations

import socket

import psutil


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs."""
    return not any(map(runs, pids))


def runs(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_idle(pid: int) -> None:
    """Wait until a process has used no processor for half a second."""
    process = psutil.Process(pid)
    while process.cpu_percent(0.5) > 0:
        pass


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
