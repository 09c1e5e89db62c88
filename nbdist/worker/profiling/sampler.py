"""Samples the current line of the cell on the main thread every 10 ms while a profile is recorded.

Time outside of forward, backward and the other phases is attributed to the line, including the
library code it calls. Runs in a separate thread.
"""

from __future__ import annotations

import linecache
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.profiler.measurements import LineProfile
from nbdist.worker import stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from nbdist.worker.profiling.instrumentation import PhaseSpans

SAMPLE_INTERVAL_S = 0.01
MAX_LINES = 12
SOURCE_CHARS = 120
_PASSES = frozenset({"forward", "backward", "optimizer", "data", "offload"})
"""Phases that are not attributed to a line."""

CellLine = tuple[str, str, int]
"""Cell, file, line."""


class LineSampler:
    """Samples the main thread.

    Args:
        marks: time spans, which tell the current phase.
        cell_of: IPython's `compile.format_code_name`.
    """

    def __init__(self, marks: PhaseSpans, cell_of: Callable[[str], tuple[str, str] | None]) -> None:
        self._marks, self._cell_of = marks, cell_of
        self._seconds: dict[CellLine, float] = defaultdict(float)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="nbdist-profile", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def restart(self) -> None:
        """Clear the samples."""
        self._seconds.clear()

    def stop(self) -> None:
        """Stop sampling and join the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def seconds_by_line(self) -> dict[CellLine, float]:
        """Seconds per line so far."""
        return dict(self._seconds)

    def _sample(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            now = time.perf_counter()
            if self._marks.current_phase not in _PASSES:
                place = cell_line_of(stacks.main_frame(), self._cell_of)
                if place is not None:
                    self._seconds[place] += now - last
            last = now


def slowest_lines(seconds: Mapping[CellLine, float], steps: int) -> list[LineProfile]:
    """Return the lines with the most time, in seconds per step."""
    longest = sorted(seconds.items(), key=lambda pair: -pair[1])[:MAX_LINES]
    return [
        LineProfile(
            cell=cell, line=line, source=source_text(file, line), seconds=spent / max(1, steps)
        )
        for (cell, file, line), spent in longest
    ]


def cell_line_of(
    frame: FrameType | None, cell_of: Callable[[str], tuple[str, str] | None]
) -> CellLine | None:
    """Return cell, file and line of the innermost frame in a cell, if there is one."""
    for outer in stacks.frames_outwards(frame):
        name = outer.f_code.co_filename
        if (cell := cell_of(name)) is not None:
            return cell[1], name, stacks.line_of(outer)
    return None


def source_text(file: str, line: int) -> str:
    """Return the text of a line of a cell, at most 120 characters."""
    return linecache.getline(file, line).strip()[:SOURCE_CHARS]
