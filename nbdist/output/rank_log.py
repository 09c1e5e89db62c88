"""The last output of one rank, for `%nbdist log RANK` and for reports of dead ranks.

Runs in the notebook's kernel; fed by the renderer with everything, also with what is not
shown. Bounded: about a megabyte of text a rank, whatever it prints.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from nbdist.output.ansi import clean

LIMIT_CHARS = 1_000_000
_OPEN_CHARS = 20_000
_LAST_CHUNKS = 20
"""Looked at for the last line."""


class RankLog:
    """Last text of one rank; progress bars keep their last state only.

    Safe to read from another thread while the renderer appends.
    """

    def __init__(self, *, limit: int = LIMIT_CHARS) -> None:
        self._limit = limit
        self._chunks: deque[str] = deque()
        self._chars = 0
        self._open: dict[str, str] = {}
        self._lock = threading.Lock()
        self.written = 0
        """Characters that came, kept or not."""

    def append(self, text: str, *, name: str = "stdout") -> None:
        """Add text of a stream; each stream's line is kept whole."""
        body, newline, rest = text.rpartition("\n")
        with self._lock:
            self.written += len(text)
            if newline:
                head = self._open.pop(name, "")
                self._add(head + body[-self._limit :] + newline)
            kept = self._open.get(name, "") + rest[-_OPEN_CHARS:]
            if kept:
                self._open[name] = _overwritten(kept)[-_OPEN_CHARS:]

    def text(self) -> str:
        """Everything that is kept, oldest first."""
        with self._lock:
            return "".join([*self._chunks, *self._open.values()])

    def last_line(self) -> str:
        """The last line that is not empty; quick, whatever is kept."""
        with self._lock:
            ends = [*self._open.values(), *islice(reversed(self._chunks), _LAST_CHUNKS)]
        found = (line for text in ends for line in reversed(text.splitlines()) if line.strip())
        return next(found, "").strip()

    def tail(self, lines: int = 20) -> str:
        """Last lines, joined with newlines."""
        kept = self.text().removesuffix("\n").split("\n")
        return "\n".join(kept[-lines:]) if lines > 0 else ""

    def _add(self, text: str) -> None:
        text = clean(text)
        if "\r" in text:
            text = "\n".join(_overwritten(line.rstrip("\r")) for line in text.split("\n"))
        self._chunks.append(text)
        self._chars += len(text)
        while self._chars > self._limit and len(self._chunks) > 1:
            self._chars -= len(self._chunks.popleft())
        if self._chars > self._limit:
            self._chunks[0] = self._chunks[0][-self._limit :]
            self._chars = len(self._chunks[0])


def _overwritten(line: str) -> str:
    """Keep what a terminal shows of a line that carriage returns overwrite."""
    if "\r" not in line:
        return line
    last = line.rstrip("\r").rpartition("\r")[2]
    return last + "\r" if line.endswith("\r") else last
