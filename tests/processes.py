"""Whether processes still run."""

from __future__ import annotations

import psutil


def gone(processes: list[int]) -> bool:
    """Whether none of them runs."""
    return not any(map(runs, processes))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
