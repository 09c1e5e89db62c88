"""A rank answers whatever it is asked, also where the work fails."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from nbdist.errors import PayloadError
from nbdist.worker.kernel import reply_to

if TYPE_CHECKING:
    from collections.abc import Callable


def raising(error: BaseException) -> Callable[[object], object]:
    def work(_: object) -> object:
        raise error

    return work


def test_what_the_work_returns_is_the_reply() -> None:
    assert reply_to(lambda asked: {"status": "ok", "asked": asked}, 3)["asked"] == 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PayloadError("two\nlines."), "two\nlines."),
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "interrupted before it finished"),
        (OSError(28, "No space left on device", "/x"), "No space left on device (ENOSPC) at /x"),
    ],
)
def test_any_error_is_a_reply(error: BaseException, words: str) -> None:
    reply = reply_to(raising(error), None)
    assert reply["status"] == "error"
    assert reply["error"].startswith(words)
    assert reply["ename"] == type(error).__name__


def test_what_was_not_raised_on_purpose_is_logged_in_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        reply_to(raising(PayloadError("refused")), None)
        assert not caplog.records
        reply_to(raising(ValueError("odd")), None)
    assert caplog.records[0].exc_info is not None
