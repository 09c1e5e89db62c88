"""Where the ranks' code is while a cell runs; asked over the control channel, waited for never.

Runs in the notebook's kernel. A rank that cannot answer (its process is stopped) is asked again
after a while, so that questions do not pile up.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from nbdist.errors import SessionError
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.session.worker_group import Gang

GIVEN_UP_S = 10.0
"""A question without an answer for so long is asked again."""


class Whereabouts:
    """The last answers of the ranks."""

    def __init__(self, gang: Gang) -> None:
        """Ask nothing yet."""
        self._gang = gang
        self._asked: dict[int, tuple[str, float]] = {}
        self._open: dict[str, int] = {}
        """How many ranks have not answered a request."""
        self._answers: dict[int, messages.WhereReply] = {}
        self._silent_since: dict[int, float] = {}
        """By rank, when it was first asked what it has not answered."""
        self._lock = threading.Lock()

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask these ranks; returns at once."""
        now = time.monotonic()
        with self._lock, contextlib.suppress(SessionError):  # the ranks are just being ended
            wanted = [rank for rank in ranks if now - self._asked_at(rank) >= GIVEN_UP_S]
            for rank in wanted:
                self._settle(rank)
            if wanted:
                request = self._gang.post(wanted, "control", messages.WHERE, {}, self._take)
                self._asked.update(dict.fromkeys(wanted, (request, now)))
                self._silent_since = dict.fromkeys(wanted, now) | self._silent_since
                self._open[request] = len(wanted)
        self._gang.wake()

    def forget(self) -> None:
        """The cell has ended: what was answered holds no more, nor what is on its way."""
        with self._lock:
            self._gang.forget(self._open)
            self._open.clear()
            self._asked.clear()
            self._answers.clear()
            self._silent_since.clear()

    def now(self) -> dict[int, messages.WhereReply]:
        """The last answers, by rank."""
        with self._lock:
            return dict(self._answers)

    def silent(self) -> dict[int, float]:
        """For how many seconds ranks have left a question unanswered."""
        now = time.monotonic()
        with self._lock:
            return {rank: now - since for rank, since in self._silent_since.items()}

    def _take(self, rank: int, channel: Channel, message: Message) -> None:
        """Take an answer, on the reader thread; its `idle` on iopub is none."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            request, _ = self._asked.get(rank, ("", 0.0))
            if message["parent_header"].get("msg_id") != request:
                return  # of a cell that has ended since
            self._settle(rank)
            self._silent_since.pop(rank, None)
            if content.get("status") != "error":  # a rank that cannot say it is asked again
                self._answers[rank] = content

    def _asked_at(self, rank: int) -> float:
        """When a rank was asked what it has not answered."""
        return self._asked.get(rank, ("", -math.inf))[1]

    def _settle(self, rank: int) -> None:
        """Wait for a rank's answer no more."""
        request, _ = self._asked.pop(rank, ("", 0.0))
        if not request:
            return
        self._open[request] -= 1
        if not self._open[request]:
            del self._open[request]
            self._gang.forget([request])
