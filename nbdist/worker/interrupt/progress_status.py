"""Whether this rank gets on: how long it has been at one place, and what it waits for.

Looked at on the control thread while a cell runs. Training pays nothing for it: the counters
are torch's own, and the collective that is waited for stands in `Meeting.waiting`.
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
from nbdist.worker.interrupt.interrupt_flag import stops
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from nbdist.worker.collective_check import Meeting

STEP_S = 0.5
"""Times are told in these steps: ranks that wait at one place then answer the same, which an agent
passes on once."""


class Standing:
    """What successive looks at the main thread tell."""

    def __init__(self, meeting: Meeting | None) -> None:
        """Look at a rank whose collectives meet first, or do not (NCCL)."""
        self._meeting = meeting
        self._main = threading.main_thread().ident or 0
        self._place: object = None
        self._since = time.monotonic()

    def look(self) -> messages.Standing:
        """Say how the main thread stands now."""
        now, counts = time.monotonic(), group_counts()
        place = (self._frames(), tuple(counts.items()))
        if place != self._place:
            self._place, self._since = place, now
        waiting = self._meeting.waiting if self._meeting is not None else None
        return messages.Standing(
            waits_for=waiting.words if waiting else "",
            missing=list(waiting.missing) if waiting else [],
            still_s=(now - (waiting.since if waiting else self._since)) // STEP_S * STEP_S,
            sleeps=_sleeps(),
            failed=stops.failed,
            counts=counts,
            midway=prepared_models.midway(),
        )

    def _frames(self) -> tuple[tuple[int, int], ...]:
        """Where each function of the main thread is, our own waiting left out."""
        found = []
        frame = sys._current_frames().get(self._main)  # noqa: SLF001
        while frame is not None:
            if frame.f_code.co_filename != _OWN_FILE:
                found.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return tuple(found)


_OWN_FILE = collective_check.__file__
_STATE = re.compile(r"\) ([A-Z])")
"""After the name of a process, which may hold anything but stands in parentheses."""


def _sleeps() -> bool:
    """Whether the main thread sleeps now; Linux gives it the number of its process."""
    with contextlib.suppress(OSError):  # no /proc: macOS
        text = Path(f"/proc/self/task/{os.getpid()}/stat").read_text(errors="replace")
        found = _STATE.findall(text)
        return bool(found) and found[-1] in "SDI"
    return False


def group_counts() -> dict[str, int]:
    """Collectives that have begun, by name of the process group; of the groups of this rank."""
    known: list[tuple[Any, str]] = list(distributed_c10d._world.pg_names.items())  # noqa: SLF001
    return {name: group._get_sequence_number_for_group() for group, name in known}  # noqa: SLF001
