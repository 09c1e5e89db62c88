"""Formats the Python stacks of all threads of this rank.

Called on the control thread; only reads frames.
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
"""Maximum frames per thread; a recursion has thousands."""
_OUTSIDE = PurePath("nbdist", "worker", "main.py").parts
"""Frames outside this file belong to torch elastic and the launcher."""
_SERVANTS = re.compile(
    r"/(?:threading|selectors|asyncio/\w+|(?:ipykernel|zmq|tornado|nbdist)/.*)\.py$"
)
"""A thread with only these files in its stack belongs to ipykernel or nbdist."""


def format_stacks(cell_of: Callable[[str], tuple[str, str] | None]) -> str:
    """Return the stack of every thread, main thread first and innermost frames first.

    Args:
        cell_of: IPython's `compile.format_code_name`: file of a cell's code -> ("Cell", "In[3]").
    """
    frames = sys._current_frames()  # noqa: SLF001 - there is no public API
    main, current = threading.main_thread(), threading.current_thread()
    threads = [thread for thread in threading.enumerate() if thread is not current]
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
    """Return the frames, innermost first, up to the rank's main function."""
    stack: list[traceback.FrameSummary] = []
    for summary in reversed(traceback.extract_stack(frame, limit=-_MOST_FRAMES) if frame else ()):
        stack.append(summary)
        if PurePath(summary.filename).parts[-len(_OUTSIDE) :] == _OUTSIDE:
            break
    return stack


def _line(frame: traceback.FrameSummary, cell: tuple[str, str] | None) -> str:
    place = cell[1] if cell else f'"{frame.filename}"'
    return f"  {place}, line {frame.lineno} in {frame.name}: {frame.line}"
