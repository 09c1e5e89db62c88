"""Locking of the ranks between cells and the thread that runs the panel's commands.

A session's `lock` is a plain RLock. `with` on it is safe against KeyboardInterrupt, which may be
raised between any two bytecodes: no Python code runs between acquiring it and entering the block
(CPython 3.11 to 3.14).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nbdist.errors import CellInterrupted, RankDied
from nbdist.session.progress import StatusLine, current_operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.session.progress import CurrentOperation

_M = TypeVar("_M", bound="Callable[..., Any]")


def exclusive(method: _M) -> _M:
    """Run a session method while no other thread uses the ranks.

    For methods that start or end ranks; methods that use them have
    `exclusive_for_current_ranks`. An interrupt ends the wait.
    """

    @functools.wraps(method)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        show_wait_reason(self.operation)
        with self.lock:
            return method(self, *args, **kwargs)

    return cast("_M", wrapper)


def exclusive_for_current_ranks(method: _M) -> _M:
    """As `exclusive`, for methods that are meant for the current ranks.

    Without the check, a cell that waits during a restart would run on new ranks without its
    variables.

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
    if work is not None and current_operation() is not activity:
        with StatusLine() as line:
            line.show(f"nbdist: waiting for a command of the panel: {work.text}{details}")
