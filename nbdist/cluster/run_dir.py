"""Private folders of one launcher, and the removal of what sessions with a killed kernel have left.

The folders have sockets, connection files and payload files. Created by the kernel (0700) with a
file that names their owner. Removed by the kernel when it closes the launcher, by the launcher when
the kernel has ended, or by the next start of any kernel when both were killed. The agent of a node
copies files between them and the kernel, one chunk at a time.

Orphans are looked for on a thread when a launcher starts, and for `%nbdist doctor`; of this user
only. A folder is removed if it is private, has an owner file, and its owner has ended. A process is
killed if its environment names a kernel that has ended. The launcher of a killed kernel cleans up
itself, so only what remains after a few seconds counts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.cluster.protocol import CHUNK_BYTES, MIN_FREE_BYTES
from nbdist.errors import StartError
from nbdist.hardware import process_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PREFIX = f"nbdist-{os.getpid()}-"
"""Contains the kernel's pid, so that folders of a killed kernel can be recognised."""
MAX_SOCKET_PATH = 107  # bytes of sun_path on Linux without the terminating zero
MAX_FILE_NAME_CHARS = 45  # "/nbdist-<pid>-XXXXXXXX/<generation>/r<rank>-<port>" with room to spare
MIN_PAYLOAD_BYTES = 512 * 2**20  # containers often give /dev/shm 64 MB: not worth using
SHARED_MEMORY = process_identity.SHM_FOLDER
GRACE_S = 4.0
"""Time for a launcher that has lost its kernel to end everything itself."""
POLL_S = 0.05
KILL_S = 2.0
"""Time for killed processes to exit before their folders are removed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The two private folders of a launcher."""

    path: Path
    """Folder for sockets and connection files; short enough for Unix sockets."""
    payload_dir: Path
    """Folder for payload files; in shared memory if that is large enough."""

    @classmethod
    def create(cls) -> RunDir:
        """Create both folders, mode 0700.

        Raises:
            StartError: no writable folder with a path short enough for a socket.
        """
        path = make_private(_socket_folders(), "sockets", max_bytes=MAX_SOCKET_PATH)
        bulk = make_private(payload_roots(), "payload files")
        # the next kernel may use another temp folder
        process_identity.record_linked_folder(bulk, path)
        return cls(path, bulk)

    @property
    def folders(self) -> list[Path]:
        """Folders for payload files, preferred first."""
        return [self.payload_dir, self.path]

    def make_start_folder(self, number: int) -> Path:
        """Create the folder of a new start of the ranks; remove those of earlier starts."""
        for earlier in self.path.iterdir():
            if earlier.name.isdigit():
                shutil.rmtree(earlier, ignore_errors=True)
        folder = self.path / str(number)
        folder.mkdir(mode=0o700)
        return folder

    def remove(self) -> None:
        """Delete both folders. A second call does nothing."""
        process_identity.remove_orphaned_files(self.path)
        for folder in (self.path, self.payload_dir):
            process_identity.remove_folder(folder)

    # -- file transfers between a node and the kernel; a path outside the folders raises OSError

    def create_file(self, name: str, size: int) -> str:
        """Create an empty file in the first folder with enough space; return its path."""
        for folder in self.folders:
            if shutil.disk_usage(folder).free > size + MIN_FREE_BYTES:
                break
        path = folder / Path(name).name
        path.touch(mode=0o600, exist_ok=False)
        return str(path)

    def append_chunk(self, path: str, chunk: bytes) -> int:
        """Append to a file; return the number of bytes."""
        with self._check_own_path(path).open("ab") as file:
            return file.write(chunk)

    def remove_file(self, path: str) -> None:
        """Remove a file if it exists."""
        self._check_own_path(path).unlink(missing_ok=True)

    def file_size_bytes(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return self._check_own_path(path).stat().st_size

    def read_chunk(self, path: str, offset: int) -> bytes:
        """Read one chunk of a file."""
        with self._check_own_path(path).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def _check_own_path(self, path: str) -> Path:
        file = Path(path)
        if file.parent not in self.folders or file.is_symlink():
            raise PermissionError(f"{path} is outside this session's folders")
        return file


def shared_folder_error(path: str, text: str) -> str:
    """Return why a folder that the kernel has written to cannot be used here; "" if it can.

    Args:
        path: a file that the kernel has created in the folder.
        text: content of the file.
    """
    file = Path(path)
    try:
        same = file.read_text() == text
    except OSError:
        same = False
    if not same:
        return f"{file.parent} is not the same folder there as on the notebook's machine"
    try:
        (trial := file.with_name(f"{file.name}-{secrets.token_hex(8)}")).touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        return f"{file.parent} is not writable there ({error.strerror})"
    return ""


def private_folder_roots() -> list[Path]:
    """Return every folder that may contain private folders."""
    runtime = Path(f"/run/user/{os.getuid()}")
    return [*dict.fromkeys([*_socket_folders(), runtime, SHARED_MEMORY])]


def _socket_folders() -> list[Path]:
    named = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]  # noqa: S108
    return [Path(name) for name in dict.fromkeys(named) if name]


def payload_roots() -> list[Path]:
    """Return the folders that can contain payload files, preferred first."""
    has_shared_memory = (
        SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= MIN_PAYLOAD_BYTES
    )
    return [*([SHARED_MEMORY] if has_shared_memory else []), Path(tempfile.gettempdir())]


def make_private(folders: list[Path], purpose: str, *, max_bytes: int | None = None) -> Path:
    """Create a private folder in the best of these folders.

    Raises:
        StartError: none of them can be used; the message has the reasons.
    """
    reasons = []
    # use a folder in which others can rename files only if there is no other, as in some containers
    for folder in sorted(folders, key=lambda folder: bool(unsafe_folder_reason(folder))):
        if max_bytes and len(os.fsencode(folder)) + MAX_FILE_NAME_CHARS > max_bytes:
            reasons.append(f"{folder}: too long for a Unix socket ({max_bytes} bytes)")
            continue
        try:
            return _create_private_folder(folder)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    raise StartError(
        f"No folder for {purpose}: {'; '.join(reasons)}."
        " Set TMPDIR to a short, writable folder of your own."
    )


def _create_private_folder(folder: Path) -> Path:
    """Create a private folder with its owner file; remove it if that fails."""
    created = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))  # mkdtemp uses mode 0700
    try:
        process_identity.ProcessIdentity.current_process().write_owner_file(created)
    except OSError:
        shutil.rmtree(created, ignore_errors=True)
        raise
    if process_identity.is_private(created):
        return created
    shutil.rmtree(created, ignore_errors=True)
    raise OSError(errno.EPERM, "its file system does not keep folders private")


def unsafe_folder_reason(folder: Path) -> str:
    """Return why private folders would be unsafe in this folder; "" if they are safe.

    Users that can rename entries of the folder could replace a private folder.
    """
    try:
        status = folder.stat()
    except OSError as error:
        return error.strerror or "it cannot be read"
    if status.st_uid not in {0, os.getuid()}:
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        return "other users can rename files in it (it has no sticky bit)"
    return ""


# -- what killed sessions have left


@dataclass(frozen=True, slots=True)
class OrphanProcess:
    """A process of a launcher whose kernel has ended."""

    pid: int
    name: str

    def __str__(self) -> str:
        """Return name and process id: "python (pid 4711)"."""
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class OrphanResources:
    """Resources that killed sessions of this user have left."""

    processes: tuple[OrphanProcess, ...] = ()
    folders: tuple[Path, ...] = ()
    shared_memory_files: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.folders or self.shared_memory_files)


def find_orphans(roots: Sequence[Path] | None = None) -> OrphanResources:
    """Find orphaned resources without changing anything.

    Args:
        roots: folders that may contain private folders. Default: those that sessions use.
    """
    places = private_folder_roots() if roots is None else roots
    folders: list[Path] = []
    waiting: list[Path] = []
    for root in places:
        with contextlib.suppress(OSError):
            waiting += sorted(root.glob("nbdist-*"))
    while waiting:
        path = waiting.pop()
        if path not in folders and process_identity.is_abandoned(path):
            folders.append(path)
            waiting += process_identity.linked_folders(path)
    shared = [file for folder in folders for file in process_identity.find_orphaned_files(folder)]
    strays = []
    for pid in filter(_is_stray, psutil.pids()):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            strays.append(OrphanProcess(pid, psutil.Process(pid).name()))
    return OrphanResources(tuple(strays), tuple(sorted(folders)), tuple(shared))


def remove_orphans(roots: Sequence[Path] | None = None, *, grace_s: float = GRACE_S) -> None:
    """Remove orphaned resources.

    Args:
        roots: as in ``find_orphans``.
        grace_s: time for processes to end by themselves.
    """
    deadline = time.monotonic() + grace_s
    while True:
        while any(map(_is_stray, psutil.pids())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        survivors = kill_processes(_is_stray)
        found = find_orphans(roots)
        is_late = bool(survivors) or time.monotonic() > deadline + KILL_S
        # A rank that is ending has no environment, but uses files that only its folder lists.
        running = set(filter(process_identity.has_living_processes, found.folders))
        for folder in found.folders:
            if is_late or folder not in running:
                process_identity.remove_orphaned_files(folder)
                process_identity.remove_folder(folder)
        if is_late or not (running or found.processes):
            break
        time.sleep(POLL_S)


def remove_orphans_async() -> None:
    """Remove orphaned resources on a separate thread; errors are only logged."""

    def sweep() -> None:
        try:
            remove_orphans()
        except OSError as error:
            log.warning("cannot remove what killed sessions left: %s", error)

    threading.Thread(target=sweep, name="nbdist-leftovers", daemon=True).start()


def kill_processes(should_kill: Callable[[int], bool]) -> set[int]:
    """Kill all matching processes and wait for their end; return those that cannot be killed.

    Repeats the search, since a process may have forked another one before its end.
    """
    deadline, killed = time.monotonic() + KILL_S, set[int]()
    while time.monotonic() < deadline:
        found = [process for process in psutil.process_iter() if should_kill(process.pid)]
        for process in found:
            # psutil compares the start time, so that a process with a reused id is not killed.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        killed |= {process.pid for process in found}
        # A process that is ending no longer has an environment, but still uses its files.
        if not found and not any(map(process_identity.process_start_ticks, killed)):
            return set()
        time.sleep(POLL_S)
    return {pid for pid in psutil.pids() if should_kill(pid)}


def launcher_process_filter(folder: Path) -> Callable[[int], bool]:
    """Return a predicate: does a process belong to the launcher of this private folder?"""
    return lambda pid: (
        process_identity.process_environ(pid).get(process_identity.RUN_DIR_VARIABLE) == str(folder)
    )


def kernel_descendants() -> list[int]:
    """Return the processes of this kernel's launchers: launchers, ranks and their children."""
    me = process_identity.ProcessIdentity.current_process().to_json()
    return [
        pid
        for pid in psutil.pids()
        if process_identity.process_environ(pid).get(process_identity.KERNEL_VARIABLE) == me
    ]


def _is_stray(pid: int) -> bool:
    """Return True if a process belongs to a launcher of this user whose kernel has ended."""
    kernel = process_identity.ProcessIdentity.from_json(
        process_identity.process_environ(pid).get(process_identity.KERNEL_VARIABLE, "")
    )
    return kernel is not None and kernel.has_ended and pid != os.getpid()
