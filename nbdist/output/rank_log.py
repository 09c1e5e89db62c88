"""Log of the last output of one rank, for `%nbdist log RANK` and for reports of dead ranks.

The renderer appends everything, including output that is not shown. The size is limited to about
a megabyte per rank.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

MAX_CHARS = 1_000_000
_OPEN_CHARS = 20_000
_LAST_CHUNKS = 20
"""Number of chunks that are searched for the last line."""


class RankLogTail:
    """The last text of one rank. Of a progress bar only the last state is kept.

    Safe to read from another thread while the renderer appends.
    """

    def __init__(self, *, limit: int = MAX_CHARS) -> None:
        self._limit = limit
        self._chunks: deque[str] = deque()
        self._chars = 0
        self._open: dict[str, str] = {}
        self._lock = threading.Lock()
        self.written = 0
        """Number of characters that were appended, kept or not."""

    def append(self, text: str, *, name: str = "stdout") -> None:
        """Append text of a stream. Lines of the two streams are not interleaved."""
        body, newline, rest = text.rpartition("\n")
        with self._lock:
            self.written += len(text)
            if newline:
                head = self._open.pop(name, "")
                lines = head + body[-self._limit :] + newline
                if "\r" in lines:
                    shown = (_overwritten(line.rstrip("\r")) for line in lines.split("\n"))
                    lines = "\n".join(shown)
                self._chunks.append(lines)
                self._chars += len(lines)
                while self._chars > self._limit and len(self._chunks) > 1:
                    self._chars -= len(self._chunks.popleft())
                if self._chars > self._limit:
                    self._chunks[0] = self._chunks[0][-self._limit :]
                    self._chars = len(self._chunks[0])
            open_line = self._open.get(name, "") + rest[-_OPEN_CHARS:]
            if open_line:
                self._open[name] = _overwritten(open_line)[-_OPEN_CHARS:]

    def text(self) -> str:
        """Return the kept text, oldest first."""
        with self._lock:
            return "".join([*self._chunks, *self._open.values()])

    def last_line(self) -> str:
        """Return the last line that is not empty, in constant time."""
        with self._lock:
            ends = [*self._open.values(), *islice(reversed(self._chunks), _LAST_CHUNKS)]
        lines = (line for text in ends for line in reversed(text.splitlines()) if line.strip())
        return next(lines, "").strip()

    def tail(self, lines: int = 20) -> str:
        """Return the last lines, joined with newlines."""
        all_lines = self.text().removesuffix("\n").split("\n")
        return "\n".join(all_lines[-lines:]) if lines > 0 else ""


def _overwritten(line: str) -> str:
    """Return what a terminal shows of a line that carriage returns overwrite."""
    if "\r" not in line:
        return line
    last = line.rstrip("\r").rpartition("\r")[2]
    return last + "\r" if line.endswith("\r") else last
