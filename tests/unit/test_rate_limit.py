from __future__ import annotations

from nbdist.output.rate_limit import (
    TAIL_LINES,
    OmittedBuffer,
    OmittedOutput,
    OutputBudget,
    OutputLimiter,
)

BUDGET = OutputBudget(lines=100, chars=10_000, lines_per_s=20, chars_per_s=2_000)


def shown(runs: list[tuple[bool, int]]) -> int:
    return sum(count for visible, count in runs if visible)


def test_runs_add_up_to_what_was_asked() -> None:
    gate = OutputLimiter([0], budget=BUDGET)
    runs = gate.admit_lines(0, 1000, 10_000, now=0.0)
    assert sum(count for _, count in runs) == 1000
    assert shown(runs) == 120  # the burst, and a second's worth


def test_characters_are_limited_too() -> None:
    gate = OutputLimiter([0], budget=BUDGET)
    assert shown(gate.admit_lines(0, 50, 50_000, now=0.0)) == 12


def test_ranks_in_step_are_cut_at_the_same_lines_whatever_their_batches() -> None:
    gate = OutputLimiter([0, 1], budget=BUDGET)
    seen: dict[int, list[bool]] = {0: [], 1: []}
    now = 0.0
    for _ in range(100):
        now += 0.1
        for rank, batch in ((0, 40), (1, 20), (1, 20)):
            for visible, count in gate.admit_lines(rank, batch, batch * 10, now=now):
                seen[rank] += [visible] * count
    assert seen[0] == seen[1]
    assert sum(seen[0]) < 400


def test_an_idle_rank_gets_its_allowance_back() -> None:
    gate = OutputLimiter([0], budget=BUDGET)
    gate.admit_lines(0, 1000, 1000, now=0.0)
    assert shown(gate.admit_lines(0, 40, 40, now=3.0)) == 40


def test_bursts_of_many_ranks_are_shared() -> None:
    gate = OutputLimiter(range(8), budget=OutputBudget())
    total = sum(shown(gate.admit_lines(r, 100_000, 100_000, now=0.0)) for r in range(8))
    assert total <= 8 * (1250 + 200)


def test_dropped_text_keeps_its_end() -> None:
    dropped = OmittedBuffer()
    for start in range(0, 1000, 7):
        text = "".join(f"{i}\n" for i in range(start, min(start + 7, 1000)))
        dropped.add_text("stdout", text, text.count("\n"))
    gap, tail = dropped.split_tail()
    text = "".join(piece for _, piece in tail)
    assert text == "".join(f"{i}\n" for i in range(1000 - TAIL_LINES, 1000))
    assert gap.num_lines == 1000 - TAIL_LINES


def test_a_big_chunk_is_not_kept_whole() -> None:
    dropped = OmittedBuffer()
    dropped.add_text("stdout", "x" * 10_000_000 + "\n", 1)
    gap, tail = dropped.split_tail()
    assert len(tail[0][1]) < 100_000
    assert gap.num_chars > 9_000_000


def test_sentences() -> None:
    assert OmittedOutput(194_312, 0, 12_300_000).describe(0) == (
        "194,312 lines (12.3 MB) not shown; `%nbdist log 0` shows the last of it"
    )
    assert (
        OmittedOutput(1, 2, 100).describe(3).startswith("1 line and 2 displays (100 B) not shown")
    )
    assert OmittedOutput(0, 0, 5).describe(1).startswith("unfinished text (5 B) not shown")
