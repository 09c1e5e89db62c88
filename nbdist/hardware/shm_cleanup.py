"""Removes the shared memory files that killed torch processes leave behind.

torch names such a file torch_<pid>_..., after the process that shared a tensor by name. A process
id alone does not prove ownership, so every process forked by a launcher of nbdist records its id
in a file of the launcher's private folder. NCCL's files (nccl-...) carry no process id: their
owner is unknown, so only `%nbdist doctor` lists them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from nbdist.hardware import process_identity

SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - tmpfs; only files of this session are touched in it
_RECORD = "family"
"""File of a private folder: ids of the processes forked for it, one per line."""
_TORCH = re.compile(r"torch_(?P<pid>[0-9]+)_.*")


def record_forked_pids(run_dir: Path) -> None:
    """Record the id of this process and of every process forked from it from here on."""
    record = run_dir / _RECORD
    _note(record)
    os.register_at_fork(after_in_child=lambda: _note(record))


def _note(record: Path) -> None:
    # The folder is removed at shutdown while children may still fork.
    with contextlib.suppress(OSError):
        fd = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"%d\n" % os.getpid())
        finally:
            os.close(fd)


def find_orphaned_files(run_dir: Path, *, folder: Path = SHM_FOLDER) -> list[Path]:
    """Return unused files of ended processes of a private folder."""
    try:
        family = set((run_dir / _RECORD).read_text(errors="replace").split())
        names = os.listdir(folder)  # noqa: PTH208 - most names are filtered out
    except OSError:
        return []
    made = [(folder / name, match["pid"]) for name in names if (match := _TORCH.fullmatch(name))]
    orphaned = [
        path
        for path, pid in made
        if pid in family and not process_identity.process_start_ticks(int(pid))
    ]
    return [path for path in filter_unused(orphaned) if _is_ours(path)]


def remove_orphaned_files(run_dir: Path) -> None:
    """Remove the orphaned files of a private folder."""
    for path in find_orphaned_files(run_dir):
        path.unlink(missing_ok=True)


def filter_unused(files: list[Path]) -> list[Path]:
    """Return the files that no visible process has mapped or opened."""
    used: set[str] = set()
    for pid in process_identity.visible_pids() if files else ():
        used |= _used(Path("/proc") / str(pid))
    return [path for path in files if str(path) not in used]


def _used(process: Path) -> set[str]:
    """Paths that a process has mapped or opened; empty if it ended or is another user's."""
    used: set[str] = set()
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text(errors="replace").splitlines()
        used |= {line.split(maxsplit=5)[-1] for line in lines}
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # already closed
                used.add(str(fd.readlink()))
    return used


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
