from __future__ import annotations

import json
import struct
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist import panel
from nbdist.panel.controller import UPDATE_INTERVAL_S, PanelController, PanelData
from nbdist.panel.curves import curve_history
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
        return [message for message, _ in list(self.sent) if message["kind"] == kind]

    def command(self, name: str, /, identity: str = "1", **arguments: Any) -> None:
        message = {"kind": "command", "id": identity, "name": name, "arguments": arguments}
        self.live.receive_message(message)

    def answer(self, identity: str = "1") -> Any:
        def found() -> list[Any]:
            return [one for one in self.kinds("answer") if one["id"] == identity]

        eventually(found, within_s=WITHIN_S)
        return found()[0]

    def points(self) -> list[float]:
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


@pytest.mark.fault("G2")
@pytest.mark.fault("G4")
def test_a_flood_of_messages_makes_no_flood_of_answers(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nbdist.panel.controller")
    began = time.monotonic()
    for _ in range(2000):
        opened.live.receive_message({"kind": "hello"})
        opened.live.receive_message({"kind": "eval", "code": "x" * 1000})
        opened.live.receive_message("rubbish", [b"x"])
    opened.command("plan", identity="last")
    assert not opened.answer("last")["ok"]  # no model is prepared
    num_updates = (time.monotonic() - began) / UPDATE_INTERVAL_S
    assert 1 <= len(opened.kinds("reset")) <= num_updates + 2
    assert caplog.text.count("invalid message of a page") > 100


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
    opened.live.receive_message({"kind": "hello"})
    eventually(lambda: opened.kinds("reset"), within_s=WITHIN_S)


@pytest.mark.fault("G5")
def test_a_failure_to_send_is_not_the_end(opened: Opened) -> None:
    opened.failing = 1
    opened.live.receive_message({"kind": "hello"})
    eventually(lambda: not opened.failing, within_s=WITHIN_S)
    opened.live.receive_message({"kind": "hello"})
    eventually(lambda: opened.kinds("reset"), within_s=WITHIN_S)


# ---------------------------------------------------------------------------- stop


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

        def send(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "nbdist.panel.widget", SimpleNamespace(PanelWidget=Widget))
    with pytest.raises(FileNotFoundError):
        panel.open_panel(session)
    opened = panel.open_panel(session)
    assert panel.open_panel(session) is opened
    opened.freeze()
    opened.freeze()  # as the session's end does, once more
    assert panel.panel_data(session).panel is None
