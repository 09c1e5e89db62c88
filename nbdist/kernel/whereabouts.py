"""Where the ranks' code is while a cell runs; asked over the control channel, waited for never.

Runs in the notebook's kernel. A rank that cannot answer (its process is stopped) is asked again
after a while, so that questions do not pile up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from nbdist import wire
from nbdist.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.engines.channel import Channel, Message
    from nbdist.kernel.gang import Gang

GIVEN_UP_S = 10.0
"""A question without an answer for so long is asked again."""


class Whereabouts:
    """The last answers of the ranks."""

    def __init__(self, gang: Gang) -> None:
        """Ask nothing yet."""
        self._gang = gang
        self._asked: dict[int, tuple[str, float]] = {}
        self._answers: dict[int, wire.WhereReply] = {}
        self._lock = threading.Lock()

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask these ranks; returns at once."""
        now = time.monotonic()
        with self._lock, contextlib.suppress(SessionError):  # the ranks are just being ended
            for rank in ranks:
                request, asked_at = self._asked.get(rank, ("", 0.0))
                if request and now - asked_at < GIVEN_UP_S:
                    continue
                self._gang.forget([request])
                request = self._gang.post(rank, "control", wire.WHERE, {}, self._take)
                self._asked[rank] = request, now
        self._gang.wake()

    def forget(self) -> None:
        """The cell has ended: what was answered holds no more, nor what is on its way."""
        with self._lock:
            self._gang.forget([request for request, _ in self._asked.values()])
            self._asked.clear()
            self._answers.clear()

    def now(self) -> dict[int, wire.WhereReply]:
        """The last answers, by rank."""
        with self._lock:
            return dict(self._answers)

    def _take(self, rank: int, channel: Channel, message: Message) -> None:
        """Take an answer, on the reader thread; its `idle` on iopub is none."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            request, _ = self._asked.get(rank, ("", 0.0))
            if message["parent_header"].get("msg_id") != request:
                return  # of a cell that has ended since
            del self._asked[rank]
            self._gang.forget([request])
            if content.get("status") != "error":  # a rank that cannot say it is asked again
                self._answers[rank] = content
