"""What torch leaves in shared memory when its processes are killed: found and removed; pure.

torch names such a file after the process that made it, torch_<pid>_..., where tensors are shared
by name. A number alone proves nothing, so every process forked by a launcher of ours notes its
own in a file of the launcher's private folder. NCCL's files (nccl-...) bear no number: whose
they are cannot be told, and they are left to `%nbdist doctor` to show.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from nbdist.hardware import process_identity

FOLDER = Path("/dev/shm")  # noqa: S108 - tmpfs; only what is known as ours is touched in it
_RECORD = "family"
"""File of a private folder: numbers of the processes that were forked for it, one a line."""
_TORCH = re.compile(r"torch_(?P<pid>[0-9]+)_.*")


def note_forks(run_dir: Path) -> None:
    """Let this process, and all that is forked from it from now on, note their numbers."""
    record = run_dir / _RECORD
    _note(record)
    os.register_at_fork(after_in_child=lambda: _note(record))


def _note(record: Path) -> None:
    # The folder is removed at the end, while children may still fork.
    with contextlib.suppress(OSError):
        fd = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"%d\n" % os.getpid())
        finally:
            os.close(fd)


def left(run_dir: Path, *, folder: Path = FOLDER) -> list[Path]:
    """Files of ended processes of a private folder that nobody uses any more."""
    try:
        family = set((run_dir / _RECORD).read_text(errors="replace").split())
        names = os.listdir(folder)  # noqa: PTH208 - most names are dropped at once
    except OSError:
        return []
    made = [(folder / name, match["pid"]) for name in names if (match := _TORCH.fullmatch(name))]
    found = [path for path, pid in made if pid in family and not process_identity.started(int(pid))]
    return [path for path in unused(found) if _is_ours(path)]


def remove_left(run_dir: Path) -> None:
    """Remove them."""
    for path in left(run_dir):
        path.unlink(missing_ok=True)


def unused(files: list[Path]) -> list[Path]:
    """Those of the files that no process which can be seen from here has mapped or open."""
    used: set[str] = set()
    for pid in process_identity.processes() if files else ():
        used |= _used(Path("/proc") / str(pid))
    return [path for path in files if str(path) not in used]


def _used(process: Path) -> set[str]:
    """Paths that a process has mapped or open; none where it has ended or is another user's."""
    used: set[str] = set()
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text(errors="replace").splitlines()
        used |= {line.split(maxsplit=5)[-1] for line in lines}
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed by now
                used.add(str(fd.readlink()))
    return used


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
