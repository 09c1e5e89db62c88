"""Polls ranks while a cell runs: for their current lines, and rank 0 for its prepared model.

Runs in the notebook's kernel. Requests use the control channel and never block. A rank that cannot
reply (its process is stopped) is polled again after a timeout, so that requests do not pile up.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from nbdist.errors import SessionError
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.session.worker_group import WorkerGroup

LINE_TIMEOUT_S = 10.0
"""Timeout after which a rank is asked for its line again."""
MODEL_TIMEOUT_S = 30.0
ReplyT = TypeVar("ReplyT")


class RankPoller(Generic[ReplyT]):
    """The last replies of ranks to one kind of request.

    Args:
        workers: the worker group.
        kind: message type of the request.
        timeout_s: timeout after which a request is sent again.
    """

    def __init__(self, workers: WorkerGroup, kind: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._workers, self._kind = workers, kind
        self._requests: dict[int, tuple[str, float]] = {}
        """Pending request and the time at which it was sent, by rank."""
        self._replies: dict[int, ReplyT] = {}
        self._silent_since: dict[int, float] = {}
        """Time of the first request without a reply, by rank."""
        self._lock = threading.Lock()

    def poll_ranks(self, ranks: Iterable[int], content: object = None) -> None:
        """Send the request to those of these ranks that have no pending one."""
        now = time.monotonic()
        with self._lock, contextlib.suppress(SessionError):  # the ranks may be ending
            ranks_to_poll = [
                rank
                for rank in ranks
                if now - self._requests.get(rank, ("", -math.inf))[1] >= self.timeout_s
            ]
            if ranks_to_poll:
                self._drop_requests(ranks_to_poll)
                request = self._workers.queue_request(
                    ranks_to_poll, "control", self._kind, content or {}, self._store_reply
                )
                self._requests.update(dict.fromkeys(ranks_to_poll, (request, now)))
                self._silent_since = dict.fromkeys(ranks_to_poll, now) | self._silent_since
        self._workers.wake()

    def clear(self) -> None:
        """Drop replies and pending requests, because the cell has ended."""
        with self._lock:
            self._drop_requests(list(self._requests))
            self._replies.clear()
            self._silent_since.clear()

    def latest_replies(self) -> dict[int, ReplyT]:
        """Return the last replies, by rank; without errors."""
        with self._lock:
            return dict(self._replies)

    def take_reply(self, rank: int) -> ReplyT | None:
        """Return and drop the last reply of a rank; None without a new one."""
        with self._lock:
            return self._replies.pop(rank, None)

    def silent(self) -> dict[int, float]:
        """Return for how many seconds ranks have not replied."""
        now = time.monotonic()
        with self._lock:
            return {rank: now - since for rank, since in self._silent_since.items()}

    def _store_reply(self, rank: int, channel: Channel, message: Message) -> None:
        """Store a reply, on the reader thread; ignore its `idle` status on iopub."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            if message["parent_header"].get("msg_id") != self._requests.get(rank, ("", 0.0))[0]:
                return  # belongs to an earlier cell
            self._drop_requests([rank])
            self._silent_since.pop(rank, None)
            if content.get("status") != "error":  # on errors the rank is polled again
                self._replies[rank] = content

    def _drop_requests(self, ranks: Iterable[int]) -> None:
        """Drop the pending requests of ranks, unless other ranks may still reply to them."""
        dropped = {self._requests.pop(rank)[0] for rank in ranks if rank in self._requests}
        pending = {request for request, _ in self._requests.values()}
        self._workers.drop_requests(dropped - pending)


class RankActivityPoller(RankPoller[messages.RankActivityReply]):
    """Polls ranks for the line that they execute."""

    def __init__(self, workers: WorkerGroup) -> None:
        super().__init__(workers, messages.RANK_ACTIVITY, LINE_TIMEOUT_S)


class PreparedModelPoller(RankPoller[messages.ModelReply]):
    """Polls rank 0 for the model prepared last: its cell often trains it for hours."""

    def __init__(self, workers: WorkerGroup) -> None:
        super().__init__(workers, messages.MODEL, MODEL_TIMEOUT_S)

    def send_request(self, kind: Literal["cuda", "cpu"]) -> None:
        """Request the closed form of the model; return immediately."""
        request = messages.ModelRequest(
            name=None, batch_size=None, seq_len=None, kind=kind, quick=True
        )
        self.poll_ranks([0], request)

    def poll_reply(self) -> messages.ModelReply | None:
        """Return the reply if a new one has arrived, else None."""
        return self.take_reply(0)
