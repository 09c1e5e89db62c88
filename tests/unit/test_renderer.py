from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from fake_screen import Clock, FakeScreen, accounted

from nbdist.output.rate_limit import OutputBudget
from nbdist.output.renderer import OutputRenderer, ShownRanks
from nbdist.protocol.messages import RankError
from nbdist.rank_sets import resolve_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence


class Cell:
    """A renderer on a fake screen; `pass_` lets time go by."""

    def __init__(
        self,
        ranks: Sequence[int] = (0, 1),
        *,
        show: ShownRanks = "all",
        can_update: bool = True,
        budget: OutputBudget | None = None,
    ) -> None:
        self.clock = Clock()
        self.screen = FakeScreen(can_update=can_update)
        self.renderer = OutputRenderer(
            self.screen, ranks=ranks, show=show, clock=self.clock, budget=budget
        )

    def out(self, rank: int, text: str, name: Any = "stdout") -> None:
        self.renderer.write_text((rank,), name, text)

    def err(self, rank: int, text: str) -> None:
        self.out(rank, text, "stderr")

    def pass_(self, seconds: float = 0.0) -> str:
        self.clock.now += seconds
        self.renderer.tick()
        return self.screen.text

    def close(self) -> str:
        self.renderer.tick(final=True)
        return self.screen.text


# --- merging of lines


def test_equal_lines_are_shown_once_and_at_once() -> None:
    cell = Cell(range(4))
    for rank in range(4):
        cell.out(rank, "loss 0.5\nloss 0.4\n")
    assert cell.pass_() == "[0-3] loss 0.5\n[0-3] loss 0.4\n"


def test_a_line_waits_for_the_others_then_is_shown_with_those_that_have_it() -> None:
    cell = Cell(range(4))
    for rank in (0, 2, 3):
        cell.out(rank, "half\n")
    assert cell.pass_(0.1) == ""
    assert cell.pass_(0.1) == "[0,2-3] half\n"
    cell.out(1, "half\n")
    assert cell.close() == "[0,2-3] half\n[1] half\n"


def test_crossed_blank_line_gives_way_to_the_nearer_match() -> None:
    cell = Cell()
    cell.out(0, "\na\nb\n")
    cell.out(1, "a\nb\n\n")
    assert cell.close() == "[0] \n[0-1] a\n[0-1] b\n[1] \n"


def test_stdout_and_stderr_merge_apart_whatever_came_first() -> None:
    cell = Cell()
    cell.out(0, "out\n")
    cell.err(0, "warning\n")
    cell.err(1, "warning\n")
    cell.out(1, "out\n")
    cell.close()
    assert cell.screen.streamed("stdout") == "[0-1] out\n"
    assert cell.screen.streamed("stderr") == "[0-1] warning\n"


def test_a_line_in_pieces_is_one_line() -> None:
    cell = Cell()
    for rank in (0, 1):
        for piece in ("lo", "ss", " 1 ", "\n"):
            cell.out(rank, piece)
    assert cell.pass_() == "[0-1] loss 1 \n"


def test_separators_of_str_splitlines_are_text() -> None:
    cell = Cell()
    cell.out(0, "a\x0cb\u2028c\n")
    assert cell.close() == "[0] a\x0cb\u2028c\n"


# --- one rank only


@pytest.mark.parametrize(("ranks", "show"), [((2,), "all"), ((0, 1), frozenset({1}))])
def test_one_writer_has_no_labels_and_everything_passes_as_it_is(
    ranks: Any, show: ShownRanks
) -> None:
    cell = Cell(ranks, show=show)
    rank = ranks[-1]
    cell.out(rank, "\x1b[31mred")
    cell.out(rank, "\r 50%")
    cell.out(rank, "\n")
    assert cell.screen.text == "\x1b[31mred\r 50%\n"
    cell.renderer.result(rank, {"text/plain": "3"}, {})
    assert cell.screen.displays == [{"text/plain": "3"}]


def test_nothing_is_shown_of_hidden_ranks_but_the_log_has_it() -> None:
    cell = Cell(show="none")
    cell.out(1, "secret\n")
    cell.renderer.display(1, {"text/plain": "x"}, {})
    cell.renderer.clear_output(1, wait=False)
    cell.renderer.relay_comm(1, "comm_open", {"comm_id": "c"}, {}, [])
    assert cell.close() == ""
    assert cell.renderer.rank_logs[1].text() == "secret\n"
    assert not cell.screen.relayed


# --- displays


def test_equal_text_results_are_labelled_lines() -> None:
    cell = Cell()
    for rank in (0, 1):
        assert cell.pass_(0.5) == ""  # a rank may be late
        cell.renderer.result(rank, {"text/plain": "tensor([1,\n        2])"}, {})
    assert cell.pass_() == "[0-1] tensor([1,\n[0-1]         2])\n"
    assert not cell.screen.displays


def test_rich_bundles_merge_under_a_label_line() -> None:
    cell = Cell()
    figure = {"text/plain": "<Figure>", "image/png": "AAAA"}
    for rank in (0, 1):
        cell.out(rank, "before\n")
        cell.renderer.display(rank, figure, {"image/png": {"width": 3}})
        cell.out(rank, "after\n")
    cell.close()
    assert cell.screen.outputs == [
        ["stdout", "[0-1] before\n[0-1]\n"],
        ["display", figure, None, {"image/png": {"width": 3}}],
        ["stdout", "[0-1] after\n"],
    ]


def test_different_bundles_are_shown_apart() -> None:
    cell = Cell()
    for rank in (0, 1):
        cell.renderer.display(rank, {"text/html": f"<b>{rank}</b>"}, {})
    cell.close()
    assert [out[1] for out in cell.screen.outputs] == [
        "[0]\n",
        {"text/html": "<b>0</b>"},
        "[1]\n",
        {"text/html": "<b>1</b>"},
    ]


def test_labels_are_displays_where_displays_are_apart_from_text() -> None:
    cell = Cell()
    cell.screen.has_output_area = True
    cell.renderer.display(1, {"text/html": "<b>1</b>"}, {})
    cell.close()
    assert cell.screen.displays == [{"text/plain": "[1]"}, {"text/html": "<b>1</b>"}]


def test_display_ids_are_own_to_each_rank_and_updates_find_them() -> None:
    cell = Cell()
    for rank in (0, 1):
        cell.renderer.display(rank, {"text/html": "a"}, {}, display_id="table")
    cell.renderer.display(1, {"text/html": "b"}, {}, display_id="table", update=True)
    assert cell.pass_() == ""
    cell.pass_(0.2)
    assert cell.screen.displays == [{"text/html": "a"}, {"text/html": "b"}]
    cell.renderer.display(0, {"text/html": "c"}, {}, display_id="table", update=True)
    cell.close()
    assert cell.screen.displays == [{"text/html": "c"}, {"text/html": "b"}]


def test_updates_are_thinned_out_and_the_last_one_counts() -> None:
    cell = Cell((0,))
    cell.renderer.display(0, {"text/html": "0"}, {}, display_id="d")
    for i in range(1000):
        cell.renderer.display(0, {"text/html": str(i)}, {}, display_id="d", update=True)
        cell.pass_(0.001)
    cell.close()
    assert cell.screen.displays == [{"text/html": "999"}]
    assert cell.screen.updates <= 12


# --- clear_output


def test_clear_is_done_where_all_ranks_ask() -> None:
    cell = Cell()
    for rank in (0, 1):
        cell.out(rank, "old\n")
        cell.renderer.clear_output(rank, wait=True)
        cell.out(rank, "new\n")
    assert cell.close() == "[0-1] new\n"


def test_ranks_may_clear_some_time_apart() -> None:
    cell = Cell()
    for rank in (0, 1):
        cell.out(rank, "old\n")
    cell.renderer.clear_output(0, wait=False)
    cell.out(0, "new\n")
    assert cell.pass_(0.4) == "[0-1] old\n"
    cell.renderer.clear_output(1, wait=False)
    cell.out(1, "new\n")
    assert cell.pass_() == "[0-1] new\n"


def test_clear_of_one_rank_of_several_is_dropped() -> None:
    cell = Cell()
    cell.out(0, "a\n")
    cell.out(1, "b\n")
    cell.renderer.clear_output(1, wait=False)
    assert cell.close() == "[0] a\n[1] b\n"


# --- open lines: bars and half lines


def bar(rank: int, cell: Cell, percent: int, end: str = "") -> None:
    cell.err(rank, f"\r{percent:3}%|{'#' * (percent // 10):10}|{end}")


def test_bars_are_redrawn_at_most_eight_times_a_second() -> None:
    cell = Cell()
    for i in range(1000):
        bar(0, cell, i // 10)
        cell.pass_(0.001)
    bar(0, cell, 100, "\n")
    assert cell.close() == "[0] 100%|##########|\n"
    assert cell.screen.updates <= 10


def test_after_other_output_a_new_region_begins() -> None:
    cell = Cell()
    for epoch in (1, 2):
        for rank in (0, 1):
            cell.out(rank, f"epoch {epoch}\n")
            bar(rank, cell, 50)
        cell.pass_(0.2)
        for rank in (0, 1):
            bar(rank, cell, 100, "\n")
        cell.pass_(0.2)
        cell.pass_(0.2)
    done = "[0-1] 100%|##########|\n"
    assert cell.close() == f"[0-1] epoch 1\n{done}[0-1] epoch 2\n{done}"


def test_a_bar_goes_on_in_place_while_lines_are_printed_below() -> None:
    cell = Cell()
    bar(0, cell, 10)
    cell.pass_(0.2)
    cell.out(0, "a line\n")
    cell.pass_(0.2)
    bar(0, cell, 20)
    assert cell.pass_(0.2) == "[0]  20%|##        |\n[0] a line\n"


def test_a_half_line_is_shown_after_the_hold_and_completed_in_place() -> None:
    cell = Cell()
    for rank in (0, 1):
        cell.out(rank, "loading ...")
    assert cell.pass_(0.1) == ""
    assert cell.pass_(0.1) == "[0-1] loading ...\n"
    for rank in (0, 1):
        cell.out(rank, " done\n")
    assert cell.close() == "[0-1] loading ... done\n"


def test_a_half_line_before_a_display_is_shown_before_it() -> None:
    cell = Cell()
    for rank in (0, 1):
        cell.out(rank, "see: ")
        cell.renderer.display(rank, {"text/html": "x"}, {})
    cell.close()
    assert [out[0] for out in cell.screen.outputs] == ["stdout", "display"]
    assert cell.screen.streamed("stdout") == "[0-1] see: \n[0-1]\n"


def test_without_updates_only_final_states_are_printed() -> None:
    cell = Cell(can_update=False)
    for percent in (0, 50, 100):
        for rank in (0, 1):
            bar(rank, cell, percent)
        cell.pass_(0.3)
    assert cell.screen.text == ""
    for rank in (0, 1):
        cell.err(rank, "\n")
    assert cell.close() == "[0-1] 100%|##########|\n"
    assert not cell.screen.displays


def test_nested_bars_keep_a_row_each_and_do_not_touch_other_ranks() -> None:
    cell = Cell()
    bar(1, cell, 77)
    for inner in (0, 50, 100):
        cell.err(0, f"\router {inner // 2}%")
        for piece in ("\n", f"\rinner {inner}%", "\x1b[A"):  # as tqdm 4.67 writes and flushes
            cell.err(0, piece)
            cell.pass_(0.02)
        cell.pass_(0.2)
    assert cell.screen.text == "[0] outer 50%\n[0] inner 100%\n[1]  77%|#######   |\n"
    assert len(cell.screen.outputs) == 1


def test_erase_and_cursor_up_cannot_leave_the_ranks_own_rows() -> None:
    cell = Cell()
    cell.err(0, "\rkeep me")
    cell.err(1, "\x1b[5A\x1b[2K\x1b[2J\x1b[H\rmine")
    assert cell.pass_(0.2) == "[0] keep me\n[1] mine\n"


def test_erase_to_the_end_of_line_and_backspace() -> None:
    cell = Cell()
    cell.err(0, "\rlong text")
    cell.err(0, "\rab\x1b[K")
    cell.err(0, "\x08c")
    cell.err(0, "\x1b[3Gd")
    assert cell.pass_(0.2) == "[0] acd\n"


def test_a_blanked_bar_leaves_nothing() -> None:
    cell = Cell(can_update=False)
    cell.err(0, "\r 50%")
    cell.err(0, "\r    \r")
    assert cell.close() == ""


def test_tqdm_write_above_a_bar() -> None:
    cell = Cell()
    for rank in (0, 1):
        bar(rank, cell, 50)
    cell.pass_(0.2)
    for rank in (0, 1):
        cell.err(rank, "\r" + " " * 16 + "\r")
        cell.out(rank, "a message\n")
        bar(rank, cell, 60)
    cell.pass_(0.2)
    assert cell.screen.text == "[0-1]  60%|######    |\n[0-1] a message\n"


def test_a_million_returns_in_one_text_are_quick_and_right() -> None:
    cell = Cell()
    cell.err(0, "".join(f"\rstep {i}" for i in range(100_000)))
    assert cell.pass_(0.2) == "[0] step 99999\n"


def test_a_live_row_continues_on_another_screen() -> None:
    cell = Cell()
    bar(0, cell, 10)
    cell.pass_(0.2)
    later = FakeScreen()
    cell.renderer.recorder.sink = later
    cell.out(1, "after\n")
    cell.close()
    assert later.text == "[1] after\n"


# --- colours and bad text


def test_colours_stay_in_their_line_and_go_on_in_the_next() -> None:
    cell = Cell()
    cell.out(0, "\x1b[31mred\nstill red\x1b[0m plain\nplain\n")
    assert cell.close() == (
        "[0] \x1b[31mred\x1b[0m\n[0] \x1b[31mstill red\x1b[0m plain\n[0] plain\n"
    )


def test_lone_surrogates_and_nul_do_no_harm() -> None:
    cell = Cell()
    cell.out(0, "bad \ud800 \0 text\n")
    cell.renderer.display(0, {"text/html": "\udfff", "application/json": ["\0"]}, {})
    cell.close()
    json.dumps(cell.screen.outputs, ensure_ascii=False).encode()
    assert cell.screen.text.startswith("[0] bad \ufffd \u2400 text\n")


# --- floods

SMALL = OutputBudget(lines=50, chars=100_000, lines_per_s=10, chars_per_s=10_000)


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_every_line_of_a_flood_is_shown_or_counted(batch: int) -> None:
    cell = Cell(budget=SMALL)
    lines = [f"line {i}\n" for i in range(5000)]
    for start in range(0, len(lines), batch):
        for rank in (0, 1):
            cell.out(rank, "".join(lines[start : start + batch]))
        cell.pass_(0.001)
    shown = cell.close()
    assert accounted(cell.screen, range(2)) == {0: 5000, 1: 5000}
    assert shown.endswith("".join(f"[0-1] line {i}\n" for i in range(4980, 5000)))
    assert "[0] line" not in shown
    assert len(shown.splitlines()) < 200
    assert "lines (" in shown
    assert "%nbdist log 0" in shown


def test_a_quiet_rank_is_never_cut_because_another_floods() -> None:
    cell = Cell(budget=SMALL)
    for i in range(100):
        cell.out(0, "noise\n" * 100)
        if i % 10 == 0:
            cell.out(1, f"important {i}\n")
        cell.pass_(0.1)
    shown = cell.close()
    assert shown.count("[1] important") == 10


def test_the_end_of_a_flood_is_reported_at_once() -> None:
    cell = Cell(budget=SMALL)
    for rank in (0, 1):
        cell.out(rank, "".join(f"{i}\n" for i in range(1000)))
    cell.pass_(0.2)
    assert "not shown" not in cell.screen.text
    cell.pass_(0.4)
    cell.pass_(0.2)
    shown = cell.screen.text
    assert shown.endswith("[0-1] 999\n")
    assert "[0-1] 920 lines (3.6 KiB) not shown; `%nbdist log 0` shows the last of it\n" in shown
    cell.out(0, "after\n")
    assert cell.close().endswith("[0] after\n")


def test_a_dropped_line_that_comes_in_pieces_is_counted_once() -> None:
    cell = Cell(budget=SMALL)
    cell.out(0, "x\n" * 200 + "beg")
    cell.out(0, "in")
    cell.out(0, "ning\nx\n")
    for _ in range(60):
        cell.out(0, "x\n")
    cell.close()
    assert accounted(cell.screen, range(1)) == {0: 262}


def test_a_giant_line_is_truncated_and_its_size_shown() -> None:
    for ranks in ((0,), (0, 1)):
        for ending in ("\n", ""):
            cell = Cell(ranks)
            cell.out(0, "x" * 5_000_000 + ending)
            cell.out(0, "\n" if not ending else "y\n")
            shown = cell.close()
            assert len(shown) < 300_000, (ranks, ending)
            assert "MiB, truncated]" in shown or "MiB) not shown" in shown


def test_a_flood_of_displays_is_cut_and_counted() -> None:
    cell = Cell(budget=SMALL)
    for i in range(1000):
        for rank in (0, 1):
            cell.renderer.display(rank, {"text/html": f"{i}"}, {})
    cell.close()
    assert len(cell.screen.displays) < 20
    assert "displays (" in cell.screen.text


def test_a_bar_flood_of_a_single_rank_ends_with_its_last_state() -> None:
    cell = Cell((0,), budget=OutputBudget(lines=10, chars=1000, lines_per_s=10, chars_per_s=100))
    for i in range(10_000):
        cell.err(0, f"\r{i} steps of many")
    assert cell.close().endswith("\r9999 steps of many")
    assert len(cell.screen.text) < 2000


# --- widgets, early errors


def test_widget_messages_are_relayed_with_buffers_and_updates_joined() -> None:
    cell = Cell()
    relay = cell.renderer.relay_comm
    relay(0, "comm_open", {"comm_id": "c", "data": {"state": {}}}, {"version": "2"}, [b"x"])
    for value in range(100):
        relay(
            0,
            "comm_msg",
            {"comm_id": "c", "data": {"method": "update", "state": {"value": value}}},
            {},
            [],
        )
    relay(0, "comm_msg", {"comm_id": "c", "data": {"method": "custom"}}, {}, [])
    relay(0, "comm_close", {"comm_id": "c"}, {}, [])
    cell.close()
    kinds = [message[0] for message in cell.screen.relayed]
    assert kinds == ["comm_open", "comm_msg", "comm_msg", "comm_close"]
    assert cell.screen.relayed[0][3] == [b"x"]
    assert cell.screen.relayed[1][1]["data"]["state"] == {"value": 99}


def test_a_failure_is_shown_while_other_ranks_run() -> None:
    cell = Cell(range(3))
    cell.renderer.show_errors(
        [RankError(1, "ValueError", "bad", ["ValueError: bad"], 1.0)], waiting=[0]
    )
    assert "rank 1" in cell.screen.text
    assert "rank 0 still runs. Interrupt the cell to stop it" in cell.screen.text


def test_close_twice_and_output_after_close() -> None:
    cell = Cell()
    cell.close()
    cell.out(1, "late\n")
    cell.pass_(0.2)
    assert cell.close() == "[1] late\n"


# --- text that an agent has brought together


@pytest.mark.parametrize(
    "budget", [OutputBudget(), OutputBudget(lines=40, chars=4000, lines_per_s=5, chars_per_s=500)]
)
def test_text_of_several_ranks_is_shown_as_that_of_each(budget: OutputBudget) -> None:
    rng = random.Random(2)  # noqa: S311 - a test's own dice
    lines = ["same\n", "\x1b[31mred\n", "plain\n", "half", "\rbar", "\x1b[0m\n"]
    for _ in range(30):
        together, each = (Cell(range(4), budget=budget) for _ in range(2))
        for _ in range(20):
            ranks = tuple(rank for rank in range(4) if rng.random() < 0.8)
            text = "".join(rng.choices(lines, k=rng.randrange(1, 12)))
            together.renderer.write_text(ranks, "stdout", text)
            for rank in ranks:
                each.renderer.write_text((rank,), "stdout", text)
            seconds = rng.choice([0.0, 0.05, 0.2, 0.6])
            together.pass_(seconds)
            each.pass_(seconds)
        together.close()
        each.close()
        for rank in range(4):
            assert together.renderer.rank_logs[rank].text() == each.renderer.rank_logs[rank].text()
            assert lines_of_rank(together, rank) == lines_of_rank(each, rank)


def lines_of_rank(cell: Cell, rank: int) -> list[str]:
    """Lines that are shown for a rank, in their order."""
    lines = [line.partition("] ") for line in cell.screen.text.splitlines()]
    return [text for label, _, text in lines if rank in resolve_ranks(label.strip("["), 4)]
