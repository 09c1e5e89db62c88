"""Detects immediately when a rank exits, even with `os._exit(0)`, and in which order ranks exit.

A thread of the launcher; ranks register over a socket pair. Exit codes are peeked, not collected:
torch elastic's main thread collects them, but does not notice a rank that exits with code 0.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import process
from typing import TYPE_CHECKING

from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

_LAST_BYTES = 65536  # a pipe holds no more
_MESSAGE_BYTES = 64
_PIPES = 2  # stdout and stderr
_BYE = b"bye"
_EXIT_CODE_TIMEOUT_S = 0.2
_POLL_S = 0.005


@dataclass
class _WatchedRank:
    number: int
    pid: int
    pipes: list[int] = field(default_factory=list)
    process: BaseProcess | None = None
    """torch elastic's process object, which has the exit code if torch elastic reaped it first."""


class RankExitWatch:
    """Watches the ranks of one start.

    Args:
        generation: number of this start.
        send: called with ``RankForked`` and ``RankExited`` on the watching thread.
    """

    def __init__(self, generation: int, send: Callable[[messages.LauncherMessage], None]) -> None:
        self._generation, self._send = generation, send
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._poll = select.poll()
        self._poll.register(self._ours, select.POLLIN)
        self._ranks: dict[int, _WatchedRank] = {}
        """By process file descriptor."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop_reporting(self) -> None:
        """Stop reporting: the launcher has failed and ends the ranks itself."""
        self._send = lambda _message: None

    def close(self) -> None:
        """Report the remaining exits and stop. Call it when all ranks have ended."""
        self._theirs.send(_BYE)
        self._thread.join()
        self._theirs.close()

    # -- in a rank

    def announce_rank(self, rank: int) -> None:
        """Register this rank; called first after the fork."""
        self._ours.close()
        for fd, earlier in self._ranks.items():  # inherited
            for descriptor in (fd, *earlier.pipes):
                os.close(descriptor)
        self._theirs.send(f"{rank} {os.getpid()}".encode())

    def share_pipes(self, rank: int, pipes: list[int]) -> None:
        """Give the launcher this rank's stdout and stderr pipes, to read what is left in them."""
        # C code writes the cause of an abort right before it; the rank's thread that forwards the
        # output ends with it.
        socket.send_fds(self._theirs, [f"{rank} {os.getpid()}".encode()], pipes)
        self._theirs.close()

    # -- in the launcher

    def _run(self) -> None:
        listening, registration = True, select.poll()
        registration.register(self._ours, select.POLLIN)
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
        self._ours.close()
        for fd in list(self._ranks):
            self._unregister(fd)

    def _handle_message(self) -> bool:
        """Handle one message; return False for the last one."""
        message, pipes, *_ = socket.recv_fds(self._ours, _MESSAGE_BYTES, _PIPES)
        if message == _BYE:
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
                time.sleep(_POLL_S)
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
    children = list(process._children)  # type: ignore[attr-defined]  # noqa: SLF001
    return next((child for child in children if child.pid == pid), None)
