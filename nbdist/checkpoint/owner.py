"""Who writes a folder: found again after a crash, so that only what is dead is removed; pure."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nbdist.checkpoint import strict
from nbdist.checkpoint.disk import read_small
from nbdist.checkpoint.names import OWNER

ABANDONED_S = 24 * 3600.0
"""A process that cannot be asked (another machine, another container) is given so long."""
_PROC = Path("/proc")
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, told apart from any later one that gets its number."""

    pid: int
    started: int
    """When it started, in ticks since the machine did."""
    uid: int
    boot: str
    """The machine, since it was last started."""
    space: str
    """The container: process numbers mean something within it alone."""

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(pid=pid, started=_started(pid), uid=os.getuid(), boot=_boot(), space=_space())

    def write(self, folder: Path) -> None:
        """Mark a folder as this process's."""
        (folder / OWNER).write_text(json.dumps(asdict(self)))

    def gone(self, folder: Path) -> bool:
        """Whether the process is certainly gone, or its folder has long been left alone."""
        if self.uid != os.getuid():
            return False
        if self.boot != _boot() or self.space != _space():
            return time.time() - folder.stat().st_mtime > ABANDONED_S
        return _started(self.pid) != self.started


def of(folder: Path) -> Owner | None:
    """Read whose a folder is; None where nobody has marked it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Owner(**_OWNER(strict.loads(read_small(OWNER, folder=fd, limit=_MAX_BYTES)), ""))
    except (OSError, strict.Refused):
        return None
    finally:
        os.close(fd)


_OWNER = strict.fields(
    {
        "pid": strict.count,
        "started": strict.count,
        "uid": strict.count,
        "boot": strict.text,
        "space": strict.text,
    }
)


def _started(pid: int) -> int:
    """When a process started; 0 of one that is not there."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name may hold anything


def _boot() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _space() -> str:
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""
