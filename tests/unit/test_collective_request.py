"""A request to all ranks: its reports, its progress, and which error it raises."""

from __future__ import annotations

import pkgutil
from dataclasses import is_dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from nbdist.errors import CheckpointError
from nbdist.protocol import messages
from nbdist.protocol.operations import OPERATIONS, PULL_MODEL, PullModelRequest
from nbdist.session.collective_request import CollectiveRequest

REQUEST = PullModelRequest(name="model", folders=["payloads"])


class Ranks:
    """Ranks that answer at once, with these replies."""

    world_size = 2

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies, self.collective_request = replies, None
        self.content: dict[str, Any] = {}
        self.dropped: set[str] = set()

    def queue_request(
        self, ranks: Any, _channel: str, kind: str, content: dict[str, Any], route: Any
    ) -> str:
        assert kind == PULL_MODEL.message_type
        self.content = content
        self.collective_request.show_progress("writing, 40%")  # type: ignore[attr-defined]
        for rank, reply in zip(ranks, self.replies, strict=True):
            route(rank, "shell", {"content": reply, "header": {"date": datetime.now(UTC)}})
        return "request"

    def drop_requests(self, requests: set[str]) -> None:
        self.dropped |= set(requests)

    def wake(self) -> None:
        pass


def failed(error: str, ename: str = "CheckpointError") -> dict[str, Any]:
    return dict(messages.ErrorReply(status="error", error=error, ename=ename))


def test_the_reports_of_all_ranks_are_returned_and_progress_is_shown() -> None:
    shown: list[str] = []
    ranks = Ranks(*({"status": "ok", "report": {"path": f"/{rank}"}} for rank in range(2)))
    request = CollectiveRequest(ranks, PULL_MODEL, shown.append)  # type: ignore[arg-type]
    assert [report.path for report in request.run(REQUEST)] == ["/0", "/1"]
    assert ranks.content == {"name": "model", "folders": ["payloads"]}
    assert shown == ["writing, 40%"]
    assert ranks.dropped == {"request"}
    assert ranks.collective_request is None


def test_an_error_of_all_ranks_is_raised_once_and_needs_no_repair() -> None:
    ranks = Ranks(failed("no room."), failed("no room."))
    request = CollectiveRequest(ranks, PULL_MODEL, print)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"^no room\.$"):
        request.run(REQUEST)
    assert ranks.collective_request is None


def test_every_operation_has_a_function_on_the_ranks() -> None:
    assert len({operation.message_type for operation in OPERATIONS}) == len(OPERATIONS)
    for operation in OPERATIONS:
        assert callable(pkgutil.resolve_name(operation.function))
        assert is_dataclass(operation.request)
        assert is_dataclass(operation.report)
