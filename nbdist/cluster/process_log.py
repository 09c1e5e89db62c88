"""The last output of a launcher and its ranks: a pipe, read all the time, and a bounded rest.

Runs in the kernel. What is written outside of cells (by torch's own threads, by C code, by a
process that crashes) goes to file descriptors 1 and 2, which launcher and ranks inherit. A
file would grow without bound, and a pipe that nobody reads would stop its writers at 64 KB.
"""

from __future__ import annotations

import os
import select
import threading

LIMIT_BYTES = 2_000_000
_CHUNK = 1 << 16
_CHUNKS = 64
"""Read at once; a pipe of Linux holds no more, so that nobody waits behind a flood."""
_CLOSE_S = 5.0


class Log:
    """Keeps the end of everything that is written to `writing`."""

    def __init__(self, *, limit: int = LIMIT_BYTES) -> None:
        """Open the pipe and begin to read it on a thread."""
        self._limit = limit
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._reading, self.writing = os.pipe()
        self._ending, self._end = os.pipe()
        os.set_blocking(self._reading, False)
        self._thread = threading.Thread(target=self._drain, name="nbdist-log", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Let go of `writing`: only the processes that inherited it write now."""
        os.close(self.writing)

    def tail(self, max_bytes: int = LIMIT_BYTES) -> str:
        """The end of what was written up to now, at most the limit."""
        self._take()
        with self._lock:
            last = bytes(self._kept[-min(max_bytes, self._limit) :])
        return last.decode(errors="replace")

    def close(self) -> None:
        """End the thread, whoever may still write; what was kept can be read on."""
        end, self._end = self._end, -1
        if end < 0:
            return
        os.close(end)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _drain(self) -> None:
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self._reading, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if not self._take() or self._ending in ready:
                break
        with self._lock:
            os.close(self._reading)
            self._reading = -1
        os.close(self._ending)

    def _take(self) -> bool:
        """Move what is in the pipe to what is kept; False when nobody can write any more."""
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
