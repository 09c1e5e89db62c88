"""A cell of several ranks in the kernel: when a failure is reported, and what belongs to it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from nbdist import CellError, RankDied
from nbdist.protocol import messages
from nbdist.session import cell as cells
from nbdist.session.cell import Cell
from nbdist.session.cell_runner import CellRunner


def cell_of(*ranks: int) -> tuple[Cell, Mock]:
    renderer = Mock()
    cell = Cell(ranks, renderer, on_send=lambda *_: None, on_done=lambda _: None, on_comm=print)
    return cell, renderer


def message(kind: str, **content: Any) -> Any:
    return {"header": {"msg_type": kind}, "content": content}


def fail(cell: Cell, rank: int) -> None:
    error = message("error", ename="MemoryError", evalue="", traceback=["MemoryError"])
    error["header"]["date"] = datetime.now(UTC)
    cell.on_message((rank,), "iopub", error)
    cell.failed_at = 0.0  # long ago


def test_an_error_is_shown_early_only_while_another_rank_runs() -> None:
    cell, renderer = cell_of(0, 1)
    fail(cell, 0)
    cell.render_pending(0.0)
    cell.render_pending(0.0)
    assert renderer.show_errors.call_args.kwargs["waiting"] == (1,)


def test_if_all_ranks_failed_the_error_is_shown_once_at_the_end() -> None:
    cell, renderer = cell_of(0, 1)
    for rank in (0, 1):
        fail(cell, rank)
        advice = messages.OomAdvice(lines=["out of memory"], held_bytes=rank)
        cell.on_message((rank,), "iopub", message(messages.OOM_ADVICE, **advice))
    cell.render_pending(0.0)
    cell.render_pending(0.0)
    assert cell.pending == (0, 1), "they look for what would fit"
    renderer.show_errors.assert_not_called()
    with pytest.raises(CellError) as caught:
        cell.raise_errors()
    (note,) = caught.value.__notes__  # for scripts, which print only the exception
    assert "rank 1 (as 1 more): out of memory" in note


def end_of(cell: Cell, ename: str, evalue: str) -> None:
    error = message("error", ename=ename, evalue=evalue, traceback=[f"{ename}: {evalue}"])
    error["header"]["date"] = datetime.now(UTC)
    cell.on_message((0,), "iopub", error)
    cell.fail(RankDied("rank 1 ended"))
    cell.render_pending(0.0)
    assert cell.finished.is_set()
    with pytest.raises(RankDied, match="rank 1 ended"):
        cell.raise_errors()


@pytest.mark.fault("B2")
def test_what_follows_from_a_death_is_not_shown_as_an_error() -> None:
    cell, renderer = cell_of(0, 1)
    cell.detach(Mock())
    end_of(cell, "RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    renderer.show_errors.assert_not_called()


def test_an_error_of_its_own_is_shown_though_another_rank_died() -> None:
    cell, renderer = cell_of(0, 1)
    end_of(cell, "ValueError", "bad batch")
    renderer.show_errors.assert_called_once()


@pytest.mark.fault("B7")
def test_a_line_of_the_session_stands_below_the_cell() -> None:
    cell, renderer = cell_of(0)
    cell.print_line("nbdist: rank 0 is unresponsive (stopped, state T)")
    cell.render_pending(0.0)
    renderer.show_lines.assert_called_once_with(
        ["nbdist: rank 0 is unresponsive (stopped, state T)"]
    )


def reply(cell: Cell, rank: int) -> None:
    cell.on_message((rank,), "shell", message("execute_reply", status="ok"))


def line(cell: Cell, rank: int, text: str) -> None:
    cell.on_message((rank,), "iopub", message("stream", name="stdout", text=text))


def test_output_that_is_long_on_its_way_after_the_reply_belongs_to_the_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell, _ = cell_of(0)
    now = 0.0
    monkeypatch.setattr(cells.time, "monotonic", lambda: now)
    reply(cell, 0)
    for _ in range(5):
        now += cells.IDLE_DEADLINE_S / 2
        line(cell, 0, "more\n")
        cell.render_pending(0.0)
        assert not cell.finished.is_set()
    now += cells.IDLE_DEADLINE_S + 1  # its `idle` is lost
    cell.render_pending(0.0)
    assert cell.finished.is_set()


def test_all_late_output_is_shown_at_once() -> None:
    cell, renderer = cell_of(0)
    reply(cell, 0)
    cell.on_message((0,), "iopub", message("status", execution_state="idle"))
    cell.render_pending(0.0)
    assert cell.finished.is_set()
    for number in range(100):
        line(cell, 0, f"late {number}\n")
    cell.render_pending(0.0)
    assert renderer.write_text.call_count == 100


def test_a_cell_whose_ranks_are_restarted_while_it_is_sent_ends() -> None:
    workers = Mock()
    running = CellRunner(workers, Mock(), Mock(), on_send=print)
    cell, _ = cell_of(0)

    def restarted(*_: object, **__: object) -> str:
        running.fail_all(RankDied("the ranks were restarted"))
        return "request"

    workers.send_request.side_effect = restarted
    running.send(cell, Mock(), allow_stdin=False)
    cell.render_pending(0.0)
    assert cell.finished.is_set()
