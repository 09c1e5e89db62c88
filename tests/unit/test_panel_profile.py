"""A profile in the panel: its view, its static faces, its button."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest

import nbdist
from nbdist.display import STEP_COLORS
from nbdist.panel import static_page
from nbdist.panel.commands import PanelCommand, parse_message
from nbdist.panel.controller import PanelData
from nbdist.panel.protocol import AdviceView, ProfiledRank, ProfileView
from nbdist.panel.snapshot import EMPTY_PROFILE_VIEW, ProfileViewCache, view_from_profile
from nbdist.planner import target_devices
from nbdist.profiler.advice import Advice, Speedup
from nbdist.profiler.measurements import STEP_PARTS, PeakMemory, RankProfile
from nbdist.profiler.profile import Profile
from nbdist.profiler.profile_data import ProfiledConfig
from nbdist.session.profiler import ProfileOptions, ProfileRun
from nbdist.strategies import Options
from tests.unit import profile_figures

if TYPE_CHECKING:
    from nbdist import Session

EVIL = "<img src=x onerror=alert(1)>"
ROOT = Path(__file__).parents[2]
GAIN = Speedup(faster=0.35, low=0.28, high=0.43)
DDP = Options(backend="ddp", precision="no")


def figures(rank: int, **more: Any) -> RankProfile:
    """Ten steps of 200 ms, most of them in the loader."""
    parts = {"data": 0.12, "forward": 0.02, "backward": 0.04, "communication": 0.02}
    usual = profile_figures.rank(
        rank, steps=10, loader={"fetch_s": 0.1}, **parts, optimizer=0.0, python=0.0
    )
    memory = PeakMemory(parts={"parameters": 3 << 30, "buffers": 0}, lines=[])
    return replace(usual, model=None, begins={}, memory=memory, **more)


def profile(options: Options = DDP, **more: Any) -> Profile:
    setting = ProfiledConfig(options=options, cluster=target_devices.parse_devices("2xcpu"))
    return Profile.of([figures(0, **more), figures(1)], setting)


def advised(*advice: Advice) -> Profile:
    """A profile that gives just this advice."""
    made = profile()
    made.__dict__["advice"] = advice
    return made


def switch_to(line: str = "%nbdist switch zero2", **changes: Any) -> Advice:
    return Advice(title="zero2", why="It moves less.", line=line, gain=GAIN, changes=changes)


# ---------------------------------------------------------------------------- the view


def test_a_profile_becomes_a_plain_view_with_everything_in_it() -> None:
    found = view_from_profile(profile(notes=["no device rows."]), DDP)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == set(get_type_hints(ProfileView))
    assert "input" in found["verdict"]
    assert found["facts"].startswith("10 steps of 200 ms, p50 200 ms, p90 200 ms")
    assert found["time"] == pytest.approx(profile_figures.BEGAN + 2)
    assert [set(one) for one in found["ranks"]] == [set(get_type_hints(ProfiledRank))] * 2
    assert found["notes"] == ["rank 0: no device rows."]
    first = found["ranks"][0]
    order = [span["part"] for span in first["parts"]]
    assert order == [part for part in STEP_PARTS if part in order]
    assert sum(span["seconds"] for span in first["parts"]) == pytest.approx(first["step_s"])
    assert first["figures"] == (
        "p90 200 ms; all_reduce 4.0 MiB in 20 ms, 0.2 GB/s; peak memory: parameters 3.0 GiB"
    )
    assert found["advice"][0]["title"].startswith("num_workers=")
    assert "DataLoader(" in found["advice"][0]["command"]
    assert (found["advice"][0]["arguments"], found["advice"][0]["effect"]) == ({}, "")


def test_advice_that_is_a_switch_can_be_pressed() -> None:
    made = advised(switch_to(backend="zero2", accumulate=4))
    (found,) = view_from_profile(made, DDP)["advice"]
    assert set(found) == set(get_type_hints(AdviceView))
    assert found["arguments"] == {"backend": "zero2", "accumulate": 4}
    assert "from ddp to zero2, accumulate 4" in found["effect"]
    assert found["text"] == f"{made.advice[0].gain_text}. It moves less."
    message = {"kind": "command", "id": "1", "name": "switch", "arguments": found["arguments"]}
    assert isinstance(parse_message(message), PanelCommand)


@pytest.mark.parametrize(
    "changes",
    [
        {"fsdp_config": {"a": 1}},
        {"backend": "zero2", "compile": True},
        {"turn": 1},
        {"nproc": 3},
        {},
    ],
    ids=repr,
)
def test_advice_that_no_button_can_do_is_a_line_to_paste(changes: dict[str, Any]) -> None:
    (found,) = view_from_profile(advised(switch_to(**changes)), DDP)["advice"]
    assert (found["arguments"], found["effect"]) == ({}, "")
    assert found["command"] == "%nbdist switch zero2"


def test_advice_that_was_followed_is_no_longer_offered() -> None:
    made = advised(switch_to(backend="zero2"))
    assert view_from_profile(made, replace(DDP, backend="zero2"))["advice"][0]["arguments"] == {}


def test_a_view_is_made_once_and_again_after_a_switch() -> None:
    made = profile()
    session: Any = SimpleNamespace(profiles=[], options=DDP, why_no_profile=lambda: "stopped.")
    kept = ProfileViewCache()
    assert kept.current_view(session) == {**EMPTY_PROFILE_VIEW, "unavailable_reason": "stopped."}
    session.profiles = [made]
    first = kept.current_view(session)
    assert first["verdict"] == made.verdict
    made.__dict__["verdict"] = "another"
    assert kept.current_view(session) == first
    session.options = replace(DDP, backend="zero2")
    assert kept.current_view(session)["verdict"] == "another"


@pytest.mark.fault("G5")
def test_a_profile_that_cannot_be_read_is_not_the_end_of_the_panel() -> None:
    broken: Any = SimpleNamespace(verdict="input-bound")
    session: Any = SimpleNamespace(profiles=[broken], options=DDP, why_no_profile=str)
    assert (
        "Cannot show the profile (AttributeError"
        in ProfileViewCache().current_view(session)["verdict"]
    )


def test_of_many_ranks_the_first_have_bars_and_the_slowest() -> None:
    made = Profile(ranks=tuple(map(figures, range(100))), setting=profile().setting)
    made.__dict__.update(
        verdict="input-bound", advice=(), straggler_details=SimpleNamespace(rank=77)
    )
    found = view_from_profile(made, DDP)
    ranks = [one["rank"] for one in found["ranks"]]
    assert ranks[:3] == [0, 1, 2]
    assert [one["rank"] for one in found["ranks"] if one["straggler"]] == [77]
    assert f"and {100 - len(ranks)} more ranks" in found["notes"][-1]


# ---------------------------------------------------------------------------- the picture


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session with a profile whose words are markup, and another one under way."""
    made = nbdist.Session(nproc=2, backend="ddp")
    done = advised(
        Advice(title=EVIL, why=EVIL, line=EVIL, gain=GAIN, changes={"backend": "zero2"}),
    )
    done.__dict__.update(verdict=f"input-bound: {EVIL}", advice_outcome=EVIL)
    profiler = made._profiler
    monkeypatch.setattr(profiler, "profiles", [done])
    profiler.current_run = ProfileRun(options=ProfileOptions(steps=10), text="profiling: step 4")
    return made


def test_the_window_that_is_open_is_the_progress(session: Session) -> None:
    found = PanelData(session).snapshot()
    assert found["progress"] is not None
    progress = found["progress"]
    assert (progress["text"], progress["fraction_done"]) == ("profiling: step 4", 0.4)
    assert found["profile"]["verdict"] == f"input-bound: {EVIL}"


@pytest.mark.fault("G1")
def test_static_faces_show_the_profile_and_its_markup_as_text(session: Session) -> None:
    drawn = PanelData(session).snapshot()
    page = static_page.render_html(drawn, {})
    assert "<img src=x" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") == 5
    for face in (page, static_page.render_text(drawn, {})):
        for part in (
            "input-bound", "rank 0", "rank 1", "data 60%", "backward 20%", "200 ms", "4.0 MiB",
            "about 35 % faster", "profiling: step 4",
        ):  # fmt: skip
            assert part in face, part
    widths = [float(one) for one in re.findall(r"float:left;height:100%;width:([\d.]+)%", page)]
    assert sum(widths) == pytest.approx(200, abs=0.1)
    assert "[" + "d" * 24 + "F" * 4 + "B" * 8 + "C" * 4 + "]" in static_page.render_text(drawn, {})


def test_every_part_has_a_colour_a_letter_and_a_pattern() -> None:
    assert tuple(STEP_COLORS) == tuple(static_page.STEP_PART_LETTERS) == STEP_PARTS
    assert len(set(static_page.STEP_PART_LETTERS.values())) == len(STEP_PARTS)
    style = (ROOT / "widgets" / "src" / "panel.css").read_text()
    patterns = dict(re.findall(r'\[data-part="(\w+)"\] \{ background(?:-image)?: (.*?) \}', style))
    assert set(patterns) == set(STEP_PARTS) - {"forward"}
    assert len(set(patterns.values())) == len(patterns)
