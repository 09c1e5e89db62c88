"""Progress of long operations besides cells, and whose turn it is; runs in the notebook's kernel.

`StatusLine` shows it below the cell. It also updates the session's `CurrentOperation`, which the
panel reads.

Cells and the thread that runs the panel's commands take turns: methods that use the ranks are
`exclusive_for_current_ranks`; those that start or end ranks acquire the lock themselves. A
session's `lock` is a plain RLock. `with` on it is safe against KeyboardInterrupt, which may be
raised between any two bytecodes: no Python code runs between acquiring it and entering the block
(CPython 3.11 to 3.14).
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast
from uuid import uuid4

from nbdist.errors import CellInterrupted, RankDied
from nbdist.output.sink import running_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OperationKind = Literal[
    "starting", "switching", "saving", "loading", "exporting", "planning", "calibrating"
]

_M = TypeVar("_M", bound="Callable[..., Any]")
_SHARE = re.compile(r"(\d{1,3})\s?%$")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class OperationProgress:
    """Progress of one long operation."""

    kind: OperationKind
    text: str
    started_at: float
    """Unix time in seconds."""
    fraction_done: float | None = None
    """Progress from 0 to 1, or None if unknown."""


class CurrentOperation:
    """The long operations of one session; written by the working thread, read by any thread."""

    def __init__(self) -> None:
        self._works: list[OperationProgress] = []
        self._lock = threading.Lock()

    @property
    def progress(self) -> OperationProgress | None:
        """The current operation: the outermost kind with the newest text."""
        with self._lock:
            if not self._works:
                return None
            return replace(
                self._works[-1], kind=self._works[0].kind, started_at=self._works[0].started_at
            )

    @contextlib.contextmanager
    def track(self, kind: OperationKind, text: str) -> Iterator[None]:
        """Track an operation; `StatusLine`s created meanwhile on this thread update it."""
        with self._lock:
            self._works.append(OperationProgress(kind, text, time.time()))
        token = _operation.set(self)
        try:
            yield
        finally:
            _operation.reset(token)
            with self._lock:
                self._works.pop()

    def set_text(self, text: str) -> None:
        """Set the text of the current operation; callable from any thread."""
        with self._lock:
            if self._works:
                self._works[-1] = replace(
                    self._works[-1],
                    text=text,
                    fraction_done=parse_fraction_done(text),
                )


def parse_fraction_done(text: str) -> float | None:
    """Return the fraction at the end of a text: "writing, 42%"."""
    match = _SHARE.search(text)
    return min(int(match[1]) / 100, 1.0) if match else None


_operation: ContextVar[CurrentOperation | None] = ContextVar("_operation", default=None)
"""The operations of the session whose work this thread does."""
_shown: ContextVar[bool] = ContextVar("_shown", default=True)


@contextlib.contextmanager
def suppress_status_lines() -> Iterator[None]:
    """Suppress status lines for work that was not started by a cell."""
    token = _shown.set(False)
    try:
        yield
    finally:
        _shown.reset(token)


class StatusLine:
    """A line below a cell that is updated in place during a long operation.

    Args:
        title: precedes each text.

    Shows the last text given; without updatable displays, each text on its own line, unless only
    its numbers change. Operations that no cell started (a button of the panel) have no line; the
    panel shows them.
    """

    def __init__(self, title: str = "") -> None:
        self._title = f"{title}: " if title else ""
        self._screen = running_cell() if _shown.get() else None
        self._operation = _operation.get()
        self._display_id = f"nbdist-{uuid4().hex}"
        self._shown_text = ""

    def show(self, text: str) -> None:
        """Replace the text of the line, "nbdist: TITLE: TEXT"."""
        text = self._title + text
        if text == self._shown_text:
            return
        same = _NUMBER.sub("", text) == _NUMBER.sub("", self._shown_text)
        if self._screen is not None and (self._screen.can_update or not same):
            bundle, update = {"text/plain": f"nbdist: {text}"}, bool(self._shown_text)
            self._screen.display(bundle, {}, display_id=self._display_id, update=update)
        if self._operation is not None:
            self._operation.set_text(text)
        self._shown_text = text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.flush()


# -- turns


def exclusive_for_current_ranks(method: _M) -> _M:
    """Run a session method on the current ranks while no other thread uses them.

    Without the check, a cell that waits during a restart would run on new ranks without its
    variables. An interrupt ends the wait.

    Raises:
        RankDied: the ranks were restarted while waiting.
        CellInterrupted: an interrupt ended the ranks; new ones were started.
    """

    @functools.wraps(method)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        restarts = self.num_restarts
        show_wait_reason(self.operation)
        with self.lock:
            if self.num_restarts != restarts:
                raise RankDied(
                    "The ranks were restarted while this call waited for them. It was not run, and"
                    " variables of the old ranks are lost."
                )
            try:
                return method(self, *args, **kwargs)
            except RankDied:
                if not (replaced := self.replace_stopped_ranks()):
                    raise
                raise CellInterrupted(f"{replaced} Variables of the old ranks are lost.") from None

    return cast("_M", wrapper)


def show_wait_reason(activity: CurrentOperation, details: str = "") -> None:
    """Show below the cell which operation of another thread has to finish first."""
    work = activity.progress
    if work is not None and _operation.get() is not activity:
        with StatusLine() as line:
            line.show(f"waiting for a command of the panel: {work.text}{details}")
