"""Whose turn it is to use the ranks: a cell's thread, or the one that runs the panel's commands.

A session's `turn` is a plain RLock: one thread has it at a time and may take it again. `with` on
it is safe against Stop, which may come between any two bytecodes: nothing of Python's own runs
between taking it and the block (CPython 3.11 to 3.14).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nbdist.errors import CellInterrupted, RankDied
from nbdist.output.status_line import StatusLine
from nbdist.session import progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.session.progress import Activity

_M = TypeVar("_M", bound="Callable[..., Any]")


def in_turn(method: _M) -> _M:
    """Let a method of a session run while no other thread has its `turn`.

    Stop ends the waiting. This is for what begins or ends ranks; what uses them has
    `in_turn_on_these_ranks`.
    """

    @functools.wraps(method)
    def alone(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        tell_of_waiting(self.activity)
        with self.turn:
            return method(self, *args, **kwargs)

    return cast("_M", alone)


def in_turn_on_these_ranks(method: _M) -> _M:
    """As `in_turn`, for what was meant for the ranks of this moment.

    A restart ends what runs, and so also what waits for its turn: who gets the turn first would
    be chance, and a cell that waited would go on with new ranks that know none of its variables.

    Raises:
        RankDied: the ranks were restarted before its turn came.
        CellInterrupted: Stop has ended the ranks; there are new ones.
    """

    @functools.wraps(method)
    def alone(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        restarts = self.restarts
        tell_of_waiting(self.activity)
        with self.turn:
            if self.restarts != restarts:
                raise RankDied(
                    "The ranks were restarted while this waited for its turn; it was not done, and"
                    " the old ranks' variables are gone."
                )
            try:
                return method(self, *args, **kwargs)
            except RankDied:
                if not (said := self.replace_stopped_ranks()):
                    raise
                msg = f"{said} Their variables are gone."
                raise CellInterrupted(msg) from None

    return cast("_M", alone)


def tell_of_waiting(activity: Activity, more: str = "") -> None:
    """Say below the cell what another thread does, which has to end first."""
    work = activity.now
    if work is not None and progress.listener() is not activity:
        with StatusLine() as line:
            line.show(f"nbdist: waiting for what the panel was asked for: {work.text}{more}")
