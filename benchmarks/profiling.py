"""What a profile costs: steps inside its window, those after it, and how soon the verdict is there.

Each round runs a cell without a profile, one with a profile, and one without again, on the same
ranks, so that a slow moment of the machine meets all; steps are timed by the cell itself. The steps
after the window are compared with those at the same place of the other two cells.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from results import Row, middle, paired_ratio
from training import LOOP

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist import Session

ROUNDS = 9
RECORDED = 20
"""Steps of a window."""
STEPS = 60
"""Of a cell; those after the window are as many as those inside."""
VERDICT_S = 60.0
STEP_CELL = f"""
moments = []
for batch in itertools.islice(batches, {STEPS}):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    moments.append(time.time())
moments
"""


def measure() -> Iterator[Row]:
    """Rows about the steps of a profiled loop, and about the verdict."""
    inside, after, late, steps = [], [], [], []
    with nbdist.Session(nproc=2, precision="no") as session:
        session.run(LOOP.setup)
        for number in range(-1, ROUNDS):
            first = moments(session.run(STEP_CELL, output="none"))
            before = len(session.profiles)
            profiled = moments(session.run(STEP_CELL, output="none", profile={"steps": RECORDED}))
            begin, *_, end = newest(session, before).ranks[0].ends
            second = moments(session.run(STEP_CELL, output="none"))
            in_it = [seconds for at, seconds in at_ends(profiled) if begin < at <= end]
            # the first step after the window waits for the figures, the next one is counted
            behind = [seconds for at, seconds in at_ends(profiled) if at > end][3:]
            if number < 0:  # the first round warms up
                continue
            offs = [middle(gaps(ends)[-len(behind) :]) for ends in (first, second)]
            steps.append(statistics.fmean(offs))
            inside.append(middle(in_it))
            after.append(middle(behind))
            late.append(verdict_s(session))
    detail = f"a step takes {1000 * middle(steps):.1f} ms"
    yield Row(
        name="step inside a profile's window, against none",
        **paired_ratio(inside, steps),
        unit="x",
        limit=1.15,
        detail=detail,
    )
    yield Row(
        name="step of the same cell after the window, against none",
        **paired_ratio(after, steps),
        unit="x",
        limit=1.01,
        detail=detail,
    )
    yield Row(
        name="from the end of a profile's window to its verdict",
        value=middle(late),
        unit="s",
        limit=5,
        detail=f"with memory; at most {max(late):.1f} s",
    )


def moments(result: Any) -> list[float]:
    """When the steps of a cell ended, on rank 0."""
    return list(result.values[0])


def gaps(ends: Sequence[float]) -> list[float]:
    """Seconds of each step but the first."""
    return [seconds for _, seconds in at_ends(ends)]


def at_ends(ends: Sequence[float]) -> list[tuple[float, float]]:
    """End and seconds of each step but the first."""
    return [(then, then - now) for now, then in pairwise(ends)]


def verdict_s(session: Session) -> float:
    """Seconds from the end of a window to the verdict, while the loop goes on."""
    before = len(session.profiles)
    session.run(STEP_CELL, output="none", background=True, profile={"steps": RECORDED})
    ends = newest(session, before).ranks[0].ends
    seconds = time.time() - ends[-1]
    session.wait()
    return seconds


def newest(session: Session, before: int) -> Any:
    """The last profile, once there are more than so many."""
    deadline = time.monotonic() + VERDICT_S
    while len(session.profiles) <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    return session.profiles[-1]
