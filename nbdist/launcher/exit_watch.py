"""Notice the end of each rank at once, also `os._exit(0)`, and tell in which order they ended.

A thread of the launcher; ranks announce themselves over a socket pair. Exit codes are looked
at, never collected: torch elastic's main thread wants them, and does not see a rank that left
with code 0.
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
_NOTED_S = 0.2
_POLL_S = 0.005


@dataclass
class _Rank:
    number: int
    pid: int
    pipes: list[int] = field(default_factory=list)
    process: BaseProcess | None = None
    """torch elastic's own, which has the exit code where torch elastic collected it first."""


class Watch:
    """The ranks of one start.

    Args:
        generation: of this start.
        tell: gets `Born` and `RankEnded`, on the watching thread.
    """

    def __init__(self, generation: int, tell: Callable[[messages.LinkMessage], None]) -> None:
        """Begin to listen for ranks."""
        self._generation, self._tell = generation, tell
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._poll = select.poll()
        self._poll.register(self._ours, select.POLLIN)
        self._ranks: dict[int, _Rank] = {}
        """By the descriptor that stands for the process."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def mute(self) -> None:
        """Tell nothing more: the launcher has failed, and ends the ranks itself."""
        self._tell = _nothing

    def close(self) -> None:
        """Tell of the last ends, then watch no more; call it when the ranks are gone."""
        self._theirs.send(_BYE)
        self._thread.join()
        self._theirs.close()

    # -- in a rank

    def announce(self, rank: int) -> None:
        """Say that this rank is there; first thing after the fork."""
        self._ours.close()
        self._theirs.send(f"{rank} {os.getpid()}".encode())

    def share_pipes(self, rank: int, pipes: list[int]) -> None:
        """Let the launcher read what this rank leaves unread in its stdout and stderr.

        What C code writes right before it aborts is the best there is to know of it, and
        the thread that should have passed it on has ended too.
        """
        socket.send_fds(self._theirs, [f"{rank} {os.getpid()}".encode()], pipes)
        self._theirs.close()

    # -- in the launcher

    def _run(self) -> None:
        listening, said = True, select.poll()
        said.register(self._ours, select.POLLIN)
        while listening:
            ready = {fd for fd, _ in self._poll.poll()}
            # what a rank has said before its end is there by now, and belongs to its end
            while listening and said.poll(0):
                listening = self._listen()
            ends = [self._end(fd) for fd in ready & self._ranks.keys()]
            for end in sorted(ends, key=_follows):
                self._tell(end)
        self._ours.close()
        for fd in list(self._ranks):
            self._forget(fd)

    def _listen(self) -> bool:
        """Take one message; False: it was the last."""
        message, pipes, *_ = socket.recv_fds(self._ours, _MESSAGE_BYTES, _PIPES)
        if message == _BYE:
            return False
        number, pid = map(int, message.split())
        known = next((rank for rank in self._ranks.values() if rank.pid == pid), None)
        if known is None:
            self._begin(number, pid)
        else:
            known.pipes, known.process = pipes, known.process or _process(pid)
        return True

    def _begin(self, number: int, pid: int) -> None:
        self._tell(messages.Born(self._generation, number, pid))
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # ended, and collected by torch elastic
            self._tell(messages.RankEnded(self._generation, number, None))
            return
        self._ranks[fd] = _Rank(number, pid, process=_process(pid))
        self._poll.register(fd, select.POLLIN)

    def _end(self, fd: int) -> messages.RankEnded:
        rank = self._ranks[fd]
        code = _code(rank.pid)
        if code is None and rank.process is not None:
            code = _collected(rank.process)
        end = messages.RankEnded(self._generation, rank.number, code, _unread(rank.pipes))
        self._forget(fd)
        return end

    def _forget(self, fd: int) -> None:
        self._poll.unregister(fd)
        for one in (fd, *self._ranks.pop(fd).pipes):
            os.close(one)


def _nothing(_message: messages.LinkMessage) -> None:
    """Tell nobody."""


def _code(pid: int) -> int | None:
    """Exit code of a child that has ended, which stays to be collected."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # torch elastic was quicker
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _process(pid: int) -> BaseProcess | None:
    """The child as multiprocessing knows it; `active_children()` would collect it."""
    children = list(process._children)  # type: ignore[attr-defined]  # noqa: SLF001
    return next((child for child in children if child.pid == pid), None)


def _collected(child: BaseProcess) -> int | None:
    """The exit code that the main thread has just collected, or is about to note."""
    deadline = time.monotonic() + _NOTED_S
    while child.exitcode is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return child.exitcode


def _unread(pipes: list[int]) -> str:
    """What is left in the pipes of a process that has ended."""
    left = b""
    for fd in pipes:
        if select.select([fd], [], [], 0)[0]:
            left += os.read(fd, _LAST_BYTES)
    return left.decode(errors="replace")


def _follows(end: messages.RankEnded) -> bool:
    """Whether an end is rather the consequence of one that was noticed in the same moment.

    Peers are ended by SIGTERM, and abort where a check of theirs finds the connection gone.
    """
    return end.code in {-signal.SIGTERM, -signal.SIGABRT}
