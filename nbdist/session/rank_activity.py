"""Polls each rank for its current source line. Requests use the control channel and never block.

Runs in the notebook's kernel. A rank that cannot reply (its process is stopped) is polled again
after a timeout, so that requests do not pile up.
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
    from nbdist.session.worker_group import WorkerGroup

REPLY_TIMEOUT_S = 10.0
"""Timeout after which a request is sent again."""


class RankActivityPoller:
    """The last replies of the ranks."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._requests: dict[int, tuple[str, float]] = {}
        self._open: dict[str, int] = {}
        """Number of ranks that have not replied, by request."""
        self._answers: dict[int, messages.RankActivityReply] = {}
        self._silent_since: dict[int, float] = {}
        """Time of the first request without a reply, by rank."""
        self._lock = threading.Lock()

    def poll_ranks(self, ranks: Iterable[int]) -> None:
        """Poll these ranks; return immediately."""
        now = time.monotonic()
        with self._lock, contextlib.suppress(SessionError):  # the ranks may be ending
            wanted = [rank for rank in ranks if now - self._requested_at(rank) >= REPLY_TIMEOUT_S]
            for rank in wanted:
                self._settle(rank)
            if wanted:
                request = self._workers.queue_request(
                    wanted, "control", messages.RANK_ACTIVITY, {}, self._take
                )
                self._requests.update(dict.fromkeys(wanted, (request, now)))
                self._silent_since = dict.fromkeys(wanted, now) | self._silent_since
                self._open[request] = len(wanted)
        self._workers.wake()

    def clear(self) -> None:
        """Drop replies and pending requests, because the cell has ended."""
        with self._lock:
            self._workers.drop_requests(self._open)
            self._open.clear()
            self._requests.clear()
            self._answers.clear()
            self._silent_since.clear()

    def latest_replies(self) -> dict[int, messages.RankActivityReply]:
        """Return the last replies, by rank."""
        with self._lock:
            return dict(self._answers)

    def silent(self) -> dict[int, float]:
        """Return for how many seconds ranks have not replied."""
        now = time.monotonic()
        with self._lock:
            return {rank: now - since for rank, since in self._silent_since.items()}

    def _take(self, rank: int, channel: Channel, message: Message) -> None:
        """Store a reply, on the reader thread; ignore its `idle` status on iopub."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            request, _ = self._requests.get(rank, ("", 0.0))
            if message["parent_header"].get("msg_id") != request:
                return  # belongs to an earlier cell
            self._settle(rank)
            self._silent_since.pop(rank, None)
            if content.get("status") != "error":  # on errors the rank is polled again
                self._answers[rank] = content

    def _requested_at(self, rank: int) -> float:
        return self._requests.get(rank, ("", -math.inf))[1]

    def _settle(self, rank: int) -> None:
        """Drop the pending request of a rank."""
        request, _ = self._requests.pop(rank, ("", 0.0))
        if not request:
            return
        self._open[request] -= 1
        if not self._open[request]:
            del self._open[request]
            self._workers.drop_requests([request])
