"""Finds the user's line that the main thread is executing, and the collective it waits in.

Called on the control thread while a cell runs. It only reads frames, which costs training
nothing.
"""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import PurePath
from typing import TYPE_CHECKING

from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_COLLECTIVES = PurePath("torch", "distributed", "distributed_c10d.py").parts
"""Last parts of the path of torch's module whose public functions are the collectives."""
_SOURCE_CHARS = 120


def current_line_reply(
    cell_of: Callable[[str], tuple[str, str] | None], standing: messages.MainThreadStatus
) -> messages.RankActivityReply:
    """Return the position of the main thread.

    Args:
        cell_of: IPython's `compile.format_code_name`: file of a cell's code -> ("Cell", "In[3]").
        standing: status of the main thread, part of the reply.
    """
    collective = called = ""
    for frame in _outwards(_main_frame()):
        code = frame.f_code
        if (cell := cell_of(code.co_filename)) is not None:
            line = line_of(frame)
            source = linecache.getline(code.co_filename, line).strip()
            return messages.RankActivityReply(
                cell=cell[1],
                line=line,
                source=source[:_SOURCE_CHARS],
                called=called,
                collective=collective,
                standing=standing,
            )
        if not code.co_name.startswith("_"):
            called = code.co_name
        if _is_collective(frame):
            collective = code.co_name  # the last one found is the outermost, which the user called
    return messages.RankActivityReply(
        cell="", line=0, source="", called="", collective=collective, standing=standing
    )


def line_of(frame: FrameType) -> int:
    """Return the current line of a frame, or the first line of its function."""
    return frame.f_lineno or frame.f_code.co_firstlineno  # f_lineno may be None between lines


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_collective(frame: FrameType) -> bool:
    code = frame.f_code
    in_torch = PurePath(code.co_filename).parts[-len(_COLLECTIVES) :] == _COLLECTIVES
    return in_torch and not code.co_name.startswith(("_", "get_", "is_"))
