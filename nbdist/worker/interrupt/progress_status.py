"""Reports whether this rank makes progress: time at one position and what it waits for.

Called on the control thread while a cell runs. It costs training nothing: the counters are
torch's own, and the pending collective is ``CollectiveBarrier.pending``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from nbdist.protocol import messages
from nbdist.worker import collective_check
from nbdist.worker.interrupt.interrupt_flag import interrupt_flag
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from nbdist.worker.collective_check import CollectiveBarrier

ROUND_TO_S = 0.5
"""Times are rounded to this: ranks that wait at the same position then send equal replies, which
an agent deduplicates."""


class MainThreadMonitor:
    """Monitor of the main thread that compares successive samples."""

    def __init__(self, barrier: CollectiveBarrier | None) -> None:
        """Create a monitor; GPU ranks (NCCL) have no barrier, so it is None there."""
        self._meeting = barrier
        self._main = threading.main_thread().ident or 0
        self._place: object = None
        self._since = time.monotonic()

    def sample(self) -> messages.MainThreadStatus:
        """Return the status of the main thread."""
        now, counts = time.monotonic(), collective_counts()
        place = (self._frames(), tuple(counts.items()))
        if place != self._place:
            self._place, self._since = place, now
        waiting = self._meeting.pending if self._meeting is not None else None
        return messages.MainThreadStatus(
            waits_for=waiting.description if waiting else "",
            missing=list(waiting.missing_ranks) if waiting else [],
            still_s=(now - (waiting.since if waiting else self._since)) // ROUND_TO_S * ROUND_TO_S,
            sleeps=_sleeps(),
            failed=interrupt_flag.failed,
            counts=counts,
            midway=prepared_models.interrupted_pass(),
        )

    def _frames(self) -> tuple[tuple[int, int], ...]:
        """Return the position in each frame of the main thread, except the barrier's frames."""
        positions = []
        frame = sys._current_frames().get(self._main)  # noqa: SLF001
        while frame is not None:
            if frame.f_code.co_filename != _OWN_FILE:
                positions.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return tuple(positions)


_OWN_FILE = collective_check.__file__
_STATE = re.compile(r"\) ([A-Z])")
"""Process state after the name, which is in parentheses and may contain any character."""


def _sleeps() -> bool:
    """Return whether the main thread is sleeping; its thread id on Linux is the pid."""
    with contextlib.suppress(OSError):  # no /proc on macOS
        text = Path(f"/proc/self/task/{os.getpid()}/stat").read_text(errors="replace")
        states = _STATE.findall(text)
        return bool(states) and states[-1] in "SDI"
    return False


def collective_counts() -> dict[str, int]:
    """Return the number of started collectives by name of this rank's process groups."""
    groups: list[tuple[Any, str]] = list(distributed_c10d._world.pg_names.items())  # noqa: SLF001
    return {name: group._get_sequence_number_for_group() for group, name in groups}  # noqa: SLF001
