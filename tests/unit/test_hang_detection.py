"""Who waits for whom, in words."""

from __future__ import annotations

from typing import Any

from nbdist.protocol import messages
from nbdist.session.rank_activity import describe_positions, detect_hang, have_collectives_diverged
from tests.doubles.rank_activity_replies import answer, waits


def error(rank: int, line: int) -> messages.RankError:
    text = f"\x1b[36mCell\x1b[39m \x1b[32mIn[3]\x1b[39m\x1b[32m, line {line}\x1b[39m"
    return messages.RankError(rank=rank, ename="ValueError", evalue="x", traceback=[text], at=0.0)


def words(replies: dict[int, messages.RankActivityReply], **given: Any) -> str:
    found = detect_hang(range(len(replies)), replies=replies, **given)
    return found.description if found else ""


def test_a_rank_that_has_raised_is_named_with_those_that_wait_for_it() -> None:
    replies = {0: answer(), 1: waits(4, 0), 2: waits(4, 0), 3: waits(4, 0)}
    text = words(replies, pending=[1, 2, 3], errors={0: error(0, 3)})
    assert text == (
        "rank 0 raised ValueError at line 3; ranks 1-3 have waited 4 s in all_reduce at line 4"
    )


def test_a_rank_that_is_slow_is_named_with_its_line() -> None:
    replies = {0: waits(4, 1), 1: answer(2, called="sleep", source="time.sleep(30)")}
    text = words(replies, pending=[0, 1], errors={})
    assert text == "rank 0 has waited 4 s in all_reduce at line 4; rank 1 is in sleep at line 2"


def test_ranks_that_have_finished_or_never_ran_the_cell() -> None:
    replies = {0: waits(1, 1, 2), 1: answer(), 2: answer()}
    found = detect_hang([0, 1], replies=replies, pending=[0], errors={})
    assert found is not None
    assert "rank 1 has finished the cell; rank 2 does not run this cell" in found.description
    assert (found.waiting_ranks, found.missing_ranks) == ((0,), (1, 2))


def test_a_rank_that_is_stuck_in_c_is_seen_by_its_count() -> None:
    stuck = answer(8, called="backward", sleeps=True, still_s=5.0, count=6)
    text = words({0: stuck, 1: answer(2, called="load")}, pending=[0, 1], errors={})
    assert text == "rank 0 has waited 5 s in backward at line 8; rank 1 is in load at line 2"


def test_a_rank_that_spins_in_c_waits_as_one_that_sleeps() -> None:
    spins = answer(8, called="item", sleeps=False, still_s=5.0, count=6)
    text = words({0: spins, 1: answer(2, called="load")}, pending=[0, 1], errors={})
    assert text == "rank 0 has waited 5 s in item at line 8; rank 1 is in load at line 2"


def test_a_rank_that_computes_for_long_does_not_hang() -> None:
    busy = answer(8, called="matmul", sleeps=False, still_s=60.0)
    assert words({0: busy, 1: answer(2)}, pending=[0, 1], errors={}) == ""
    assert words({0: busy, 1: answer()}, pending=[0], errors={}) == ""


def test_a_rank_that_stays_at_one_line_after_another_failed_is_reported() -> None:
    replies = {0: answer(), 1: answer(4, called="item", still_s=4.0)}
    text = words(replies, pending=[1], errors={0: error(0, 3)})
    assert text == "rank 0 raised ValueError at line 3; rank 1 has been in item at line 4 for 4 s"


def test_each_way_to_be_in_c_is_described() -> None:
    replies = {
        0: answer(4, called="item", still_s=4.0),
        1: answer(4, called="item", still_s=4.0),
        2: answer(5, called="read", still_s=9.0, sleeps=True),
        3: answer(6, called="tokenize", still_s=0.5),
        4: answer(7, called="solve", still_s=0.5),
    }
    text = describe_positions(
        range(7),
        replies=replies,
        silent={4: 6.0, 5: 7.0, 6: 8.0},
        states={4: "running", 5: "stopped", 6: "sleeping"},
    )
    assert text.split("; ") == [
        "ranks 0-1 spin in item at line 4",
        "rank 2 sleeps in read at line 5",
        "rank 3 is in tokenize at line 6",
        "rank 4 holds the GIL and spins and has not answered for 6 s, last seen in solve at line 7",
        "rank 5 is stopped (SIGSTOP, state T) and has not answered for 7 s",
        "rank 6 holds the GIL and sleeps in C and has not answered for 8 s",
    ]


def test_a_short_wait_is_not_a_hang() -> None:
    assert words({0: waits(4, 1, seconds=1.0), 1: answer(2)}, pending=[0, 1], errors={}) == ""


def test_a_rank_that_does_not_answer_is_reported() -> None:
    replies = {0: waits(4, 1)}
    found = detect_hang([0, 1], replies=replies, pending=[0, 1], errors={})
    assert found is not None
    assert found.description.endswith("the position of rank 1 is unknown")


def test_counts_that_differ_are_apart() -> None:
    assert have_collectives_diverged([answer(count=5), answer(count=6)])
    assert not have_collectives_diverged([answer(count=5), answer(count=5)])
    assert not have_collectives_diverged(
        [answer(count=5), answer(counts={"7": 1})]
    )  # no group in common
