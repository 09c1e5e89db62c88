"""Calls of collectives that ranks see of one another."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from nbdist.worker import collective_check
from nbdist.worker.collective_check import (
    CALLS_PER_GROUP,
    MAX_GROUPS,
    CollectiveLog,
    LoggedCollective,
)

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

SUM = LoggedCollective.from_signature("all_reduce|4", "all_reduce of float32[4]")
OTHER = LoggedCollective.from_signature("all_reduce|8", "all_reduce of float32[8]")


@pytest.fixture
def boards(tmp_path: Path) -> list[CollectiveLog]:
    return [CollectiveLog(tmp_path, rank=rank) for rank in range(2)]


def test_a_call_is_seen_by_the_other_rank(boards: list[CollectiveLog]) -> None:
    first, second = boards
    assert not second.has_reached(0, "0", 1)
    assert first.append("0", SUM) == 1
    assert second.has_reached(0, "0", 1)
    assert second.call_at(0, "0", 1) == SUM
    assert not second.has_reached(0, "0", 2)
    assert not second.has_reached(0, "another group", 1)


def test_a_call_that_was_withdrawn_was_never_made(boards: list[CollectiveLog]) -> None:
    first, second = boards
    number = first.append("0", SUM)
    first.withdraw("0", number)
    assert not second.has_reached(0, "0", 1)
    assert second.call_at(0, "0", 1) is None
    assert first.append("0", OTHER) == 1
    assert second.call_at(0, "0", 1) == OTHER


def test_a_rank_that_has_gone_on_was_there(boards: list[CollectiveLog]) -> None:
    first, second = boards
    for _ in range(3 * CALLS_PER_GROUP):
        first.append("0", SUM)
    assert second.has_reached(0, "0", 3 * CALLS_PER_GROUP)
    assert second.has_reached(0, "0", 1)
    assert second.call_at(0, "0", 1) is None  # too long ago to tell what it was
    assert second.call_at(0, "0", 3 * CALLS_PER_GROUP) == SUM


def test_a_rank_without_a_slot_is_not_waited_for(boards: list[CollectiveLog]) -> None:
    first, second = boards
    for name in range(MAX_GROUPS):
        first.append(str(name), SUM)
    assert second.has_reached(0, "one more", 1)
    assert second.call_at(0, "one more", 1) is None


def test_groups_that_are_gone_leave_their_slots(boards: list[CollectiveLog]) -> None:
    first, second = boards
    for name in range(MAX_GROUPS):
        first.append(str(name), SUM)
    assert second.has_reached(0, "3", 1)
    first.clear()
    second.clear()
    assert not second.has_reached(0, "3", 1)
    assert first.append("new", OTHER) == 1
    assert second.call_at(0, "new", 1) == OTHER


def test_a_page_belongs_to_its_user_alone(tmp_path: Path) -> None:
    CollectiveLog(tmp_path, rank=0)
    (page,) = tmp_path.iterdir()
    assert page.stat().st_mode & 0o777 == 0o600


def test_a_call_has_its_number_when_all_else_of_it_is_there(
    boards: list[CollectiveLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = boards

    class Interrupted:
        """In the place of the last write, looks at what the other rank sees."""

        def pack_into(self, page: mmap.mmap, place: int, number: int) -> None:
            assert not second.has_reached(0, "0", number)
            struct.pack_into("<Q", page, place, number)

    monkeypatch.setattr(collective_check, "_NUMBER", Interrupted())
    number = first.append("0", SUM)
    assert second.has_reached(0, "0", number)
    assert second.call_at(0, "0", number) == SUM
