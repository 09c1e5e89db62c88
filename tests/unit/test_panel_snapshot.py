from __future__ import annotations

import base64
import html as html_module
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import pytest

import nbdist
from nbdist import number_formatting, panel
from nbdist.display import MEMORY_COLORS, STEP_COLORS
from nbdist.errors import OptionError, RankDied
from nbdist.hardware.discovery import Machine, SessionNode
from nbdist.hardware.telemetry import GpuReading, NodeUsage
from nbdist.panel import plan_view, protocol, snapshot
from nbdist.panel import static_page as static
from nbdist.panel.controller import PanelData
from nbdist.panel.device_sampler import DeviceSnapshot
from nbdist.panel.plan_view import PlanView, view_from_plan
from nbdist.panel.protocol import MEMORY_PARTS, PanelState
from nbdist.session import planner
from nbdist.session.cell import Cell
from nbdist.session.checkpoints import Save
from nbdist.session.metrics import TrainingEvent
from nbdist.strategies import Options
from tests.session_internals import cell_runner, workers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from nbdist import Session

EVIL = "<img src=x onerror=alert(1)>"
GIB = 1 << 30


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Session:
    monkeypatch.chdir(tmp_path)  # without checkpoints
    return nbdist.Session(nproc=2, backend="ddp")


def drawn(session: Session, **more: Any) -> PanelState:
    return PanelData(session).snapshot(**more)


def cell_of(session: Session, *, count: int = 4) -> Cell:
    cell = Cell([0, 1], None, on_send=print, on_done=print, on_comm=print)  # type: ignore[arg-type]
    cell.count = count
    cell_runner(session).running_cell, session.state = cell, "ready"
    return cell


# ---------------------------------------------------------------------------- snapshot


def test_a_snapshot_is_plain_and_complete(session: Session) -> None:
    found = drawn(session)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == set(get_type_hints(PanelState))
    assert found["header"]["state"] == "new"
    assert found["header"]["place"].startswith("2 CPU ranks")
    assert found["strategies"]["rows"] == []
    assert "prepare()" in found["strategies"]["note"]
    assert found["ranks"] == []
    with session.operation.track("starting", "starting"):
        assert [rank["state"] for rank in drawn(session)["ranks"]] == ["starting"] * 2


def test_a_running_cell_has_its_number_and_its_time(session: Session) -> None:
    cell = cell_of(session)
    head = drawn(session)["header"]
    assert (head["state"], head["description"], head["state_since"]) == (
        "running",
        "running cell 4",
        cell.started_at,
    )
    cell.interrupted_at = time.time()
    assert drawn(session)["header"]["description"] == "stopping cell 4"
    cell.interrupted_at -= 10
    silent = "cell 4: ranks 0, 1 do not respond to Stop; Restart ends the ranks"
    assert drawn(session)["header"]["description"] == silent
    cell.failure = RankDied("the ranks were restarted")
    assert not cell.is_interrupted


def test_outside_of_a_kernel_the_kernel_id_is_none() -> None:
    code = (
        "from IPython.terminal.interactiveshell import TerminalInteractiveShell as Shell\n"
        "from IPython.terminal.ipapp import TerminalIPythonApp\n"
        "TerminalIPythonApp.instance(); Shell.instance()\n"
        "from nbdist.panel import snapshot\n"
        "assert snapshot.jupyter_kernel_id() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_long_work_is_the_state_and_the_progress(session: Session) -> None:
    with session.operation.track("exporting", "exporting to out"):
        session.operation.set_text("export: writing, 42%")
        found = drawn(session)
    assert found["header"]["state"] == "exporting"
    assert found["progress"] is not None
    assert found["progress"]["text"] == "export: writing, 42%"
    assert found["progress"]["fraction_done"] == 0.42
    assert drawn(session)["progress"] is None


def test_only_changed_keys_are_sent(session: Session) -> None:
    before = drawn(session)
    assert snapshot.changed_keys(before, drawn(session)) == {}
    session.events.add(TrainingEvent(3, "save", "base"))
    assert set(snapshot.changed_keys(before, drawn(session))) == {"marks"}
    assert set(snapshot.changed_keys(None, before)) == set(before)


def test_saves_that_run_and_fail_are_among_the_checkpoints(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, failed = Save(), Save()
    running.name, failed.name, failed.error = "now", EVIL, "no room"
    monkeypatch.setattr(session, "saves_running", lambda: [running])
    session.checkpoints.failed_saves.append(failed)
    found = drawn(session)
    assert {(one["name"], one["state"]) for one in found["checkpoints"]} == {
        ("now", "running"),
        (EVIL, "failed"),
    }
    assert found["progress"] is not None
    assert found["progress"]["text"] == "writing checkpoint now"


def test_a_peak_beyond_the_prediction_is_said(session: Session) -> None:
    view = PanelData(session)
    view.plan_view = PlanView(device_bytes=10 * GIB, stated_error=0.05)
    view.devices.history.append(DeviceSnapshot(time.time(), [GpuReading(used_bytes=GIB)] * 2))
    view.devices.device_slots  # noqa: B018 - the seats are taken
    view.devices.strategy_peak_bytes.update({0: int(10.4 * GIB), 1: int(11 * GIB)})
    first, second = view.snapshot()["devices"]
    assert first["note"] == ""
    assert "10% above the prediction, whose stated error is 5%" in second["note"]
    view.plan_view = PlanView(device_bytes=10 * GIB, stated_error=None)  # CPU ranks
    assert view.snapshot()["devices"][1]["note"] == ""


# ---------------------------------------------------------------------------- the plan


@pytest.fixture(scope="module")
def plan() -> Any:
    return nbdist.plan("1b", devices="2x24GB,pcie", seq_len=512)


def test_a_plan_becomes_rows(plan: Any) -> None:
    found = view_from_plan(plan, Options(backend="ddp", precision="bf16"))
    rows = found.strategies["rows"]
    (current,) = [row for row in rows if row["current"]]
    assert current["backend"] == "ddp"
    assert current["arguments"] == {}
    assert found.device_bytes == current["device_bytes"]
    assert found.stated_error == plan.row("ddp").margin.total
    for row in rows:
        assert sum(one["bytes"] for one in row["parts"]) == pytest.approx(
            row["device_bytes"], rel=0.01
        )
        assert {one["part"] for one in row["parts"]} <= set(MEMORY_PARTS)
        if not row["current"] and "--fsdp-config" not in row["command"]:
            assert row["arguments"]["backend"] == row["backend"]
            assert "Weights, optimizer state and variables are kept" in row["effect"]
    assert sum(row["recommended"] for row in rows) == (plan.best is not None)


def test_the_current_row_follows_a_switch_at_once(
    session: Session, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, before = PanelData(session), Options(backend="ddp", precision="bf16")
    view.plan_view = view_from_plan(plan, before)
    monkeypatch.setattr(type(session), "options", replace(before, backend="zero2"))
    rows = view.snapshot()["strategies"]["rows"]
    assert [row["backend"] for row in rows if row["current"]] == ["zero2"]


def test_every_row_without_a_config_file_can_be_switched_to(plan: Any, session: Session) -> None:
    from nbdist.panel.commands import PanelCommand, parse_message

    for row in view_from_plan(plan, session.options).strategies["rows"]:
        if not row["current"] and "--fsdp-config" not in row["command"]:
            message = {
                "kind": "command",
                "id": "1",
                "name": "switch",
                "arguments": row["arguments"],
            }
            assert isinstance(parse_message(message), PanelCommand)
            assert session.differing(**row["arguments"])


def test_no_plan_says_why(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise nbdist.PlanError("MyModel has no closed form")

    monkeypatch.setattr(planner, "plan_model", fails)
    assert plan_view.plan_session_model(session, quick=True).strategies == {
        "rows": [],
        "note": "MyModel has no closed form",
    }


# ---------------------------------------------------------------------------- static faces


def curve(steps: Iterable[float], values: Iterable[float]) -> Any:
    steps = list(steps)
    return np.column_stack([steps, steps, list(values)]).astype(float)


def evil(session: Session) -> tuple[PanelState, dict[str, Any]]:
    """A state with markup in everything that a user names."""
    session.state = "ready"
    found: Any = drawn(
        session, notice=snapshot.make_notice("error", EVIL), queue=[{"id": "1", "text": EVIL}]
    )
    found["header"]["options"] = EVIL
    found["header"]["description"] = EVIL
    found["checkpoints"] = [
        {
            "name": EVIL,
            "step": 1,
            "size_bytes": 5,
            "backend": EVIL,
            "saved_at": 0.0,
            "seconds": 1.0,
            "path": EVIL,
            "state": "failed",
            "error": EVIL,
        }
    ]
    found["nodes"] = [{"name": EVIL, "description": EVIL, "host_bytes": 5, "host_used_bytes": 1}]
    for one in (*found["ranks"], *found["devices"]):
        one["node"] = EVIL
    for rank in found["ranks"]:
        rank |= {"last_line": EVIL, "current_line": EVIL, "device": EVIL}
    for device in found["devices"]:
        device |= {"name": EVIL, "other_processes": [EVIL], "note": EVIL, "others_bytes": 5}
    found["marks"] = [{"step": 1, "time": 1.0, "kind": "save", "text": EVIL}]
    found["strategies"] = {
        "rows": [
            {
                "id": "x",
                "backend": EVIL,
                "label": EVIL,
                "device_bytes": 5,
                "capacity_bytes": 10,
                "parts": [{"part": EVIL, "bytes": 5}],
                "fits": True,
                "current": False,
                "recommended": True,
                "tokens_per_s": 5.0,
                "why": EVIL,
                "command": EVIL,
                "effect": EVIL,
                "arguments": {},
            }
        ],
        "note": EVIL,
    }
    points = curve([0, 1], [1, float("nan")])
    return found, {EVIL: points, "loss": points}


def full(session: Session, plan: Any) -> tuple[PanelState, dict[str, Any]]:
    """A session of which there is something to say everywhere, on a GPU."""
    cell_of(session)
    session.events.add(TrainingEvent(3, "switch", "ddp -> zero3"))
    view = PanelData(session)
    view.plan_view = view_from_plan(plan, Options(backend="ddp", precision="bf16"))
    found: Any = view.snapshot(
        queue=[{"id": "1", "text": "save later"}], notice=snapshot.make_notice("error", "no room.")
    )
    found["progress"] = {"text": "export: writing", "fraction_done": 0.42, "started_at": 1.0}
    found["devices"][0] |= {
        "name": "NVIDIA A100", "kind": "cuda", "used_bytes": 7 * GIB, "peak_bytes": 9 * GIB,
        "others_bytes": 2 * GIB, "other_processes": ["python (pid 4711)"], "note": "told apart",
        "utilization": 0.87, "power_w": 312.4, "power_limit_w": 400.0, "temperature_c": 61.0,
        "pcie_tx": 3.0 * GIB, "pcie_rx": 1.5 * GIB, "nvlink_tx": 50.0 * GIB,
        "nvlink_rx": 49.0 * GIB,
    }  # fmt: skip
    found["ranks"][1] |= {"pid": 4712, "last_line": "epoch 1"}
    found["ranks"][1]["current_line"] = "In[3] line 7: step()"
    done = {"step": 5, "size_bytes": 3 * GIB, "backend": "zero3", "saved_at": time.time() - 130,
            "seconds": 1.0, "path": "/x", "error": ""}  # fmt: skip
    found["checkpoints"] = [
        {**done, "name": "base", "state": "done"},
        {**done, "name": "broken", "state": "failed", "error": "the disk is full"},
    ]
    points = curve([0, 1], [2, 1.25])
    return found, {"accuracy": points, "tokens/s": points, "loss": points}


@pytest.mark.parametrize("face", [static.render_html, static.render_text], ids=["html", "text"])
def test_a_static_face_says_what_the_widget_says(face: Any, session: Session, plan: Any) -> None:
    page = face(*full(session, plan))
    for part in (
        "running cell 4", "save later", "no room.", "export: writing, 42%",
        "NVIDIA A100", "7.0 GiB", "peak", "9.0 GiB", "2.0 GiB are held by python (pid 4711)",
        "told apart", "87% busy", "312 of 400 W", "61 \N{DEGREE SIGN}C", "PCIe 3.0 GiB/s out",
        "NVLink 50.0 GiB/s out, 49.0 GiB/s in",
        "fsdp2", "recommended", "does not fit", "tokens/s", "micro-batch 1 x 512",
        "epoch 1", "In[3] line 7: step()", "4712", "running",
        time.strftime("as of %Y-%m-%d "), f"nbdist {nbdist.__version__}",
        "base", "3.0 GiB", "2 min", "the disk is full", "1.25", "switch",
    ):  # fmt: skip
        assert part in page, part
    assert page.index("loss") < page.index("accuracy")
    assert "does not fit; does not fit" not in page


def test_huge_values_and_steps_are_drawn(session: Session) -> None:
    points = curve([2.0**62, 2.0**62], [1.7e308, -1.7e308])
    for curves in ({"a": points}, {"b": points[:1]}):
        page = static.render_html(drawn(session), curves)
        (drawing,) = re.findall(r"base64,([^']+)'", page)
        assert b"nan" not in base64.b64decode(drawing)
        assert "at step" in static.render_text(drawn(session), curves)


class Tags(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open += [tag] if tag not in {"br", "img"} else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.fault("G1")
def test_markup_of_the_user_is_text(session: Session) -> None:
    page = static.render_html(*evil(session))
    assert "<img src=x" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") > 15
    for drawing in re.findall(r"base64,([^']+)'", page):
        assert b"onerror" not in base64.b64decode(drawing)


@pytest.mark.fault("G1")
def test_what_front_ends_remove_is_not_used(session: Session) -> None:
    page = static.render_html(*evil(session))
    assert not re.search(r"<(script|style|svg|link|iframe)|javascript:|https?://", page)
    seen = Tags()
    seen.feed(page)
    assert seen.open == []
    assert seen.tags <= {"div", "b", "br", "span", "table", "tr", "td", "th", "img", "code", "ul",
                         "li", "details", "summary"}  # fmt: skip
    assert seen.attributes <= {"style", "title", "role", "aria-label", "colspan", "scope", "width",
                               "height", "alt", "src"}  # fmt: skip


@pytest.mark.parametrize("face", [static.render_html, static.render_text], ids=["html", "text"])
def test_non_finite_values_have_a_symbol_and_a_legend(face: Any, session: Session) -> None:
    values = [float("nan") if i == 77 else float(i) for i in range(200)]
    values[150] = -float("inf")
    curves = {"loss": curve(range(200), values), "fine": curve(range(200), range(200))}
    page = face(drawn(session), curves)
    key = "\N{MULTIPLICATION SIGN} NaN  \N{BLACK DOWN-POINTING TRIANGLE} -inf"
    assert page.count(key) == 1
    if face is static.render_text:
        (line,) = (one for one in page.splitlines() if "loss" in one)
        assert line.count("\N{MULTIPLICATION SIGN}") == 2  # on the curve and in its key
    else:
        strange, fine = (base64.b64decode(one) for one in re.findall(r"base64,([^']+)'", page))
        assert static.NON_FINITE_COLOR.encode() in strange
        assert fine.count(b"l6 6m0 -6l-6 6") == 0
        assert strange.count(b"l6 6m0 -6l-6 6") == 1
        assert strange.count(b"h6l-3 6z") == 1


@pytest.fixture
def on_nodes(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session on two nodes, of which the second does not answer."""
    bare = Machine((), None, 8, 64 * GIB)
    workers(session).nodes = [SessionNode("alpha", (0,), bare), SessionNode("b&ta", (1,), bare)]
    usage = {"alpha": NodeUsage(40 * GIB, {0: GpuReading(used_bytes=3 * GIB)})}
    monkeypatch.setattr(workers(session), "node_usage", lambda _within_s: usage)
    session.state = "ready"
    return session


@pytest.mark.parametrize("face", [static.render_html, static.render_text], ids=["html", "text"])
def test_devices_and_ranks_stand_below_their_nodes(face: Any, on_nodes: Session) -> None:
    view = PanelData(on_nodes)
    view.devices.sample_once()
    picture_now = view.snapshot()
    assert [one["host_used_bytes"] for one in picture_now["nodes"]] == [24 * GIB, None]
    assert [one["node"] for one in picture_now["ranks"]] == ["alpha", "b&ta"]
    page = html_module.unescape(re.sub(r"</?[a-z][^>]*>", " ", face(picture_now, {})))
    order = [
        "alpha", "host memory 24.0 GiB of 64.0 GiB", "CPU rank 0", "3.0 GiB",
        "b&ta", "host memory - of 64.0 GiB", "CPU rank 1",
    ]  # fmt: skip
    places = [page.index(one) for one in order]
    assert places == sorted(places)
    assert page.rindex("alpha") < page.rindex("b&ta")  # those of the ranks


def test_colours_stand_out_from_light_and_dark() -> None:
    assert set(MEMORY_COLORS) == {*MEMORY_PARTS, "margin"}
    for colour in MEMORY_COLORS.values():
        assert contrast(colour, "#ffffff") >= 3
        assert contrast(colour, "#111111") >= 3
    for colour in STEP_COLORS.values():
        assert contrast(colour, "#ffffff") >= 3.5  # of 11 px text that the table repeats


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        lit = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * lit[0] + 0.7152 * lit[1] + 0.0722 * lit[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (number_formatting.format_bytes(None), "-"),
        (number_formatting.format_bytes(312 << 20), "312 MiB"),
        (number_formatting.format_bytes(31.2 * GIB), "31.2 GiB"),
        (number_formatting.format_clock(42), "00:42"),
        (number_formatting.format_clock(3723), "1:02:03"),
        (number_formatting.format_tokens_per_s(12_345), "12.3k"),
        (number_formatting.format_tokens_per_s(840), "840"),
        (number_formatting.format_age(130), "2 min"),
    ],
)
def test_figures_in_words(given: str, message: str) -> None:
    assert given == message


# ---------------------------------------------------------------------------- choosing a face


def test_outside_of_a_notebook_it_is_text(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert panel.choose_output_format("auto") == "text"
    session.panel()
    assert "2 CPU ranks" in capsys.readouterr().out
    with pytest.raises(OptionError, match="this is not a notebook"):
        session.panel("widget")
    with pytest.raises(OptionError, match="Unknown panel format 'video'"):
        session.panel("video")


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kernel is here, and a bundle."""
    monkeypatch.setattr(panel, "get_kernel", object)
    script = tmp_path / "panel.js"
    script.touch()
    script.with_suffix(".css").touch()
    monkeypatch.setattr(protocol, "SCRIPT", script)
    monkeypatch.setattr(protocol, "STYLE", script.with_suffix(".css"))
    return script


@pytest.mark.usefixtures("notebook")
def test_in_a_notebook_it_is_live() -> None:
    assert panel.choose_output_format("auto") == "widget"
    assert panel.choose_output_format("html") == "html"


@pytest.mark.usefixtures("notebook")
def test_on_kaggle_it_is_html(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert panel.choose_output_format("auto") == "html"


def test_without_a_bundle_it_is_html(notebook: Path) -> None:
    notebook.unlink()
    assert panel.choose_output_format("auto") == "html"
    with pytest.raises(OptionError, match=r"panel\.js was not built"):
        panel.choose_output_format("widget")
