from __future__ import annotations

import random

from nbdist.output.dedup import OutputItem, OutputMerger


def filled(queues: dict[int, str], at: float = 0.0) -> OutputMerger[str]:
    merge: OutputMerger[str] = OutputMerger(list(queues))
    for rank, letters in queues.items():
        for letter in letters:
            merge.add_items((rank,), [OutputItem(letter, at, "stdout", key=letter)])
    return merge


def left(
    merge: OutputMerger[str], now: float, *, final: bool = False
) -> list[tuple[tuple[int, ...], str]]:
    return [(ranks, item.content) for ranks, item in merge.pop_ready(now, final=final)]


def test_three_ranks_with_extras_align() -> None:
    merged = left(filled({0: "xab", 1: "ayb", 2: "abz"}), 1.0)
    assert [(ranks, letter) for ranks, letter in merged if letter in "ab"] == [
        ((0, 1, 2), "a"),
        ((0, 1, 2), "b"),
    ]


def test_no_other_item_passes_a_barrier() -> None:
    merge: OutputMerger[str] = OutputMerger([0, 1])
    merge.add_items((0,), [OutputItem("figure", 0.0, key="figure")])
    merge.add_items((0,), [OutputItem("line", 0.0, "stderr", key="line")])
    merge.add_items((1,), [OutputItem("line", 0.0, "stderr", key="line")])
    assert left(merge, 1.0) == [((0,), "figure"), ((0, 1), "line")]


def test_any_queues_leave_whole_and_in_order() -> None:
    rng = random.Random(7)  # noqa: S311 - a test's own dice
    for _ in range(300):
        queues = {
            rank: "".join(rng.choice("abcd") for _ in range(rng.randrange(8))) for rank in range(3)
        }
        merge = filled(queues)
        merged = [*left(merge, 0.0), *left(merge, 1.0)]
        for rank, letters in queues.items():
            assert "".join(letter for ranks, letter in merged if rank in ranks) == letters
