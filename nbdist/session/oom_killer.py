"""Whether Linux's OOM killer has been at work, and at which limit.

Runs in the notebook's kernel. A process that is killed for lack of memory gets SIGKILL like
any other; only the counter of its cgroup tells. Versions 1 and 2 are read alike.
"""

from __future__ import annotations

from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.limit_in_bytes")  # version 2, version 1
_UNLIMITED_BYTES = 2**60
"""Version 1 writes a huge number where there is no limit."""


class OomCounter:
    """The kills that the cgroup of this process has counted; launcher and ranks are in it.

    Args:
        events: the file with a line "oom_kill N": "memory.events" of version 2,
            "memory.oom_control" of version 1. Default: that of this process.
    """

    def __init__(self, events: Path | None = None) -> None:
        """Remember how many kills there were up to now."""
        self._events = events or events_file(_OWN, _ROOT)
        self._before = self._count()

    def grew(self) -> bool:
        """Whether a process was killed since this counter was made."""
        return self._count() > self._before

    def words(self) -> str:
        """Who killed, and at which limit."""
        limit = self._limit()
        told = f"cgroup limit {limit / 2**30:.1f} GiB" if limit else "the machine's memory ended"
        return f"killed by the kernel's OOM killer ({told})"

    def _count(self) -> int:
        lines = _text(self._events).splitlines()
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        return int(counts[0]) if counts else 0

    def _limit(self) -> int | None:
        """The smallest limit of the cgroup and those that it is in."""
        if self._events is None:
            return None
        folders = (self._events.parent, *self._events.parent.parents)
        texts = [_text(folder / name).strip() for folder in folders for name in _LIMITS]
        limits = [int(text) for text in texts if text.isdecimal()]
        return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)


def events_file(own: Path, root: Path) -> Path | None:
    """Find the file that counts kills; None where the machine has none.

    Args:
        own: the process's list of cgroups, as /proc/self/cgroup.
        root: where cgroups are mounted.
    """
    candidates = []
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if "memory" in controllers.split(","):
            # in a container the path may be the host's: then the mount is the cgroup itself
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
        return ""  # not on this machine, or not for this user
