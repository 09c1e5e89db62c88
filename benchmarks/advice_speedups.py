"""Whether advice keeps its word: what a profile predicts of each change, and what it brings.

Each piece of advice is taken by itself, on new ranks: the loop is profiled as it is and with the
change, and the two speeds are compared per sample, as the profile does it itself.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from results import Row, middle

import nbdist
from nbdist.profiler.advice import MIN_GAIN

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import bottleneck_loops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Profile, Session
    from nbdist.profiler.advice import Advice

STEPS = 10
"""Of a window."""
SETUP = f"""{bottleneck_loops.SETUP}
def build_with(batch_size, length, hidden=256, num_workers=0, batch_s=0.0):
    def fetch(some):
        time.sleep(batch_s)
        return collate(some)

    model, optimizer, _ = build(batch_size, length, hidden)
    data = DataLoader(
        rows(8192, length),
        batch_size=batch_size,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=fetch,
    )
    return model, optimizer, accelerator.prepare(data)
"""
TRAIN = """
steps = 0
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    steps += accelerator.sync_gradients
    if steps == STEPS:
        break
""".replace("STEPS", str(STEPS + 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A training that could be faster."""

    name: str
    build: dict[str, Any]
    """Arguments of `build_with`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the session."""


LOOPS = (
    Loop(name="slow loader", build={"batch_size": 4, "length": 64, "batch_s": 0.1}),
    Loop(name="tiny batch", build={"batch_size": 1, "length": 16}),
    Loop(
        name="computed twice",
        build={"batch_size": 4, "length": 64},
        options={"activation_checkpointing": True},
    ),
    Loop(
        name="one FSDP unit",
        build={"batch_size": 2, "length": 64, "hidden": 512},
        options={"backend": "fsdp2", "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
    ),
    Loop(
        name="offloaded",
        build={"batch_size": 1, "length": 96, "hidden": 512},
        options={"backend": "zero2", "offload": "cpu"},
    ),
)


class Kept(NamedTuple):
    """What a change was to bring, and what it brought: factors of the speed."""

    title: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def off(self) -> float:
        """How far the prediction is from what was measured, of the latter."""
        return abs(self.predicted / self.measured - 1)

    @property
    def inside(self) -> bool:
        """Whether the range that was shown has it."""
        return self.low <= self.measured <= self.high


def measure() -> Iterator[Row]:
    """All changes that are proposed for all loops."""
    kept = [one for loop in LOOPS for one in taken(loop)]
    yield Row(
        name="predicted speed after a change, against measured: median",
        value=middle([one.off for one in kept]),
        unit="off",
        limit=0.25,
        detail=(
            f"{sum(one.inside for one in kept)} of {len(kept)} inside the range that was shown;"
            f" the worst is {max(one.off for one in kept):.2f} off"
        ),
    )
    yield Row(
        name="advised changes that cost over 5 % and did not say so",
        value=sum(one.measured < 1 - MIN_GAIN and one.predicted >= 1 for one in kept),
        unit=f"of {len(kept)}",
        limit=0,
    )


def taken(loop: Loop) -> Iterator[Kept]:
    """Each piece of advice on a loop that a profile can recognise."""
    for number in count():
        with nbdist.Session(nproc=2, precision="no", **loop.options) as session:
            session.run(SETUP, output="none")
            build(session, loop.build)
            before = profiled(session)
            can_be_taken = [one for one in before.advice if one.change]
            if number >= len(can_be_taken):
                return
            advice = can_be_taken[number]
            apply(session, loop, advice)
            after = profiled(session)
        gain, speed = advice.gain, after.samples_per_s / before.samples_per_s
        one = Kept(advice.title, 1 + gain.faster, 1 + gain.low, 1 + gain.high, speed)
        where = "" if one.inside else ", outside"
        print(
            f"    {loop.name}, {one.title}: predicted {one.predicted:.2f} x"
            f" ({one.low:.2f} to {one.high:.2f}), measured {one.measured:.2f} x{where}",
            flush=True,
        )
        yield one


def build(session: Session, given: dict[str, Any]) -> None:
    """Make model, optimizer and loader anew."""
    session.run(f"model, optimizer, loader = build_with(**{given!r})", output="none")


def profiled(session: Session) -> Profile:
    """Train with a profile."""
    with contextlib.redirect_stdout(io.StringIO()):
        session.run(TRAIN, profile={"steps": STEPS, "memory": False}, output="none")
    return session.profiles[-1]


def apply(session: Session, loop: Loop, advice: Advice) -> None:
    """Do what it says."""
    if advice.changes:
        with contextlib.redirect_stdout(io.StringIO()):
            session.switch(**advice.changes)
        return
    names = {"micro_batch": "batch_size", "num_workers": "num_workers"}
    build(session, loop.build | {names[key]: value for key, value in advice.change.items()})
