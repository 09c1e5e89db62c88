"""The Python stacks of all threads of this rank, as text.

Called on the control thread; reads frames and nothing else.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_MOST_FRAMES = 60
"""Of a thread; a recursion has thousands."""
_OUTSIDE = PurePath("nbdist", "worker", "main.py").parts
"""Frames outside of this file are torch elastic's and the launcher's."""
_SERVANTS = re.compile(
    r"/(?:threading|selectors|asyncio/\w+|(?:ipykernel|zmq|tornado|nbdist)/.*)\.py$"
)
"""A thread with nothing else in its stack is ipykernel's or nbdist's own."""


def text(cell_of: Callable[[str], tuple[str, str] | None]) -> str:
    """Every thread with its frames, the innermost first; the main thread first.

    Args:
        cell_of: IPython's `compile.format_code_name`: file of a cell's code -> ("Cell", "In[3]").
    """
    frames = sys._current_frames()  # noqa: SLF001 - threading has no other way
    main, own = threading.main_thread(), threading.current_thread()
    threads = [thread for thread in threading.enumerate() if thread is not own]
    threads.sort(key=lambda thread: (thread is not main, thread.name))
    parts, servants = [], []
    for thread in threads:
        stack = _stack(frames.get(thread.ident or 0))
        if thread is main or not all(_SERVANTS.search(frame.filename) for frame in stack):
            lines = [_line(frame, cell_of(frame.filename)) for frame in stack]
            parts.append("\n".join([f"Thread {thread.name}:", *lines]))
        else:
            servants.append(thread.name)
    if servants:
        parts.append(f"Threads of ipykernel and nbdist: {', '.join(servants)}")
    return "\n\n".join(parts)


def _stack(frame: FrameType | None) -> list[traceback.FrameSummary]:
    """Frames, the innermost first, without those around a rank's whole life."""
    found: list[traceback.FrameSummary] = []
    for summary in reversed(traceback.extract_stack(frame, limit=-_MOST_FRAMES) if frame else ()):
        found.append(summary)
        if PurePath(summary.filename).parts[-len(_OUTSIDE) :] == _OUTSIDE:
            break
    return found


def _line(frame: traceback.FrameSummary, cell: tuple[str, str] | None) -> str:
    place = cell[1] if cell else f'"{frame.filename}"'
    return f"  {place}, line {frame.lineno} in {frame.name}: {frame.line}"
