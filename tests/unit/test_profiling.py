"""What a profile that is asked for answers; nothing of ranks is needed before a cell runs."""

from __future__ import annotations

from typing import Any

from nbdist.session.profiler import Profiler, Wish


def test_a_wish_that_takes_the_place_of_another_says_so() -> None:
    no_gang: Any = None
    no_judge: Any = None
    profiler = Profiler(no_gang, no_judge)
    first = profiler.arm(Wish(steps=2))
    assert str(first).endswith("its verdict appears below it.")
    second = profiler.arm(Wish(steps=5))
    assert str(second).endswith("It takes the place of the profile that waited.")
    assert profiler.now is second
