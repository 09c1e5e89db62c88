"""Detects kills by Linux's OOM killer, and their memory limit.

Runs in the notebook's kernel. A process that is killed for lack of memory gets an ordinary
SIGKILL; only the counter of its cgroup shows the reason. Supports cgroup versions 1 and 2.
"""

from __future__ import annotations

from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.limit_in_bytes")  # version 2, version 1
_UNLIMITED_BYTES = 2**60
"""Version 1 uses a huge number for "no limit"."""


class OomKillCounter:
    """Counts OOM kills in the cgroup of this process, which contains launcher and ranks.

    Args:
        events: the file with a line "oom_kill N": "memory.events" of version 2,
            "memory.oom_control" of version 1. Default: that of this process.
    """

    def __init__(self, events: Path | None = None) -> None:
        self._events = events or find_memory_events_file(_OWN, _ROOT)
        self._before = self._count()

    def has_grown(self) -> bool:
        """Return whether a process was killed since this counter was created."""
        return self._count() > self._before

    def describe(self) -> str:
        """Describe the kill and its limit."""
        limit = self._limit()
        cause = f"cgroup limit {limit / 2**30:.1f} GiB" if limit else "the machine is out of memory"
        return f"killed by the kernel's OOM killer ({cause})"

    def _count(self) -> int:
        lines = _text(self._events).splitlines()
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        return int(counts[0]) if counts else 0

    def _limit(self) -> int | None:
        """Return the smallest limit of the cgroup and its parents."""
        if self._events is None:
            return None
        folders = (self._events.parent, *self._events.parent.parents)
        texts = [_text(folder / name).strip() for folder in folders for name in _LIMITS]
        limits = [int(text) for text in texts if text.isdecimal()]
        return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)


def find_memory_events_file(own: Path, root: Path) -> Path | None:
    """Return the file that counts kills; None if the machine has none.

    Args:
        own: list of the process's cgroups, such as /proc/self/cgroup.
        root: mount point of cgroups.
    """
    candidates = []
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if "memory" in controllers.split(","):
            # In a container the path may be the host's; the mount is the cgroup itself then.
            mount = root / "memory"
            candidates += [mount / inside / "memory.oom_control", mount / "memory.oom_control"]
        elif not controllers:
            candidates += [root / inside / "memory.events", root / "memory.events"]
    return next((path for path in candidates if path.exists()), None)


def _text(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text()
    except OSError:
        return ""  # missing, or not readable by this user
