"""On which line of a cell the main thread is, looked at every few milliseconds; on a rank.

Time outside of passes through the model belongs to the line: code of the cell, and whatever
library it calls. Runs in a thread of its own, in a window alone.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.profile.figures import Line
from nbdist.rank import where

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from nbdist.rank.profiling.marks import Marks

EVERY_S = 0.01
MOST_LINES = 12
SOURCE_CHARS = 120
_STATS_BYTES = 128
_PASSES = frozenset({"forward", "backward", "optimizer", "data", "offload"})
"""Parts of their own: the line is not told."""


class Sampler:
    """Looks at the main thread."""

    def __init__(self, marks: Marks, cell_of: Callable[[str], tuple[str, str] | None]) -> None:
        """Look by these marks; `cell_of` is IPython's `compile.format_code_name`."""
        self._marks, self._cell_of = marks, cell_of
        self._main = threading.main_thread()
        self._stats = _opened(f"/proc/self/task/{self._main.native_id}/schedstat")
        self._seconds: dict[tuple[str, str, int], float] = defaultdict(float)
        """By cell, file and line."""
        self.queued_s = 0.0
        """Outside of marks, the main thread could have run and another one did. Counted where no
        mark lies between two looks, which are far apart on a machine in use: it is the least."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="nbdist-profile", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def restart(self) -> None:
        """Forget what was seen so far."""
        self._seconds.clear()
        self.queued_s = 0.0

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._stats is not None:
            os.close(self._stats)
            self._stats = None

    def lines(self, steps: int) -> list[Line]:
        """Those that took the longest, in seconds of a step."""
        longest = sorted(self._seconds.items(), key=lambda pair: -pair[1])[:MOST_LINES]
        return [
            Line(cell=cell, line=line, source=source(file, line), seconds=spent / max(1, steps))
            for (cell, file, line), spent in longest
        ]

    def _look(self) -> None:
        then, queued = time.perf_counter(), self._queued()
        begun, was_at = self._marks.begun, self._marks.now_at
        while not self._ended.wait(EVERY_S):
            at = self._marks.now_at
            outside = not at and not was_at and self._marks.begun == begun
            begun, was_at = self._marks.begun, at
            now, waited = time.perf_counter(), self._queued()
            if at not in _PASSES:
                frame = sys._current_frames().get(self._main.ident or 0)  # noqa: SLF001
                if (place := place_of(frame, self._cell_of)) is not None:
                    self._seconds[place] += now - then
                if outside:
                    self.queued_s += waited - queued
            then, queued = now, waited

    def _queued(self) -> float:
        """Seconds for which the main thread has waited for a core, in all."""
        if self._stats is None:
            return 0.0
        return int(os.pread(self._stats, _STATS_BYTES, 0).split()[1]) * 1e-9


def _opened(path: str) -> int | None:
    """A file that is kept open: to open it again takes as long as all the rest of a look."""
    with contextlib.suppress(OSError):  # a system without the statistics
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def place_of(
    frame: FrameType | None, cell_of: Callable[[str], tuple[str, str] | None]
) -> tuple[str, str, int] | None:
    """Cell, file and line of the innermost frame that is a cell's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if (cell := cell_of(name)) is not None:
            return cell[1], name, where.line_of(frame)
        frame = frame.f_back
    return None


def source(file: str, line: int) -> str:
    """Text of a line of a cell."""
    return linecache.getline(file, line).strip()[:SOURCE_CHARS]
