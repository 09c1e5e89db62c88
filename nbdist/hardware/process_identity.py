"""Identifies the owner of a process, folder or shared memory file, despite reused process ids.

The process that creates a private folder writes its identity into it, and the environment of a
launcher's processes holds the identity of their kernel. Files of a killed process can thus be
removed without touching anything else: a name or a process id alone does not prove ownership.

torch names a file in shared memory torch_<pid>_..., after the process that shared a tensor by name.
So every process forked by a launcher records its id in a file of the launcher's private folder.
NCCL's files (nccl-...) carry no process id: their owner is unknown, so only `%nbdist doctor` lists
them.
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

import psutil

OWNER_FILE = ".owner.json"
"""File that identifies the process that created its folder."""
KERNEL_VARIABLE = "NBDIST_KERNEL"
"""Environment variable of a launcher and its descendants: identity of their kernel, as JSON."""
RUN_DIR_VARIABLE = "NBDIST_RUN_DIR"
"""Environment variable with the launcher's private folder, to distinguish a kernel's launchers."""
_OTHER_FOLDERS_FILE = "elsewhere"
"""File in a private folder: paths of its other private folders, one per line."""
ABANDONED_AFTER_S = 24 * 3600.0
"""A process that cannot be checked (other machine or container) counts as ended after this."""
OWNER_GRACE_S = 60.0
"""A younger folder without an owner file may still get one."""
_PRIVATE_NAME = re.compile(r"nbdist-(?:.*-)?(?P<pid>[0-9]{1,9})-[^-]*")
_PROC = Path("/proc")
SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - tmpfs; only files of this session are touched in it
_FORKED_PIDS_FILE = "family"
"""File in a private folder: ids of the processes forked for it, one per line."""
_TORCH_FILE = re.compile(r"torch_(?P<pid>[0-9]+)_.*")
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Identity of a process that stays unique when its process id is reused."""

    pid: int
    started: int
    """Start time in clock ticks since boot."""
    uid: int
    boot: str
    """Boot id of the machine."""
    space: str
    """PID namespace: process ids are valid only within it."""

    @classmethod
    def current_process(cls) -> ProcessIdentity:
        """Return the identity of the current process."""
        pid = os.getpid()
        return cls(
            pid=pid,
            started=process_start_ticks(pid),
            uid=os.getuid(),
            boot=_boot_id(),
            space=_pid_namespace(),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> ProcessIdentity | None:
        """Rebuild from `to_json()`; None for anything else."""
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            return None
        field_types = {field.name: str if field.type == "str" else int for field in fields(cls)}
        if type(tree) is not dict or tree.keys() != field_types.keys():
            return None
        if any(type(tree[name]) is not kind for name, kind in field_types.items()):
            return None
        return cls(**tree)

    def to_json(self) -> str:
        """Return the identity as one line of JSON."""
        return json.dumps(asdict(self))

    def write_owner_file(self, folder: Path) -> None:
        """Write this identity into a folder."""
        (folder / OWNER_FILE).write_text(self.to_json())

    @property
    def is_checkable(self) -> bool:
        """True if it is of this user, boot and PID namespace."""
        me = os.getuid(), _boot_id(), _pid_namespace()
        return (self.uid, self.boot, self.space) == me

    @property
    def has_ended(self) -> bool:
        """True if the process has certainly ended, even if its id is in use again."""
        return self.is_checkable and process_start_ticks(self.pid) != self.started

    def has_abandoned(self, folder: Path) -> bool:
        """Return True if the process has ended or its folder was not modified for a long time."""
        if self.uid != os.getuid() or self.is_checkable:
            return self.has_ended
        return time.time() - folder.stat().st_mtime > ABANDONED_AFTER_S


def read_owner(folder: Path) -> ProcessIdentity | None:
    """Read the owner of a folder; None without a valid owner file."""
    try:
        within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # never follows a link or blocks on a pipe
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(OWNER_FILE, flags, dir_fd=within), "rb") as file:  # noqa: PTH123 - by descriptor
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return ProcessIdentity.from_json(file.read(_MAX_BYTES)) if is_file else None
    except OSError:
        return None
    finally:
        os.close(within)


def is_abandoned(folder: Path) -> bool:
    """Return True if a private folder is this user's own and its creator has ended.

    Always False for a symbolic link, another user's folder, or one that others can access.
    """
    if not is_private(folder):
        return False
    owner = read_owner(folder)
    if owner is not None:
        return owner.has_ended
    # its creator, whose pid is in the name, may have been killed before it wrote the owner file
    named = _PRIVATE_NAME.fullmatch(folder.name)
    if named is None or process_start_ticks(int(named["pid"])):
        return False
    with contextlib.suppress(OSError):
        return not any(folder.iterdir()) and time.time() - folder.stat().st_mtime > OWNER_GRACE_S
    return False


def remove_folder(folder: Path) -> None:
    """Delete a private folder, its owner file last, so that an aborted removal can be repeated.

    Files that cannot be deleted remain.
    """
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != OWNER_FILE:
                entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def record_linked_folder(folder: Path, other: Path) -> None:
    """Record a further private folder in a private folder so that both can be found later."""
    with (folder / _OTHER_FOLDERS_FILE).open("a", errors="surrogateescape") as file:
        file.write(f"{other}\n")


def linked_folders(folder: Path) -> list[Path]:
    """Return the folders recorded in a private one; check the owner of each before use."""
    with contextlib.suppress(OSError):
        lines = (folder / _OTHER_FOLDERS_FILE).read_text(errors="surrogateescape")
        return [Path(line) for line in lines.splitlines()]
    return []


def is_private(folder: Path) -> bool:
    """Return True if it is a real folder of this user that others cannot access."""
    try:
        status = folder.lstat()
    except (OSError, ValueError):  # missing, or a null byte in the name
        return False
    shut = not stat.S_IMODE(status.st_mode) & 0o077
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and shut


def process_environ(pid: int) -> dict[str, str]:
    """Return the initial environment of a process of this user; empty if it cannot be read."""
    folder = _PROC / str(pid)
    try:  # not psutil, which takes several times as long: this is read of all processes
        if folder.stat().st_uid != os.getuid():
            return {}
        entries = os.fsdecode((folder / "environ").read_bytes()).split("\0")
    except OSError:
        return {}  # it has ended
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def process_start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return 0
    # fields from the third on; the second, the name, may contain spaces and parentheses
    stat_fields = text.rpartition(")")[2].split()
    return 0 if stat_fields[0] in "ZX" else int(stat_fields[19])  # field 22; a zombie has ended


def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _pid_namespace() -> str:
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


# -- shared memory files of torch


def record_forked_pids(run_dir: Path) -> None:
    """Record the id of this process and of every process forked from it from here on."""

    def record() -> None:
        # The folder is removed at shutdown while children may still fork.
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(run_dir / _FORKED_PIDS_FILE, flags, 0o600)
            try:
                os.write(fd, b"%d\n" % os.getpid())
            finally:
                os.close(fd)

    record()
    os.register_at_fork(after_in_child=record)


def has_living_processes(run_dir: Path) -> bool:
    """Return whether a process that was forked for a private folder has not ended."""
    return any(process_start_ticks(int(pid)) for pid in _forked_pids(run_dir) if pid.isdecimal())


def _forked_pids(run_dir: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set((run_dir / _FORKED_PIDS_FILE).read_text(errors="replace").split())
    return set()


def find_orphaned_files(run_dir: Path, *, folder: Path = SHM_FOLDER) -> list[Path]:
    """Return unused files of ended processes of a private folder."""
    family = _forked_pids(run_dir)
    orphaned = [
        path
        for path in folder.glob("torch_*")
        if (match := _TORCH_FILE.fullmatch(path.name))
        and match["pid"] in family
        and not process_start_ticks(int(match["pid"]))
    ]
    found = []
    for path in filter_unused(orphaned):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                found.append(path)
    return found


def remove_orphaned_files(run_dir: Path) -> None:
    """Remove the orphaned files of a private folder."""
    for path in find_orphaned_files(run_dir):
        path.unlink(missing_ok=True)


def filter_unused(files: list[Path]) -> list[Path]:
    """Return the files that no visible process has mapped or opened."""
    used: set[str] = set()
    for pid in psutil.pids() if files else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
            used |= {line.split(maxsplit=5)[-1] for line in lines}
            for fd in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):  # already closed
                    used.add(str(fd.readlink()))
    return [path for path in files if str(path) not in used]
