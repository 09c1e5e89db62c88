"""Queries rank 0 for its prepared model while a cell is running; never blocks.

Runs in the notebook's kernel. A cell that prepares a model often trains it for hours; the panel
shows the prediction during that time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import SessionError
from nbdist.protocol import messages

if TYPE_CHECKING:
    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.session.worker_group import WorkerGroup

REPLY_TIMEOUT_S = 30.0
"""Timeout after which a request is sent again."""


class PreparedModelQuery:
    """One pending request at a time, and its reply."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._request = ""
        self._requested_at = 0.0
        self._answer: messages.ModelReply | None = None
        self._lock = threading.Lock()

    def send_request(self, kind: Literal["cuda", "cpu"]) -> None:
        """Request the closed form of the model prepared last; return immediately."""
        content = messages.ModelRequest(
            name=None, batch_size=None, seq_len=None, kind=kind, quick=True
        )
        with self._lock, contextlib.suppress(SessionError):  # the ranks may be ending
            if self._request and time.monotonic() - self._requested_at < REPLY_TIMEOUT_S:
                return
            self._workers.drop_requests([self._request])
            self._request = self._workers.queue_request(
                (0,), "control", messages.MODEL, content, self._take
            )
            self._requested_at = time.monotonic()
        self._workers.wake()

    def poll_reply(self) -> messages.ModelReply | None:
        """Return the reply if a new one has arrived, else None."""
        with self._lock:
            answer, self._answer = self._answer, None
        return answer

    def _take(self, _rank: int, channel: Channel, message: Message) -> None:
        """Store the reply, on the reader thread; ignore its `idle` status on iopub."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            self._workers.drop_requests([self._request])
            self._request, self._answer = "", content
