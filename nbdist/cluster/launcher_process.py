"""A launcher's process and its ranks: environment, file limits, status, stacks, payload paths, log.

Runs in the kernel for launchers on this machine, and in the agent for those of a node.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.errors import PayloadError, StartError
from nbdist.hardware.process_identity import process_start_ticks
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TransferCallback = Callable[[int, int], object]
"""Called with the number of bytes transferred and the total."""
EXITED = "gone"
"""Status of a process that has ended, or whose id was reused."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process of a session and its status."""

    pid: int
    status: str
    """psutil's status, or ``EXITED``."""


@dataclass(frozen=True, slots=True)
class CrashArtifacts:
    """Files that ended processes have left in the folder of their start."""

    crashes: dict[int, str] = field(default_factory=dict)
    """Stack written by faulthandler, by rank."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Tracebacks of ranks that failed to start, oldest first."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Process of one rank."""

    pid: int
    """Process id on the rank's machine."""
    start_ticks: int
    """Start time in clock ticks since boot."""
    device: str


STALE_NAMES = frozenset(
    name
    for names in (
        # torch elastic, MPI launchers, DeepSpeed
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK"),
        ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        ("MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
        # nbdist: this notebook may itself have been started from a rank
        ("NBDIST_KERNEL", "NBDIST_RUN_DIR", "NBDIST_BULK_DIR", "NBDIST_RANK"),
        # ipykernel: parent and channels of the notebook's own kernel
        ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JPY_INTERRUPT_EVENT"),
    )
    for name in names
)
STALE_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")
KERNEL_BASE, KERNEL_EACH = 16, 6
"""File descriptors of a session in the kernel, in total and per rank: sockets and wake-up pipes."""
RANK_BASE, RANK_EACH = 128, 8
"""File descriptors of a rank: torch, ipykernel and process group use 80; the rest is for data."""
ANSWER_S = 2.0
_POLL_S = 0.02
STOPPED_STATUSES = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})
MAX_LOG_BYTES = 2_000_000
_CHUNK = 1 << 16
_CHUNKS = 64
"""Chunks per read; a Linux pipe holds no more, so a flood does not keep the lock for long."""
_CLOSE_S = 5.0


def remove_launch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environ` without the variables of another launch."""
    return {
        name: value
        for name, value in environ.items()
        if name not in STALE_NAMES and not name.startswith(STALE_PREFIXES)
    }


def descriptors_needed(world_size: int) -> int:
    """Return the smallest limit (`ulimit -n`) for a session with this many ranks."""
    here = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only counted
    kernel = here + KERNEL_BASE + KERNEL_EACH * world_size
    return max(kernel, RANK_BASE + RANK_EACH * world_size)


def descriptor_limit() -> int:
    """Return the soft limit of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_descriptors(world_size: int) -> None:
    """Raise if a start would run out of file descriptors.

    Raises:
        StartError: the limit is too low.
    """
    limit, need = descriptor_limit(), descriptors_needed(world_size)
    if limit < need:
        ranks = "rank" if world_size == 1 else "ranks"
        rounded = max(1024, 1 << need.bit_length())  # a power of two with some reserve
        raise StartError(
            f"{world_size} {ranks} need {need} file descriptors in a process and the limit is"
            f" {limit}. Run `ulimit -n {rounded}` in the shell that starts Jupyter."
        )


def process_status(pid: int, start_ticks: int | None = None) -> str:
    """Return the status of a process; ``EXITED`` if it ended or its id was reused.

    Args:
        pid: process id.
        start_ticks: start time in clock ticks since boot; None: not checked.
    """
    # Not psutil's create_time(): it jumps when the system clock is set.
    if start_ticks is not None and process_start_ticks(pid) != start_ticks:
        return EXITED
    try:
        now = str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return EXITED
    return EXITED if now == psutil.STATUS_ZOMBIE else now


def describe_exit_code(code: int | None) -> str:
    """Describe a signal or an exit code: "signal 9 (SIGKILL)", "exit code 3"."""
    if code is None:
        return "an unknown exit code"
    if code < 0:
        names = {int(number): number.name for number in signal.Signals}
        return f"signal {-code} ({names.get(-code, 'a real-time signal')})"
    return f"exit code {code}" if code else "exit code 0 without output, as from os._exit(0)"


def check_payload_path(path: str, folders: Sequence[str]) -> None:
    """Raise PayloadError if a path that a rank has sent is outside its payload folders."""
    if str(Path(path).parent) not in folders:
        raise PayloadError(f"A rank sent the path {path}, which is outside this session's folders.")


def dump_stacks(folder: Path, pids: Mapping[str, int], *, launcher: int) -> dict[str, str]:
    """Request stacks by signal and read them from the files; a text explains missing ones.

    Args:
        folder: folder in which the processes write.
        pids: process ids by name of the file.
        launcher: the launcher's pid. Only it and its children are signalled.
    """
    files = {name: messages.stacks_file(folder, name) for name in pids}
    texts = {name: _signal_error(pid, launcher, files[name]) for name, pid in pids.items()}
    able = [name for name, reason in texts.items() if not reason]
    files = {name: files[name] for name in able}
    before = {name: file.stat().st_size for name, file in files.items()}
    for name in able:
        os.kill(pids[name], messages.STACKS_SIGNAL)
    deadline = time.monotonic() + ANSWER_S
    sizes = before
    while able and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        earlier, sizes = sizes, {name: file.stat().st_size for name, file in files.items()}
        if sizes == earlier and all(sizes[name] > before[name] for name in able):
            break
    for name in able:
        text = files[name].read_bytes()[before[name] :].decode(errors="replace").strip()
        missing = f"no response from process {pids[name]}, state {process_status(pids[name])}"
        texts[name] = text or missing
    return texts


def _signal_error(pid: int, launcher: int, file: Path) -> str:
    """Return why a process cannot be signalled; "" if it can."""
    if not file.exists():
        return f"process {pid} is still starting"  # the signal would end it
    try:
        process = psutil.Process(pid)
        if pid != launcher and process.ppid() != launcher:
            return f"process {pid} has exited"
        if process.status() in STOPPED_STATUSES:
            return f"process {pid} is stopped (state T): resume it with kill -CONT {pid}"
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {pid} has exited"
    except psutil.NoSuchProcess:
        return f"process {pid} has exited"
    return ""


class ProcessLogTail:
    """Keeps the end of the output written to `write_fd`.

    Close `write_fd` in this process once others have inherited it.
    """

    def __init__(self, *, limit: int = MAX_LOG_BYTES) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._reading, self.write_fd = os.pipe()
        self._ending, self._end = os.pipe()
        os.set_blocking(self._reading, False)
        self.thread = threading.Thread(target=self._read_until_end, name="nbdist-log", daemon=True)
        self.thread.start()

    def tail(self, max_bytes: int = MAX_LOG_BYTES) -> str:
        """Return the end of the output so far, limited to `max_bytes`."""
        self._read_available()
        with self._lock:
            last = bytes(self._kept[-min(max_bytes, self._limit) :])
        return last.decode(errors="replace")

    def close(self) -> None:
        """End the thread even if the pipe still has writers; `tail` keeps working."""
        end, self._end = self._end, -1
        if end < 0:
            return
        os.close(end)
        if threading.current_thread() is not self.thread:
            self.thread.join(_CLOSE_S)

    def _read_until_end(self) -> None:
        poll = select.poll()  # select() supports no descriptor above 1023
        poll.register(self._reading, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if not self._read_available() or self._ending in ready:
                break
        with self._lock:
            os.close(self._reading)
            self._reading = -1
        os.close(self._ending)

    def _read_available(self) -> bool:
        """Read available output into the buffer; return False at the end of the pipe."""
        with self._lock:
            if self._reading < 0:
                return False
            for _ in range(_CHUNKS):
                try:
                    chunk = os.read(self._reading, _CHUNK)
                except BlockingIOError:
                    break
                if not chunk:
                    return False
                self._kept += chunk
                if len(self._kept) > 2 * self._limit:
                    del self._kept[: -self._limit]
        return True
