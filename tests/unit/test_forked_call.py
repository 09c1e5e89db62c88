"""Work done in a forked child."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch.utils.data import DataLoader

from nbdist.planner.tracing.trace_module import call_in_fork


def test_a_loader_may_have_workers() -> None:
    loader = DataLoader([7], num_workers=1)  # type: ignore[arg-type]
    assert call_in_fork(lambda _: {"first": next(iter(loader)).item()}) == {"first": 7}


def test_what_fails_gives_its_reason() -> None:
    assert "ZeroDivisionError" in call_in_fork(lambda _: {"a": 1 / 0})["error"]
    assert "died" in call_in_fork(lambda _: {"a": object()})["error"]


def test_a_child_that_takes_too_long_is_ended() -> None:
    begin = time.monotonic()

    def work(_: Any) -> dict[str, Any]:
        threading.Event().wait()
        return {}

    assert "Timeout" in call_in_fork(work, timeout_s=0.2)["error"]
    assert time.monotonic() - begin < 10
