"""Whose a folder or a process is: told apart from whatever gets its number later; pure.

Whoever makes a private folder signs it with its own identity, and a launcher's processes carry
the identity of their kernel in their environment. So what a killed process left behind can be
removed, and nothing else is ever touched: a name or a number alone proves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

OWNER = ".owner.json"
"""File in a folder that says which process made it."""
KERNEL = "NBDIST_KERNEL"
"""Variable of a launcher's environment, and so of all that it starts: its kernel, as JSON."""
RUN_DIR = "NBDIST_RUN_DIR"
"""The same for the launcher's private folder: it tells launchers of one kernel apart."""
_ELSEWHERE = "elsewhere"
"""File in a private folder: paths of further ones in other places, one a line."""
ABANDONED_S = 24 * 3600.0
"""A process that cannot be asked (another machine, another container) is given so long."""
UNSIGNED_S = 60.0
"""A folder that is younger may be about to be signed."""
_MADE_BY = re.compile(r"nbdist-(?:.*-)?(?P<pid>[0-9]{1,9})-[^-]*")
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
        return cls(pid=pid, started=started(pid), uid=os.getuid(), boot=_boot(), space=_space())

    @classmethod
    def from_json(cls, text: str | bytes) -> Owner | None:
        """Read what `to_json` wrote; None for anything else."""
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            return None
        wanted = {field.name: str if field.type == "str" else int for field in fields(cls)}
        if type(tree) is not dict or tree.keys() != wanted.keys():
            return None
        if any(type(tree[name]) is not kind for name, kind in wanted.items()):
            return None
        return cls(**tree)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def write(self, folder: Path) -> None:
        """Sign a folder."""
        (folder / OWNER).write_text(self.to_json())

    @property
    def can_be_asked(self) -> bool:
        """Whether it is of this user, and of this container since this start of the machine."""
        me = os.getuid(), _boot(), _space()
        return (self.uid, self.boot, self.space) == me

    @property
    def ended(self) -> bool:
        """Whether the process is certainly gone, though another may have its number."""
        return self.can_be_asked and started(self.pid) != self.started

    def gone(self, folder: Path) -> bool:
        """Whether the process has ended, or its folder has long been left alone."""
        if self.uid != os.getuid() or self.can_be_asked:
            return self.ended
        return time.time() - folder.stat().st_mtime > ABANDONED_S


def of(folder: Path) -> Owner | None:
    """Read whose a folder is; None where nobody has signed it."""
    try:
        within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Owner.from_json(_small_file(OWNER, within))
    except OSError:
        return None
    finally:
        os.close(within)


def abandoned(folder: Path) -> bool:
    """Whether a private folder is this user's own and the process that made it has ended.

    A symbolic link, a folder of somebody else or one that others may enter is never.
    """
    if not is_private(folder):
        return False
    owner = of(folder)
    if owner is not None:
        return owner.ended
    return _never_signed(folder)


def _never_signed(folder: Path) -> bool:
    """Whether its maker, whose number is in the name, was killed between making and signing."""
    named = _MADE_BY.fullmatch(folder.name)
    if named is None or started(int(named["pid"])):
        return False
    with contextlib.suppress(OSError):
        return not any(folder.iterdir()) and time.time() - folder.stat().st_mtime > UNSIGNED_S
    return False


def remove(folder: Path) -> None:
    """Delete a private folder, its signature last: a removal cut short leaves what is still ours.

    What cannot be deleted stays.
    """
    with contextlib.suppress(OSError):
        for one in folder.iterdir():
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            elif one.name != OWNER:
                one.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def note_elsewhere(folder: Path, other: Path) -> None:
    """Note in a private folder that there is another one, so that both are found later."""
    with (folder / _ELSEWHERE).open("a", errors="surrogateescape") as noted:
        noted.write(f"{other}\n")


def elsewhere(folder: Path) -> list[Path]:
    """Folders noted in a private one; each must prove itself whose it is."""
    with contextlib.suppress(OSError):
        noted = (folder / _ELSEWHERE).read_text(errors="surrogateescape")
        return [Path(line) for line in noted.splitlines()]
    return []


def is_private(folder: Path) -> bool:
    """Whether it is a real folder of this user that nobody else may enter."""
    try:
        status = folder.lstat()
    except (OSError, ValueError):  # there is none, or its name holds a zero
        return False
    shut = not stat.S_IMODE(status.st_mode) & 0o077
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and shut


def environ(pid: int) -> dict[str, str]:
    """The environment that a process of this user was started with; empty where it is not told."""
    folder = _PROC / str(pid)
    try:
        if folder.stat().st_uid != os.getuid():
            return {}
        entries = os.fsdecode((folder / "environ").read_bytes()).split("\0")
    except OSError:
        return {}  # it has ended
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def started(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 of one that has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return 0
    told = text.rpartition(")")[2].split()  # from field 3 on; the name may hold anything
    return 0 if told[0] in "ZX" else int(told[19])  # field 22; a zombie has ended


def processes() -> list[int]:
    """Numbers of all processes that can be seen from here."""
    return [int(name) for name in os.listdir(_PROC) if name.isdecimal()]  # noqa: PTH208 - no paths


def _small_file(name: str, within: int) -> bytes:
    """Read a regular file of an open folder; neither a link nor a pipe is waited for."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=within), "rb") as file:  # noqa: PTH123 - by descriptor
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{name} is no regular file")
        return file.read(_MAX_BYTES)


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
