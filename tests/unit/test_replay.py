"""The output of a cell, shown again on another screen."""

from __future__ import annotations

from typing import Any

from fake_screen import FakeScreen

from nbdist.output.replay import RecordingSink

BAR = "\r{0:3d}%|{1:<10}| outer\n\r{2:3d}%|{3:<5}| inner\x1b[A"
"""Two nested bars of tqdm: the inner one is drawn in the row below, then the cursor moves up."""


def replayed(recorder: RecordingSink) -> FakeScreen:
    screen = FakeScreen()
    recorder.replay(screen)
    return screen


def test_lines_streams_and_displays_are_shown_in_order() -> None:
    recorder = RecordingSink(FakeScreen())
    recorder.write("stdout", "one\ntwo\n")
    recorder.write("stderr", "careful\n")
    recorder.display({"text/html": "<b>3</b>"}, {})
    recorder.write("stdout", "half")
    recorder.write("stdout", " a line\nend")
    assert replayed(recorder).outputs == [
        ["stdout", "one\ntwo\n"],
        ["stderr", "careful\n"],
        ["display", {"text/html": "<b>3</b>"}, None, {}],
        ["stdout", "half a line\nend\n"],
    ]


def test_bars_are_shown_in_their_last_state() -> None:
    recorder = RecordingSink(FakeScreen())
    for percent in range(0, 101, 10):
        recorder.write("stderr", BAR.format(percent, "#" * (percent // 10), 40, "##"))
    recorder.write("stdout", "printed beside the bar\n")
    text = replayed(recorder).text
    assert text.count("outer") == text.count("inner") == 1
    assert "100%|##########| outer" in text
    assert "printed beside the bar" in text


def test_a_display_is_shown_in_its_last_state_and_can_still_be_updated() -> None:
    recorder = RecordingSink(FakeScreen())
    recorder.display({"text/plain": "0 %"}, {}, display_id="bar")
    recorder.display({"text/plain": "80 %"}, {}, display_id="bar", update=True)
    screen = replayed(recorder)
    assert screen.outputs == [["display", {"text/plain": "80 %"}, "bar", {}]]
    recorder.sink = screen
    recorder.display({"text/plain": "90 %"}, {}, display_id="bar", update=True)
    assert screen.outputs[0][1] == {"text/plain": "90 %"}


def test_cleared_output_is_forgotten() -> None:
    recorder = RecordingSink(FakeScreen())
    recorder.write("stdout", "epoch 1\n")
    recorder.clear(wait=True)
    assert "epoch 1" in replayed(recorder).text  # shown until new output arrives
    recorder.write("stdout", "epoch 2\n")
    assert replayed(recorder).text == "epoch 2\n"
    recorder.clear(wait=False)
    assert replayed(recorder).outputs == []


def test_a_widget_is_opened_again_with_its_last_state() -> None:
    recorder = RecordingSink(FakeScreen())
    opened: dict[str, Any] = {"comm_id": "c1", "data": {"state": {"value": 0, "max": 9}}}
    recorder.relay_comm("comm_open", opened, {}, [])
    update = {"comm_id": "c1", "data": {"method": "update", "state": {"value": 7}}}
    recorder.relay_comm("comm_msg", update, {}, [])
    ((kind, content, _, _),) = replayed(recorder).relayed
    assert kind == "comm_open"
    assert content["data"]["state"] == {"value": 7, "max": 9}


def test_a_flood_keeps_its_end() -> None:
    recorder = RecordingSink(FakeScreen())
    for number in range(20_000):
        recorder.write("stdout", f"line {number}\n")
    lines = replayed(recorder).text.splitlines()
    assert "the first 15,000 lines and displays are not kept" in lines[0]
    assert lines[1:] == [f"line {number}" for number in range(15_000, 20_000)]


def test_figures_are_kept_within_a_bound() -> None:
    recorder = RecordingSink(FakeScreen())
    for number in range(1_000):
        recorder.display({"image/png": "x" * 1_000_000, "text/plain": str(number)}, {})
    outputs = replayed(recorder).outputs
    assert sum(len(output[1].get("image/png", "")) for output in outputs[1:]) <= 20_000_000
    assert outputs[-1][1]["text/plain"] == "999"
