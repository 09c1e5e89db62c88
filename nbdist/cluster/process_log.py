"""Log of a launcher and its ranks: a pipe that is read continuously into a bounded buffer.

Runs in the kernel. Output outside of cells (of torch's threads, C code, or a crashing process) goes
to file descriptors 1 and 2, which launcher and ranks inherit. A file would grow without bound, and
an unread pipe would block its writers after 64 KB.
"""

from __future__ import annotations

import os
import select
import threading

MAX_LOG_BYTES = 2_000_000
_CHUNK = 1 << 16
_CHUNKS = 64
"""Chunks per read; a Linux pipe holds no more, so a flood does not keep the lock for long."""
_CLOSE_S = 5.0


class ProcessLog:
    """Keeps the end of the output written to `write_fd`."""

    def __init__(self, *, limit: int = MAX_LOG_BYTES) -> None:
        """Open the pipe and start to read it on a thread."""
        self._limit = limit
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._reading, self.write_fd = os.pipe()
        self._ending, self._end = os.pipe()
        os.set_blocking(self._reading, False)
        self._thread = threading.Thread(target=self._drain, name="nbdist-log", daemon=True)
        self._thread.start()

    def close_write_end(self) -> None:
        """Close `write_fd` in this process; the processes that inherited it keep it open."""
        os.close(self.write_fd)

    def tail(self, max_bytes: int = MAX_LOG_BYTES) -> str:
        """Return the end of the output so far, limited to `max_bytes`."""
        self._take()
        with self._lock:
            last = bytes(self._kept[-min(max_bytes, self._limit) :])
        return last.decode(errors="replace")

    def close(self) -> None:
        """End the thread even if the pipe still has writers; `tail` keeps working."""
        end, self._end = self._end, -1
        if end < 0:
            return
        os.close(end)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _drain(self) -> None:
        poll = select.poll()  # select() supports no descriptor above 1023
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
