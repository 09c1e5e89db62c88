"""On which line of a cell the main thread is, looked at every few milliseconds; on a rank.

Time outside of passes through the model belongs to the line: code of the cell, and whatever
library it calls. Runs in a thread of its own, in a window alone.
"""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.profiler.measurements import Line
from nbdist.worker.interrupt import current_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from nbdist.worker.profiling.instrumentation import Marks

EVERY_S = 0.01
MOST_LINES = 12
SOURCE_CHARS = 120
_PASSES = frozenset({"forward", "backward", "optimizer", "data", "offload"})
"""Parts of their own: the line is not told."""

Place = tuple[str, str, int]
"""Cell, file, line."""


class Sampler:
    """Looks at the main thread."""

    def __init__(self, marks: Marks, cell_of: Callable[[str], tuple[str, str] | None]) -> None:
        """Look by these marks; `cell_of` is IPython's `compile.format_code_name`."""
        self._marks, self._cell_of = marks, cell_of
        self._main = threading.main_thread()
        self._seconds: dict[Place, float] = defaultdict(float)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="nbdist-profile", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def restart(self) -> None:
        """Forget what was seen so far."""
        self._seconds.clear()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def seconds(self) -> dict[Place, float]:
        """By line so far."""
        return dict(self._seconds)

    def _look(self) -> None:
        then = time.perf_counter()
        while not self._ended.wait(EVERY_S):
            now = time.perf_counter()
            if self._marks.now_at not in _PASSES:
                frame = sys._current_frames().get(self._main.ident or 0)  # noqa: SLF001
                if (place := place_of(frame, self._cell_of)) is not None:
                    self._seconds[place] += now - then
            then = now


def lines(seconds: Mapping[Place, float], steps: int) -> list[Line]:
    """Those that took the longest, in seconds of a step."""
    longest = sorted(seconds.items(), key=lambda pair: -pair[1])[:MOST_LINES]
    return [
        Line(cell=cell, line=line, source=source(file, line), seconds=spent / max(1, steps))
        for (cell, file, line), spent in longest
    ]


def place_of(
    frame: FrameType | None, cell_of: Callable[[str], tuple[str, str] | None]
) -> Place | None:
    """Cell, file and line of the innermost frame that is a cell's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if (cell := cell_of(name)) is not None:
            return cell[1], name, current_line.line_of(frame)
        frame = frame.f_back
    return None


def source(file: str, line: int) -> str:
    """Text of a line of a cell."""
    return linecache.getline(file, line).strip()[:SOURCE_CHARS]
