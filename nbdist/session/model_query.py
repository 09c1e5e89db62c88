"""What rank 0 has prepared, asked while its cell runs; waited for never.

Runs in the notebook's kernel. A cell that prepares a model often trains it for hours, and what
it will need is wanted then.
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
    from nbdist.session.worker_group import Gang

GIVEN_UP_S = 30.0
"""A question without an answer for so long is asked again."""


class Peek:
    """One question at a time, and its answer."""

    def __init__(self, gang: Gang) -> None:
        """Ask nothing yet."""
        self._gang = gang
        self._request = ""
        self._asked_at = 0.0
        self._answer: messages.ModelReply | None = None
        self._lock = threading.Lock()

    def ask(self, kind: Literal["cuda", "cpu"]) -> None:
        """Ask for the model that was prepared last, by its closed form; returns at once."""
        content = messages.ModelRequest(
            name=None, batch_size=None, seq_len=None, kind=kind, quick=True
        )
        with self._lock, contextlib.suppress(SessionError):  # the ranks are just being ended
            if self._request and time.monotonic() - self._asked_at < GIVEN_UP_S:
                return
            self._gang.forget([self._request])
            self._request = self._gang.post((0,), "control", messages.MODEL, content, self._take)
            self._asked_at = time.monotonic()
        self._gang.wake()

    def answer(self) -> messages.ModelReply | None:
        """What has come since it was looked at last."""
        with self._lock:
            answer, self._answer = self._answer, None
        return answer

    def _take(self, _rank: int, channel: Channel, message: Message) -> None:
        """Take the answer, on the reader thread; its `idle` on iopub is none."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            self._gang.forget([self._request])
            self._request, self._answer = "", content
