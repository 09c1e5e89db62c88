"""Reads what this rank is doing: the stacks of its threads, and where its main thread is.

Called on the control thread while a cell runs. It costs training nothing: only frames, torch's own
counters and ``CollectiveBarrier.pending`` are read.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import psutil
from torch.distributed import distributed_c10d

from nbdist.protocol import messages
from nbdist.worker import collective_check
from nbdist.worker.operations.collective_phases import deferred_interrupts
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from nbdist.worker.collective_check import CollectiveBarrier

CellNamer = Callable[[str], tuple[str, str] | None]
"""IPython's `compile.format_code_name`: the name of a file -> ("Cell", "In[3]") for a cell's."""

ROUND_TO_S = 0.5
"""Times are rounded to this: ranks that wait at the same position then send equal replies, which
an agent deduplicates."""
_MAX_FRAMES = 60
"""Maximum frames per thread; a recursion has thousands."""
_SOURCE_CHARS = 120
_OUTERMOST_FILE = PurePath("nbdist", "worker", "main.py").parts
"""Frames outside this file belong to torch elastic and the launcher."""
_SERVICE_FILES = re.compile(
    r"/(?:threading|selectors|asyncio/\w+|(?:ipykernel|zmq|tornado|nbdist)/.*)\.py$"
)
"""A thread with only these files in its stack belongs to ipykernel or nbdist."""
_SLEEPING = (psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_IDLE)
LIBRARY_PATHS = ("<frozen", sysconfig.get_path("stdlib"), str(PurePath(__file__).parents[1]))
"""Beginnings of files that are not the user's, beside those in `_LIBRARY_FOLDERS`."""
_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries: of this environment, of a user, and of the system below it."""
_COLLECTIVES = PurePath("torch", "distributed", "distributed_c10d.py").parts
"""Last parts of the path of torch's module whose public functions are the collectives."""


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001


def frames_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_of(frame: FrameType) -> int:
    """Return the current line of a frame, or the first line of its function."""
    return frame.f_lineno or frame.f_code.co_firstlineno  # f_lineno may be None between lines


def format_stacks(cell_of: CellNamer) -> str:
    """Return the stack of every thread, main thread first and innermost frames first."""
    frames = sys._current_frames()  # noqa: SLF001 - there is no public API
    main, current = threading.main_thread(), threading.current_thread()
    threads = [thread for thread in threading.enumerate() if thread is not current]
    threads.sort(key=lambda thread: (thread is not main, thread.name))
    parts, service_threads = [], []
    for thread in threads:
        stack: list[traceback.FrameSummary] = []
        frame = frames.get(thread.ident or 0)
        extracted = traceback.extract_stack(frame, limit=-_MAX_FRAMES) if frame else ()
        for summary in reversed(extracted):
            stack.append(summary)
            if PurePath(summary.filename).parts[-len(_OUTERMOST_FILE) :] == _OUTERMOST_FILE:
                break
        if thread is not main and all(_SERVICE_FILES.search(summary.filename) for summary in stack):
            service_threads.append(thread.name)
            continue
        lines = [f"Thread {thread.name}:"]
        for summary in stack:
            cell = cell_of(summary.filename)
            place = cell[1] if cell else f'"{summary.filename}"'
            lines.append(f"  {place}, line {summary.lineno} in {summary.name}: {summary.line}")
        parts.append("\n".join(lines))
    if service_threads:
        parts.append(f"Threads of ipykernel and nbdist: {', '.join(service_threads)}")
    return "\n\n".join(parts)


def is_library_file(file: str) -> bool:
    """Return whether a file of code is a library's, Python's or nbdist's, not the user's."""
    return file.startswith(LIBRARY_PATHS) or not _LIBRARY_FOLDERS.isdisjoint(PurePath(file).parts)


def current_line_reply(
    cell_of: CellNamer, standing: messages.MainThreadStatus
) -> messages.RankActivityReply:
    """Return the user's line that the main thread is executing, and the collective it waits in.

    Args:
        standing: status of the main thread, part of the reply.
    """
    collective = called = script = ""
    for frame in frames_outwards(main_frame()):
        code = frame.f_code
        if (cell := cell_of(code.co_filename)) is not None:
            line = line_of(frame)
            source = linecache.getline(code.co_filename, line).strip()
            return messages.RankActivityReply(
                cell=cell[1],
                line=line,
                source=source[:_SOURCE_CHARS],
                script=script,
                called=called,
                collective=collective,
                standing=standing,
            )
        if not script and not is_library_file(code.co_filename):
            script = f"{PurePath(code.co_filename).name} line {line_of(frame)}"
        if not code.co_name.startswith("_"):
            called = code.co_name
        in_torch = PurePath(code.co_filename).parts[-len(_COLLECTIVES) :] == _COLLECTIVES
        if in_torch and not code.co_name.startswith(("_", "get_", "is_")):
            collective = code.co_name  # the last one found is the outermost, which the user called
    return messages.RankActivityReply(
        cell="", line=0, source="", script="", called="", collective=collective, standing=standing
    )


class MainThreadMonitor:
    """Monitor of the main thread that compares successive samples."""

    def __init__(self, barrier: CollectiveBarrier | None) -> None:
        """Create a monitor; GPU ranks (NCCL) have no barrier, so it is None there."""
        self._barrier = barrier
        self._position: object = None
        self._since = time.monotonic()

    def sample(self) -> messages.MainThreadStatus:
        """Return the status of the main thread."""
        now = time.monotonic()
        groups: list[tuple[Any, str]] = list(distributed_c10d._world.pg_names.items())  # noqa: SLF001
        # collectives that each group has started
        counts = {name: group._get_sequence_number_for_group() for group, name in groups}  # noqa: SLF001
        # A rank that waits in the barrier stands still, although the barrier itself runs.
        frames = [
            (id(frame.f_code), frame.f_lasti)
            for frame in frames_outwards(main_frame())
            if frame.f_code.co_filename != collective_check.__file__
        ]
        position = (frames, counts)
        if position != self._position:
            self._position, self._since = position, now
        pending = self._barrier.pending if self._barrier is not None else None
        return messages.MainThreadStatus(
            waits_for=pending.description if pending else "",
            missing=list(pending.missing_ranks) if pending else [],
            still_s=(now - (pending.since if pending else self._since)) // ROUND_TO_S * ROUND_TO_S,
            sleeps=psutil.Process().status() in _SLEEPING,  # Linux: that of the main thread
            failed=deferred_interrupts.failed,
            counts=counts,
            midway=prepared_models.interrupted_pass(),
        )
