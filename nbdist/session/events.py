"""What happened between steps of the training: marks on a curve; runs in the notebook's kernel."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

KEPT = 500


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that a reader of the curves should see."""

    step: int
    """The last that was reported before it."""
    kind: Literal["switch", "save", "load", "restart"]
    text: str
    time: float = field(default_factory=time.time)
    """Unix seconds."""


class Marks:
    """The last marks of a session; safe from any thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._marks: deque[Mark] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def add(self, mark: Mark) -> None:
        """Append one."""
        with self._lock:
            self._marks.append(mark)

    def begin_anew(self, mark: Mark) -> None:
        """Steps are counted from 0 again: what was marked before has no place any more."""
        with self._lock:
            self._marks.clear()
            self._marks.append(mark)

    def all(self) -> list[Mark]:
        """All of them, the oldest first."""
        with self._lock:
            return list(self._marks)
