from __future__ import annotations

import json
import struct
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist import panel
from nbdist.panel import controller, snapshot
from nbdist.panel.controller import PanelController, PanelData
from nbdist.panel.curves import curve_history
from nbdist.panel.plan_view import NO_MODEL_MESSAGE, view_from_plan
from nbdist.session.cell import Cell
from nbdist.session.config import SessionConfig
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Session

WITHIN_S = 10.0


class Opened:
    """An open panel of a session without ranks, and what it sends."""

    def __init__(self) -> None:
        self.session: Session = nbdist.Session(nproc=2, backend="ddp")
        self.session.state = "ready"
        self.sent: list[tuple[Any, list[bytes]]] = []
        self.failing = 0
        self.live = PanelController(PanelData(self.session), self._send)

    def _send(self, message: Any, buffers: list[bytes]) -> None:
        json.dumps(message, allow_nan=False, ensure_ascii=False).encode()  # as jupyter_client does
        if self.failing:
            self.failing -= 1
            raise OSError("the comm is closed")
        self.sent.append((message, buffers))

    def kinds(self, kind: str) -> list[Any]:
        """Messages of a kind so far."""
        return [message for message, _ in list(self.sent) if message["kind"] == kind]

    def command(self, name: str, /, identity: str = "1", **arguments: Any) -> None:
        """Press a button."""
        message = {"kind": "command", "id": identity, "name": name, "arguments": arguments}
        self.live.receive_message(message)

    def answer(self, identity: str = "1") -> Any:
        """What comes of it."""

        def found() -> list[Any]:
            return [one for one in self.kinds("answer") if one["id"] == identity]

        eventually(found, within_s=WITHIN_S)
        return found()[0]

    def points(self) -> list[float]:
        """All numbers in buffers."""
        return [
            number
            for _, buffers in list(self.sent)
            for buffer in buffers
            for (number,) in struct.iter_unpack("<d", buffer)
        ]


@pytest.fixture
def opened() -> Iterator[Opened]:
    made = Opened()
    yield made
    made.live.close()


def test_hello_is_answered_with_everything(opened: Opened) -> None:
    opened.session.metrics.add_rows(0, [{"step": 0, "time": 1.0, "loss": 0.5}])
    opened.live.receive_message({"kind": "hello"})
    eventually(lambda: opened.kinds("reset"), within_s=WITHIN_S)
    reset = opened.kinds("reset")[0]
    assert reset["picture"]["header"]["backend"] == "ddp"
    eventually(lambda: 0.5 in opened.points(), within_s=WITHIN_S)


@pytest.mark.fault("G2")
@pytest.mark.fault("G4")
def test_a_flood_of_messages_makes_no_flood_of_answers(opened: Opened) -> None:
    for _ in range(2000):
        opened.live.receive_message({"kind": "hello"})
        opened.live.receive_message({"kind": "eval", "code": "x" * 1000})
        opened.live.receive_message("rubbish", [b"x"])
    opened.command("plan", identity="last")
    opened.answer("last")
    assert 1 <= len(opened.kinds("reset")) <= 20
    assert opened.live.dropped > 100


def test_losses_that_are_no_numbers_travel_in_buffers(opened: Opened) -> None:
    values = ["nan", "inf", "-inf", 1.7e308, -1.7e308]
    rows = [{"step": i, "time": float(i), "loss": v} for i, v in enumerate(values)]
    for rank in range(2):
        opened.session.metrics.add_rows(rank, rows)
    eventually(lambda: float("-inf") in opened.points(), within_s=WITHIN_S)
    opened.live.close()
    curves = curve_history(opened.session.metrics)
    assert len(curves["loss"]) == len(values)
    page = panel.render_formats(PanelData(opened.session).snapshot(), curves)
    assert "loss" in page["text/html"]


def test_two_hundred_names_and_one_that_changes_its_type(opened: Opened) -> None:
    row = {"step": 0, "time": 1.0} | {f"scalar {i}": float(i) for i in range(250)}
    opened.session.metrics.add_rows(0, [row, {"step": 1, "time": 2.0, "scalar 1": "high"}])
    opened.session.metrics.add_rows(0, [{"step": 2, "time": 3.0, "scalar 1": 7.0}])
    eventually(lambda: 7.0 in opened.points(), within_s=WITHIN_S)
    opened.live.close()
    page = panel.render_formats(
        PanelData(opened.session).snapshot(), curve_history(opened.session.metrics)
    )
    assert "and 192 more" in page["text/html"]
    assert "and 188 more" in page["text/plain"]


@pytest.mark.parametrize("text", ["\ud800", "a\0b"])
def test_text_that_no_message_can_carry_back_is_refused(opened: Opened, text: str) -> None:
    opened.command("export", folder=text)
    assert not opened.answer()["ok"]
    opened.command("save", identity=text, name="a")  # not even answered
    opened.command(text, identity="2")
    assert not opened.answer("2")["ok"]
    opened.live._take_answer({"kind": "answer", "id": "3", "ok": False, "text": text})
    opened.live.receive_message({"kind": "hello"})
    eventually(lambda: opened.kinds("reset"), within_s=WITHIN_S)


@pytest.mark.fault("G5")
def test_a_failure_to_send_is_not_the_end(opened: Opened) -> None:
    opened.failing = 1
    opened.live.receive_message({"kind": "hello"})
    eventually(lambda: not opened.failing, within_s=WITHIN_S)
    opened.live.receive_message({"kind": "hello"})
    eventually(lambda: opened.kinds("reset"), within_s=WITHIN_S)


def test_a_restart_begins_new_curves(opened: Opened) -> None:
    opened.session.metrics.add_rows(0, [{"step": 0, "time": 1.0, "loss": 0.5}])
    opened.session._configure({"nproc": 2})
    eventually(lambda: opened.kinds("reset"), within_s=WITHIN_S)
    assert opened.kinds("reset")[-1]["series"] == []


def test_a_restart_clears_what_the_old_ranks_held_and_ran(opened: Opened) -> None:
    view = opened.live._view
    plan = nbdist.plan("1b", devices="2x24GB,pcie", seq_len=512)
    view.plan_view = view_from_plan(plan, opened.session.options)
    view.devices.peak_bytes[0] = view.devices.strategy_peak_bytes[0] = 1 << 40
    assert view.snapshot()["strategies"]["rows"]
    opened.session.state = "starting"  # what a cell or the driver would plan must wait for it
    opened.session._configure({"nproc": 2})
    found = view.snapshot()
    assert found["strategies"] == {"rows": [], "note": NO_MODEL_MESSAGE}
    assert [one["predicted_bytes"] for one in found["devices"]] == [None, None]
    assert (found["devices"][0]["peak_bytes"] or 0) < 1 << 40
    view.plan_view = view_from_plan(plan, opened.session.options)  # of the new ranks: it stays
    assert view.snapshot()["strategies"]["rows"]


def test_other_devices_are_another_plan(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    view, planned = opened.live._view, []
    opened.live.close()
    monkeypatch.setattr(view, "update_plan", lambda *, quick: planned.append(quick))
    opened.session._cells.last_cell = Cell([0, 1], None, on_send=print, on_done=print)  # type: ignore[arg-type]
    for nproc in (2, 2, 4):
        opened.session._choice = SessionConfig.from_options({"nproc": nproc, "backend": "ddp"})
        view.replan_if_changed(at_once=True)
    assert planned == [True, True]


def test_it_beats_when_there_is_nothing_to_say(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "HEARTBEAT_INTERVAL_S", 0.1)
    eventually(lambda: opened.kinds("beat"), within_s=WITHIN_S)


# ---------------------------------------------------------------------------- stop


def test_stop_interrupts_the_cell_at_once(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell([0, 1], None, on_send=print, on_done=print)  # type: ignore[arg-type]
    monkeypatch.setattr(opened.session, "interrupt", lambda: setattr(cell, "interrupted_at", 1.0))
    opened.session._cells.running_cell = cell
    with opened.session.lock:  # as the cell's thread does
        opened.command("interrupt")
        assert opened.answer()["ok"]
    assert cell.interrupted_at
    opened.session._cells.running_cell = None


def test_stop_says_what_cannot_be_stopped(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def export(folder: str) -> str:
        begun.set()
        assert end.wait(WITHIN_S)
        return folder

    monkeypatch.setattr(opened.session, "export", export)
    opened.command("interrupt", identity="0")
    assert opened.answer("0")["text"] == "No cell is running."
    opened.command("export", folder="out")
    assert begun.wait(WITHIN_S)
    opened.command("interrupt", identity="2")
    answer = opened.answer("2")
    assert not answer["ok"]
    assert "Cannot interrupt export out" in answer["text"]
    end.set()
    assert opened.answer()["ok"]


def test_stop_leaves_a_magic_to_the_notebooks_own_interrupt(opened: Opened) -> None:
    with opened.session.lock, opened.session.operation.track("loading", "loading base"):
        opened.command("interrupt")
        opened.command("nonsense", identity="2")
        opened.answer("2")
    assert [one["id"] for one in opened.kinds("answer")] == ["2"]


# ---------------------------------------------------------------------------- logs


@pytest.mark.fault("G1")
def test_a_log_is_searched_and_has_no_escapes(opened: Opened) -> None:
    opened.session.logs[1].append("\x1b[31mred <b>LINE</b>\x1b[0m\nother\n")
    opened.live.receive_message({"kind": "log", "rank": 1, "search": "line"})
    opened.live.receive_message({"kind": "log", "rank": 7, "search": ""})
    eventually(lambda: len(opened.kinds("log")) == 2, within_s=WITHIN_S)
    assert [one["lines"] for one in opened.kinds("log")] == [["red <b>LINE</b>"], []]


def test_a_line_that_is_cut_ends_with_an_ellipsis(opened: Opened) -> None:
    opened.session.logs[0].append("x" * 1000 + "\n" + "y" * snapshot.MAX_LINE_CHARS)
    opened.live.receive_message({"kind": "log", "rank": 0, "search": ""})
    eventually(lambda: opened.kinds("log"), within_s=WITHIN_S)
    cut, whole = opened.kinds("log")[0]["lines"]
    assert cut == "x" * (snapshot.MAX_LINE_CHARS - 1) + "\N{HORIZONTAL ELLIPSIS}"
    assert whole == "y" * snapshot.MAX_LINE_CHARS


def test_a_picture_says_how_much_was_printed_though_the_last_line_is_the_same(
    opened: Opened,
) -> None:
    for times in (1, 2):
        opened.session.logs[0].append("again\n")
        rank = opened.live._view.snapshot()["ranks"][0]
        assert (rank["line"], rank["written"]) == ("again", 6 * times)


# ---------------------------------------------------------------------------- the widget


def test_a_panel_that_cannot_be_made_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = nbdist.Session(nproc=1)
    made: list[Any] = []

    class Widget:
        def __init__(self, *_: object) -> None:
            made.append(self)
            if len(made) == 1:
                raise FileNotFoundError("panel.js")

        def send_message(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "nbdist.panel.widget", SimpleNamespace(PanelWidget=Widget))
    with pytest.raises(FileNotFoundError):
        panel._open(session)
    opened = panel._open(session)
    assert panel._open(session) is opened
    opened.freeze()
    opened.freeze()  # as the session's end does, once more
    assert panel._view(session).panel is None


def test_two_sessions_have_two_panels() -> None:
    one, other = Opened(), Opened()
    try:
        one.session.metrics.add_rows(0, [{"step": 0, "time": 1.0, "loss": 0.25}])
        eventually(lambda: 0.25 in one.points(), within_s=WITHIN_S)
        assert 0.25 not in other.points()
    finally:
        one.live.close()
        other.live.close()
