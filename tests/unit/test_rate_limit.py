from __future__ import annotations

from nbdist.output.rate_limit import (
    TAIL_LINES,
    OmittedOutputBuffer,
    OutputBudget,
    OutputLimiter,
)

BUDGET = OutputBudget(lines=100, chars=10_000, lines_per_s=20, chars_per_s=2_000)


def shown(runs: list[tuple[bool, int]]) -> int:
    return sum(count for visible, count in runs if visible)


def test_runs_add_up_to_what_was_asked() -> None:
    gate = OutputLimiter([0], budget=BUDGET, pass_on=print)
    runs = gate.admit_lines(0, 1000, 10_000, now=0.0)
    assert sum(count for _, count in runs) == 1000
    assert shown(runs) == 120  # the burst, and a second's worth


def test_ranks_in_step_are_cut_at_the_same_lines_whatever_their_batches() -> None:
    gate = OutputLimiter([0, 1], budget=BUDGET, pass_on=print)
    seen: dict[int, list[bool]] = {0: [], 1: []}
    now = 0.0
    for _ in range(100):
        now += 0.1
        for rank, batch in ((0, 40), (1, 20), (1, 20)):
            for visible, count in gate.admit_lines(rank, batch, batch * 10, now=now):
                seen[rank] += [visible] * count
    assert seen[0] == seen[1]
    assert sum(seen[0]) < 400


def test_bursts_of_many_ranks_are_shared() -> None:
    gate = OutputLimiter(range(8), budget=OutputBudget(), pass_on=print)
    total = sum(shown(gate.admit_lines(r, 100_000, 100_000, now=0.0)) for r in range(8))
    assert total <= 8 * (1250 + 200)


def test_dropped_text_keeps_its_end() -> None:
    dropped = OmittedOutputBuffer()
    for start in range(0, 1000, 7):
        text = "".join(f"{i}\n" for i in range(start, min(start + 7, 1000)))
        dropped.add_text("stdout", text, text.count("\n"))
    gap, tail = dropped.split_tail()
    text = "".join(piece for _, piece in tail)
    assert text == "".join(f"{i}\n" for i in range(1000 - TAIL_LINES, 1000))
    assert gap.num_lines == 1000 - TAIL_LINES


def test_a_big_chunk_is_not_kept_whole() -> None:
    dropped = OmittedOutputBuffer()
    dropped.add_text("stdout", "x" * 10_000_000 + "\n", 1)
    gap, tail = dropped.split_tail()
    assert len(tail[0][1]) < 100_000
    assert gap.num_chars > 9_000_000
