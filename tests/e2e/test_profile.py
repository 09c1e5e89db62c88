"""Planted bottlenecks on two CPU ranks: each is recognised, and nothing else is blamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from tests import bottleneck_loops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Profile, Session
    from tests.bottleneck_loops import BottleneckLoop

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two CPU ranks on which models can be built."""
    with nbdist.Session(nproc=2, precision="no") as running:
        running.run(bottleneck_loops.SETUP)
        yield running


def assert_told(profile: Profile, one: BottleneckLoop) -> None:
    """Fail unless what was planted is told and nothing else is blamed, and the parts sum up."""
    assert bottleneck_loops.is_as_planted(profile, one), profile
    for rank in profile.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_s, rel=0.03)


@pytest.mark.timeout(300)
def test_a_loop_without_a_bottleneck_is_bound_by_computing(session: Session) -> None:
    assert_told(
        profile := bottleneck_loops.profiled(session, bottleneck_loops.CONTROL),
        bottleneck_loops.CONTROL,
    )
    assert profile.verdict == bottleneck_loops.CONTROL.expected
    assert not profile.advice


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "one",
    [
        bottleneck_loops.DDP[0],
        *(pytest.param(one, marks=pytest.mark.nightly) for one in bottleneck_loops.DDP[1:]),
    ],
    ids=lambda one: one.name,
)
def test_a_planted_bottleneck_is_blamed_and_nothing_else(
    session: Session, one: BottleneckLoop
) -> None:
    assert_told(bottleneck_loops.profiled(session, one), one)


@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.parametrize(
    "one", [bottleneck_loops.ONE_UNIT, bottleneck_loops.OFFLOADED], ids=lambda one: one.name
)
def test_a_bottleneck_of_the_engine_is_blamed(one: BottleneckLoop) -> None:
    with nbdist.Session(nproc=2, precision="no", **one.options) as session:
        session.run(bottleneck_loops.SETUP)
        assert_told(bottleneck_loops.profiled(session, one), one)
