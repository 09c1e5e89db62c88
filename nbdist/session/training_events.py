"""Events between training steps, shown as marks on the curves; runs in the notebook's kernel."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

MAX_EVENTS = 500


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """An event to show on the curves."""

    step: int
    """Last step reported before the event."""
    kind: Literal["switch", "save", "load", "restart"]
    text: str
    time: float = field(default_factory=time.time)
    """Unix time in seconds."""


class TrainingEvents:
    """The last events of a session; thread-safe."""

    def __init__(self) -> None:
        self._marks: deque[TrainingEvent] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()

    def add(self, mark: TrainingEvent) -> None:
        """Append an event."""
        with self._lock:
            self._marks.append(mark)

    def reset(self, mark: TrainingEvent) -> None:
        """Drop all events and add `mark`: steps are counted from 0 again."""
        with self._lock:
            self._marks.clear()
            self._marks.append(mark)

    def to_list(self) -> list[TrainingEvent]:
        """Return the events, oldest first."""
        with self._lock:
            return list(self._marks)
