from __future__ import annotations

import random

from nbdist.output.dedup import OutputItem, OutputMerger


def filled(queues: dict[int, str], at: float = 0.0) -> OutputMerger[str]:
    merge: OutputMerger[str] = OutputMerger(list(queues))
    for rank, letters in queues.items():
        for letter in letters:
            merge.add_items((rank,), [OutputItem(letter, "stdout", at, 0.15, letter)])
    return merge


def test_what_all_have_leaves_at_once() -> None:
    merge = filled({0: "ab", 1: "ab"})
    assert list(merge.pop_ready(0.0)) == [((0, 1), "a"), ((0, 1), "b")]
    assert not merge.has_items(0)


def test_what_one_lacks_waits_for_the_hold() -> None:
    merge = filled({0: "a", 1: ""})
    assert list(merge.pop_ready(0.1)) == []
    assert list(merge.pop_ready(0.15)) == [((0,), "a")]


def test_final_waits_for_nobody() -> None:
    assert list(filled({0: "a", 1: ""}).pop_ready(0.0, final=True)) == [((0,), "a")]


def test_three_ranks_with_extras_align() -> None:
    left = list(filled({0: "xab", 1: "ayb", 2: "abz"}).pop_ready(1.0))
    assert [(ranks, letter) for ranks, letter in left if letter in "ab"] == [
        ((0, 1, 2), "a"),
        ((0, 1, 2), "b"),
    ]


def test_no_other_item_passes_a_barrier() -> None:
    merge: OutputMerger[str] = OutputMerger([0, 1])
    merge.add_items((0,), [OutputItem("figure", "", 0.0, 0.15, "figure")])
    merge.add_items((0,), [OutputItem("line", "stderr", 0.0, 0.15, "line")])
    merge.add_items((1,), [OutputItem("line", "stderr", 0.0, 0.15, "line")])
    assert list(merge.pop_ready(1.0)) == [((0,), "figure"), ((0, 1), "line")]


def test_any_queues_leave_whole_and_in_order() -> None:
    rng = random.Random(7)  # noqa: S311 - a test's own dice
    for _ in range(300):
        queues = {
            rank: "".join(rng.choice("abcd") for _ in range(rng.randrange(8))) for rank in range(3)
        }
        merge = filled(queues)
        left = [*merge.pop_ready(0.0), *merge.pop_ready(1.0)]
        for rank, letters in queues.items():
            assert "".join(letter for ranks, letter in left if rank in ranks) == letters


def test_ranks_that_are_put_together_leave_as_those_that_are_put_alone() -> None:
    rng = random.Random(11)  # noqa: S311 - a test's own dice
    for _ in range(300):
        together: OutputMerger[str] = OutputMerger(range(4))
        alone: OutputMerger[str] = OutputMerger(range(4))
        now = 0.0
        for number in range(12):
            ranks = [rank for rank in range(4) if rng.random() < 0.8]
            lane = rng.choice(["stdout", "stdout", "stderr", ""])
            items = [OutputItem((number, n), lane, now, 0.15, f"{number} {n}") for n in range(2)]
            together.add_items(ranks, items)
            for rank in ranks:
                alone.add_items((rank,), items)
            own = OutputItem(("own", number), "stdout", now, 0.15, f"{ranks[:1]}")
            for merge in (together, alone):
                merge.add_items(ranks[:1], [own])
            now += rng.choice([0.0, 0.04, 0.2])
            assert list(together.pop_ready(now)) == list(alone.pop_ready(now))
        assert list(together.pop_ready(now, final=True)) == list(alone.pop_ready(now, final=True))
