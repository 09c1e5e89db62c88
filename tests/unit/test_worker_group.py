"""How long the notebook waits for ranks that do something long."""

from __future__ import annotations

from queue import Empty
from typing import Any

import pytest

from nbdist import SessionError
from nbdist.protocol import messages, operations
from nbdist.session import worker_group
from tests.session_internals import silent_workers

next_reply = worker_group.WorkerGroup._next_reply

DONE = (0, "shell", {"content": {"status": "ok"}})


class Ranks:
    """Time passes only while they are waited for; they say a word every 100 s, then answer."""

    def __init__(self, asked: worker_group.WorkerGroup, *, words: int, answer: bool) -> None:
        self.now = 0.0
        self._asked, self._words, self._answer = asked, words, answer

    def monotonic(self) -> float:
        return self.now

    def get(self, timeout: float) -> Any:
        if self._answer and not self._words:
            return DONE
        self.now += timeout
        if self._words and self.now % 100 == 0:
            self._words -= 1
            header = {"msg_type": messages.PROGRESS}
            message = {"header": header, "parent_header": {}, "content": {}}
            self._asked.on_message((0,), "iopub", message)
        raise Empty


@pytest.fixture
def asked() -> worker_group.WorkerGroup:
    return silent_workers()


def test_a_request_may_last_while_ranks_say_how_far_it_is(
    asked: worker_group.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(asked, words=30, answer=True)
    monkeypatch.setattr(worker_group.time, "monotonic", ranks.monotonic)
    assert (
        next_reply(asked, ranks, operations.EXPORT.message_type, worker_group.REQUEST_TIMEOUT_S)
        == DONE
    )
    assert ranks.now == 3000


def test_a_request_without_further_messages_fails(
    asked: worker_group.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(asked, words=3, answer=False)
    monkeypatch.setattr(worker_group.time, "monotonic", ranks.monotonic)
    with pytest.raises(SessionError, match=r"to nbdist_export_request for 600 s"):
        next_reply(asked, ranks, operations.EXPORT.message_type, worker_group.REQUEST_TIMEOUT_S)
    assert ranks.now == 300 + 600
