"""The launcher's descendants: crash dumps, their exits, and how they are adopted, ended and reaped.

Never affects other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import process as multiprocessing_process
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import psutil

from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL."""
POLL_S = 0.005
_LAST_BYTES = 65536  # a pipe holds no more
_MESSAGE_BYTES = 64
_PIPES = 2  # stdout and stderr
_ENDING = b"bye"
_EXIT_CODE_TIMEOUT_S = 0.2
_dump_files: list[TextIO] = []
"""Keeps the files open: faulthandler stores only their descriptors."""


def install_crash_dump(folder: str | Path, name: str) -> None:
    """Write Python stacks into `folder` on a crash and on `messages.STACKS_SIGNAL`.

    `name` is "launcher", in its own folder, or "rank1", in the folder of this start.
    The kernel reads the file of a process that crashed or does not respond. A rank calls it again
    after the fork to use its own files.
    """
    paths = Path(folder, f"{name}.crash"), messages.stacks_file(folder, name)
    for path in paths:
        path.touch(mode=0o600)  # whatever the umask
    crash, stacks = (path.open("w") for path in paths)
    faulthandler.enable(crash)
    faulthandler.register(messages.STACKS_SIGNAL, stacks, all_threads=True, chain=False)
    for file in _dump_files:
        file.close()
    _dump_files[:] = [crash, stacks]


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends.

    DataLoader workers and user subprocesses of a killed rank thus remain descendants.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Send this process a signal when the thread that forked it ends.

    torch itself uses SIGINT, which an idle ipykernel ignores (ipykernel 7.4).
    """
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


def end_descendants(*, grace_s: float = GRACE_S) -> list[int]:
    """Send SIGTERM to every descendant, then SIGKILL; wait up to `grace_s` after each.

    Ranks get SIGKILL immediately: they report a SIGTERM to the kernel and go on. Does not reap:
    torch elastic's main thread collects the exit codes of the ranks.

    Returns:
        Processes that cannot be killed: they are blocked in a system call.
    """
    running: list[psutil.Process] = []
    # torch elastic starts the ranks as multiprocessing children; active_children() would reap them
    ranks = {child.pid for child in list(multiprocessing_process._children)}  # type: ignore[attr-defined]  # noqa: SLF001
    for number in (signal.SIGTERM, signal.SIGKILL):
        # list again: the children of a dead rank are now children of the launcher
        running = [
            process for process in psutil.Process().children(recursive=True) if _alive(process)
        ]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):  # already ended
                process.send_signal(signal.SIGKILL if process.pid in ranks else number)
                process.send_signal(signal.SIGCONT)  # a stopped one gets SIGTERM when continued
        deadline = time.monotonic() + grace_s
        while any(map(_alive, running)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return [process.pid for process in running if _alive(process)]


def reap_orphans() -> None:
    """Reap adopted orphans that have ended; call only while torch elastic waits for no child."""
    for process in psutil.Process().children():
        if not _alive(process):
            os.waitpid(process.pid, os.WNOHANG)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


@dataclass
class _WatchedRank:
    number: int
    pid: int
    pipes: list[int] = field(default_factory=list)
    process: BaseProcess | None = None
    """torch elastic's process object, which has the exit code if torch elastic reaped it first."""


class RankExitWatch:
    """Watches the ranks of one start, on a thread of the launcher.

    Detects immediately when a rank exits, even with `os._exit(0)`, and in which order ranks exit.
    Ranks register over a socket pair. Exit codes are peeked, not collected: torch elastic's main
    thread collects them, but does not notice a rank that exits with code 0.

    Args:
        generation: number of this start.
        send: called with ``RankForked`` and ``RankExited`` on the watching thread.
    """

    def __init__(self, generation: int, send: Callable[[messages.LauncherMessage], None]) -> None:
        self._generation, self._send = generation, send
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._poll = select.poll()
        self._poll.register(self._receiver, select.POLLIN)
        self._ranks: dict[int, _WatchedRank] = {}
        """By process file descriptor."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop_reporting(self) -> None:
        """Stop reporting: the launcher has failed and ends the ranks itself."""
        self._send = lambda _message: None

    def close(self) -> None:
        """Report the remaining exits and stop. Call it when all ranks have ended."""
        self._sender.send(_ENDING)
        self._thread.join()
        self._sender.close()

    # -- in a rank

    def announce_rank(self, rank: int) -> None:
        """Register this rank; called first after the fork."""
        self._receiver.close()
        for fd, earlier in self._ranks.items():  # inherited
            for descriptor in (fd, *earlier.pipes):
                os.close(descriptor)
        self._sender.send(f"{rank} {os.getpid()}".encode())

    def share_pipes(self, rank: int, pipes: list[int]) -> None:
        """Give the launcher this rank's stdout and stderr pipes, to read what is left in them."""
        # C code writes the cause of an abort right before it; the rank's thread that forwards the
        # output ends with it.
        socket.send_fds(self._sender, [f"{rank} {os.getpid()}".encode()], pipes)
        self._sender.close()

    # -- in the launcher

    def _run(self) -> None:
        listening, registration = True, select.poll()
        registration.register(self._receiver, select.POLLIN)
        while listening:
            ready = {fd for fd, _ in self._poll.poll()}
            # handle what ended ranks have sent before reporting their exit
            while listening and registration.poll(0):
                listening = self._handle_message()
            ends = [self._report_exit(fd) for fd in ready & self._ranks.keys()]
            # Peers are ended by SIGTERM, or abort when a check finds the connection closed: report
            # such exits last, they are probably the consequence of another one
            for end in sorted(ends, key=lambda end: end.code in {-signal.SIGTERM, -signal.SIGABRT}):
                self._send(end)
        self._receiver.close()
        for fd in list(self._ranks):
            self._unregister(fd)

    def _handle_message(self) -> bool:
        """Handle one message; return False for the last one."""
        message, pipes, *_ = socket.recv_fds(self._receiver, _MESSAGE_BYTES, _PIPES)
        if message == _ENDING:
            return False
        number, pid = map(int, message.split())
        known = next((rank for rank in self._ranks.values() if rank.pid == pid), None)
        if known is not None:
            known.pipes, known.process = pipes, known.process or _process(pid)
            return True
        self._send(messages.RankForked(self._generation, number, pid))
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # ended, and reaped by torch elastic
            self._send(messages.RankExited(self._generation, number, None))
            return True
        self._ranks[fd] = _WatchedRank(number, pid, process=_process(pid))
        self._poll.register(fd, select.POLLIN)
        return True

    def _report_exit(self, fd: int) -> messages.RankExited:
        rank = self._ranks[fd]
        code = _exit_code(rank.pid)
        if code is None and rank.process is not None:
            # The main thread has reaped it, and is about to record the exit code.
            deadline = time.monotonic() + _EXIT_CODE_TIMEOUT_S
            while rank.process.exitcode is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
            code = rank.process.exitcode
        left = b""
        for pipe in rank.pipes:
            if select.select([pipe], [], [], 0)[0]:
                left += os.read(pipe, _LAST_BYTES)
        end = messages.RankExited(
            self._generation, rank.number, code, left.decode(errors="replace")
        )
        self._unregister(fd)
        return end

    def _unregister(self, fd: int) -> None:
        self._poll.unregister(fd)
        for descriptor in (fd, *self._ranks.pop(fd).pipes):
            os.close(descriptor)


def _exit_code(pid: int) -> int | None:
    """Exit code of a child that has ended, without reaping it."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # torch elastic has reaped it
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _process(pid: int) -> BaseProcess | None:
    """The child's process object in multiprocessing; `active_children()` would reap it."""
    children = list(multiprocessing_process._children)  # type: ignore[attr-defined]  # noqa: SLF001
    return next((child for child in children if child.pid == pid), None)
