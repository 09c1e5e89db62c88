"""What a profile that is asked for answers; nothing of ranks is needed before a cell runs."""

from __future__ import annotations

from typing import Any

from nbdist.session.profiler import ProfileOptions, SessionProfiler


def test_a_wish_that_takes_the_place_of_another_says_so() -> None:
    no_gang: Any = None
    profiler = SessionProfiler(no_gang)
    first = profiler.arm(ProfileOptions(steps=2))
    assert str(first).endswith("the result appears below it.")
    second = profiler.arm(ProfileOptions(steps=5))
    assert str(second).endswith("This replaces the profile requested before.")
    assert profiler.current_run is second
