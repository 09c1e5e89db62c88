"""Questions answered in a forked child."""

from __future__ import annotations

import threading
import time

import torch

from nbdist.worker.engines import auto_strategy


def test_an_answer_comes_back_as_json_has_it() -> None:
    assert auto_strategy.call_in_fork(lambda: (1, {"a": [2.5, None]}), within_s=20) == [
        1,
        {"a": [2.5, None]},
    ]


def test_nothing_of_this_process_changes() -> None:
    before = torch.random.get_rng_state()
    seen: list[int] = []

    def question() -> float:
        seen.append(1)
        return torch.rand(1).item()

    assert auto_strategy.call_in_fork(question, within_s=20) is not None
    assert seen == []
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_cannot_be_answered_is_none() -> None:
    assert auto_strategy.call_in_fork(lambda: 1 / 0, within_s=20) is None
    assert auto_strategy.call_in_fork(object, within_s=20) is None


def test_a_child_that_takes_too_long_is_ended() -> None:
    begin = time.monotonic()
    assert auto_strategy.call_in_fork(lambda: threading.Event().wait(), within_s=0.2) is None
    assert time.monotonic() - begin < 10
