"""Deadlines as users write them."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import psutil
import pytest

from nbdist import OptionError
from nbdist.session.save_on_termination import parse_deadline


@pytest.mark.parametrize("text", ["90h30m", "90h 30m", "90H30M", "90.5h"])
def test_a_duration_counts_from_the_start_of_the_kernel(text: str) -> None:
    assert parse_deadline(text) == pytest.approx(psutil.Process().create_time() + 90.5 * 3600)


def test_a_clock_time_is_the_next_one() -> None:
    before = datetime.now().astimezone() - timedelta(minutes=2)
    at = datetime.fromtimestamp(parse_deadline(f"{before:%H:%M}")).astimezone()
    assert at - before > timedelta(hours=22)
    assert f"{at:%H:%M}" == f"{before:%H:%M}"


def test_a_date_and_a_unix_time_are_taken_as_they_are() -> None:
    later = int(time.time()) + 5000
    assert parse_deadline(str(later)) == parse_deadline(later) == later
    assert parse_deadline(datetime.fromtimestamp(later).astimezone().isoformat()) == later


@pytest.mark.parametrize("text", ["2020-01-01T10:00", "1000000000", "0s"])
def test_a_deadline_in_the_past_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=f"The deadline {text} is in the past"):
        parse_deadline(text)


@pytest.mark.parametrize("text", ["", "soon", "8 hours", "25:00", "9" * 30])
def test_anything_else_says_what_is_allowed(text: str) -> None:
    with pytest.raises(OptionError, match="such as 8h50m"):
        parse_deadline(text)
