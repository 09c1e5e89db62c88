"""A switch to where the state has no room is refused; where a step may not fit, it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist import Session, SwitchError
from tests.e2e.training import MODEL, START

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)

WITH = """
from nbdist.worker.engines import auto_strategy as choose
if "really_free" not in globals():
    really_free = choose.available_bytes
choose.available_bytes = lambda model=None: {free}
"""
STATE_BYTES = 12 * (211 * 45 + 24 * 45 + 2 * (12 * 45**2 + 13 * 45) + 2 * 45)
"""Of the test's GPT-2 in fp32 with AdamW's moments."""


@pytest.fixture(scope="module")
def trained() -> Iterator[Session]:
    with Session(nproc=2, backend="zero3", precision="no") as session:
        session.run(MODEL, output="none")
        session.run(START.format(""), output="none")
        yield session


@pytest.fixture
def session(trained: Session) -> Iterator[Session]:
    yield trained
    trained.run("choose.available_bytes = really_free", output="none")


@pytest.mark.nightly
def test_state_larger_than_the_device_is_refused_before_anything_moves(session: Session) -> None:
    session.run(WITH.format(free=STATE_BYTES * 3 // 4), output="none")
    with pytest.raises(SwitchError, match=r"under ddp: a rank needs [\d.]+ KiB for weights"):
        session.switch("ddp")
    assert session.options.backend == "zero3"
    assert session.switch("fsdp2").verified, "half of the state is room enough"
    session.run("train(1)", output="none")
    session.switch("zero3")


def test_one_rank_alone_refuses_for_all(session: Session) -> None:
    session.run(WITH.format(free="1 << 40 if rank else 1000"), output="none")
    with pytest.raises(SwitchError, match="rank 0: Not enough memory under fsdp2"):
        session.switch("fsdp2")


def test_a_step_that_may_not_fit_is_a_note(session: Session) -> None:
    session.run(WITH.format(free=STATE_BYTES + 1000), output="none")
    report = session.switch("ddp")
    assert "a step under ddp is predicted to take" in report.notes[0]
    assert report.notes[0] in str(report)
    session.run(WITH.format(free="1 << 40"), output="none")
    assert session.switch("zero3").notes == ()


@pytest.mark.nightly
def test_one_rank_less_needs_room_for_all_of_it(session: Session) -> None:
    session.run(WITH.format(free=STATE_BYTES * 3 // 10), output="none")  # twice as much for one
    with pytest.raises(SwitchError, match="under zero3: a rank needs"):
        session.switch("zero3", nproc=1)
    assert session.world_size == 2
