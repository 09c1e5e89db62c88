"""Planted bottlenecks on two CPU ranks: each is recognised, and nothing else is blamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from tests import planted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Profile, Session
    from tests.planted import Planted

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two CPU ranks on which models can be built."""
    with nbdist.Session(nproc=2, precision="no") as running:
        running.run(planted.SETUP)
        yield running


def assert_told(profile: Profile, one: Planted) -> None:
    """Fail unless what was planted is told and nothing else is blamed, and the parts sum up."""
    assert planted.is_as_planted(profile, one), profile
    for rank in profile.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_s, rel=0.03)


@pytest.mark.timeout(300)
def test_a_loop_without_a_bottleneck_is_bound_by_computing(session: Session) -> None:
    assert_told(profile := planted.profiled(session, planted.CONTROL), planted.CONTROL)
    assert profile.verdict == planted.CONTROL.said
    assert not profile.advice


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "one",
    [planted.DDP[0], *(pytest.param(one, marks=pytest.mark.nightly) for one in planted.DDP[1:])],
    ids=lambda one: one.name,
)
def test_a_planted_bottleneck_is_blamed_and_nothing_else(session: Session, one: Planted) -> None:
    assert_told(planted.profiled(session, one), one)


@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.parametrize("one", [planted.ONE_UNIT, planted.OFFLOADED], ids=lambda one: one.name)
def test_a_bottleneck_of_the_engine_is_blamed(one: Planted) -> None:
    with nbdist.Session(nproc=2, precision="no", **one.options) as session:
        session.run(planted.SETUP)
        assert_told(planted.profiled(session, one), one)
