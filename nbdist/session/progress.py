"""What a session does beside cells, for whoever shows it; runs in the notebook's kernel.

`StatusLine` is the text face of long work. It also tells the `Activity` of the session that
works on its thread, which the panel looks at.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["starting", "switching", "saving", "loading", "exporting", "planning", "calibrating"]

_SHARE = re.compile(r"(\d{1,3})\s?%$")
_TITLE = "nbdist: "
"""Begins a line below a cell, where it tells whose it is."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one long work is."""

    kind: Kind
    text: str
    since: float
    """Unix seconds."""
    share: float | None = None
    """Done, from 0 to 1, where the work tells it."""


class Activity:
    """The long work of one session. Written by the thread that works, read by any."""

    def __init__(self) -> None:
        """Do nothing yet."""
        self._works: list[Progress] = []
        self._lock = threading.Lock()

    @property
    def now(self) -> Progress | None:
        """The work that goes on, the outermost one's kind with the newest words."""
        with self._lock:
            if not self._works:
                return None
            return replace(self._works[-1], kind=self._works[0].kind, since=self._works[0].since)

    @contextlib.contextmanager
    def doing(self, kind: Kind, text: str) -> Iterator[None]:
        """Something long; `StatusLine`s made meanwhile on this thread tell of it."""
        with self._lock:
            self._works.append(Progress(kind, text, time.time()))
        token = _heard_by.set(self)
        try:
            yield
        finally:
            _heard_by.reset(token)
            with self._lock:
                self._works.pop()

    def say(self, text: str) -> None:
        """Take the newest words of the work that goes on; from any thread."""
        with self._lock:
            if self._works:
                self._works[-1] = replace(
                    self._works[-1], text=text.removeprefix(_TITLE), share=share_in(text)
                )


def share_in(text: str) -> float | None:
    """The share that is done, where the words end with it: "writing, 42%"."""
    found = _SHARE.search(text)
    return min(int(found[1]) / 100, 1.0) if found else None


_heard_by: ContextVar[Activity | None] = ContextVar("_heard_by", default=None)
_shown: ContextVar[bool] = ContextVar("_shown", default=True)


def listener() -> Activity | None:
    """Whose work this thread does."""
    return _heard_by.get()


def shown() -> bool:
    """Whether a line below the cell tells of this thread's work."""
    return _shown.get()


@contextlib.contextmanager
def without_lines() -> Iterator[None]:
    """Work that was not asked for by a cell: no line appears below whichever cell runs."""
    token = _shown.set(False)
    try:
        yield
    finally:
        _shown.reset(token)
