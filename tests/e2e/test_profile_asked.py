"""How a profile is asked for: in a cell, of a running loop, wrongly; training goes on unharmed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist import CellError, OptionError, RankDied, SessionError
from tests import bottleneck_loops
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Session
    from tests.live_kernel import LiveKernel

SMALL = "model, optimizer, loader = build(batch_size=1, length=16, hidden=64)"
PLAIN = """
weight = torch.nn.Parameter(torch.ones(64, 64))
alone = accelerator.prepare(torch.optim.SGD([weight], lr=1e-3))
for step in range(10):
    (torch.ones(8, 64) @ weight).square().mean().backward()
    alone.step()
    alone.zero_grad()
"""
"""Needs no other rank."""
FOREVER = """
batch = next(iter(loader))
while True:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=loss)
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two CPU ranks with a small model."""
    with nbdist.Session(nproc=2, precision="no") as running:
        running.run(bottleneck_loops.SETUP + SMALL)
        yield running


def loop(steps: int) -> str:
    return bottleneck_loops.BottleneckLoop(name="").cell(steps)


def running_loop(session: Session) -> nbdist.CellResult:
    """Begin a loop in the background; returns once it trains."""
    before = len(session.metrics)
    result = session.run(FOREVER, background=True)
    eventually(lambda: len(session.metrics) > before + 1, within_s=60)
    return result


def end(session: Session, result: nbdist.CellResult) -> None:
    """Stop a loop; its variables stay."""
    session.interrupt()
    with pytest.raises(CellError):
        result.wait(60)


def trains(session: Session) -> bool:
    """Whether the ranks still train together, with equal weights."""
    session.run(loop(2))
    digest = "round(sum(p.double().abs().sum().item() for p in model.parameters()), 6)"
    return len(set(session.run(digest).values.values())) == 1


# ------------------------------------------------------------------ the ways to ask for one


def test_a_loop_that_runs_is_profiled_while_it_goes_on(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, result = len(session.profiles), running_loop(session)
    asked = session.profile(steps=3)
    assert "profiling the running cell" in str(asked)
    assert not asked.is_armed
    eventually(lambda: len(session.profiles) > seen, within_s=60)
    assert not result.done
    shown = ""

    def is_reported() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return session.profiles[-1].verdict in shown

    eventually(is_reported, within_s=10)
    reported = len(session.metrics)
    eventually(lambda: len(session.metrics) > reported, within_s=30)
    end(session, result)
    assert trains(session)


def test_the_next_cell_is_profiled_where_none_runs(session: Session) -> None:
    seen = len(session.profiles)
    assert "next %%distribute cell" in str(session.profile(steps=2))
    assert session.profiling is not None
    assert session.profiling.is_armed
    session.run(loop(8))
    assert len(session.profiles) == seen + 1
    session.run(loop(2))
    assert len(session.profiles) == seen + 1


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("for batch in loader:\n    model(**batch).loss\n    break", "optimizer step"),
        (loop(0), "step"),
        ("1 + 1", "optimizer step"),
    ],
    ids=["no step", "one step", "no loop"],
)
def test_a_cell_without_a_loop_is_rejected_in_a_sentence(
    session: Session, capsys: pytest.CaptureFixture[str], code: str, says: str
) -> None:
    seen = len(session.profiles)
    session.run(code, profile=True)
    shown = capsys.readouterr().err
    (line,) = [line for line in shown.splitlines() if "no profile: " in line]
    assert says in line
    assert "Traceback" not in shown
    assert len(session.profiles) == seen
    assert session.profiling is None
    assert trains(session)


def test_stop_inside_the_window_keeps_the_training(session: Session) -> None:
    result = running_loop(session)
    session.profile(steps=1000)
    eventually(lambda: re.search(r"step [1-9]", session.profiling.text), within_s=60)
    end(session, result)
    eventually(lambda: session.profiling is None, within_s=10)
    assert trains(session)


def test_a_rank_that_does_not_take_part_is_said(session: Session) -> None:
    session.run(PLAIN, ranks=[0], profile={"steps": 3})
    profile = session.profiles[-1]
    assert [one.rank for one in profile.ranks] == [0]
    assert "rank 1 did not run this cell." in profile.notes


def test_a_rank_without_steps_is_said(session: Session) -> None:
    session.run(f"if rank == 0:{PLAIN}".replace("\n", "\n    "), profile={"steps": 3})
    profile = session.profiles[-1]
    assert [one.rank for one in profile.ranks] == [0]
    assert any(note.startswith("rank 1: ") for note in profile.notes)


@pytest.mark.parametrize("steps", [0, -1, 1001, "three", 2.5, True])
def test_a_bad_number_of_steps_is_refused(session: Session, steps: object) -> None:
    with pytest.raises(OptionError, match="1 to 1000"):
        session.run("1", profile={"steps": steps})
    with pytest.raises(OptionError, match="1 to 1000"):
        session.profile(steps=steps)  # type: ignore[arg-type]
    assert session.profiling is None


@pytest.mark.parametrize("trace", ["/proc/nowhere", __file__])
def test_a_folder_that_cannot_be_written_is_refused(session: Session, trace: str) -> None:
    with pytest.raises(OptionError, match="Cannot write to --trace"):
        session.profile(trace=trace)
    assert session.profiling is None


@pytest.mark.nightly
def test_a_wish_outlives_a_switch_and_a_restart() -> None:
    with nbdist.Session(nproc=2, precision="no") as session:
        session.profile(steps=2)
        session.run(bottleneck_loops.SETUP + SMALL)
        assert session.profiling is None
        session.profile(steps=2)
        session.switch("fsdp2")
        session.run(loop(8))
        assert session.profiles[-1].ranks[0].model.backend == "fsdp2"
        session.profile(steps=2)
        session.restart()
        session.run(bottleneck_loops.SETUP + SMALL + loop(8))
        assert len(session.profiles) == 2


@pytest.mark.nightly
def test_a_profile_ends_with_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with nbdist.Session(nproc=2, precision="no") as session:
        session.run(bottleneck_loops.SETUP + SMALL)
        running_loop(session)
        session.profile(steps=1000)
        session.restart()
        assert session.profiling is None
        assert "the ranks were restarted" in capsys.readouterr().err
        with pytest.raises(RankDied):
            session.run("import os\nif rank == 1: os._exit(3)\nimport time; time.sleep(60)")
        with pytest.raises(RankDied):
            session.profile()
        assert session.why_no_profile()
    with pytest.raises(SessionError, match="stopped"):
        session.profile()


# ----------------------------------------------------------------------------- the magics


def test_without_a_session_the_magic_says_how_to_get_one(notebook: LiveKernel) -> None:
    shown = notebook.run("%nbdist profile")
    assert shown.status == "error"
    assert "%%distribute --profile" in shown.text


def test_the_verdict_stands_below_the_cell(notebook: LiveKernel) -> None:
    notebook.run(f"%%distribute -n 2 --precision no\n{bottleneck_loops.SETUP}{SMALL}")
    assert "no profile yet" in notebook.run("%nbdist profile --show").text
    shown = notebook.run(f"%%distribute --profile --steps 3\n{loop(9)}")
    assert shown.status == "ok", shown.text
    assert any("text/html" in output.get("data", {}) for output in shown.outputs)
    notebook.run("import nbdist")
    verdict = notebook.run("print(nbdist.session().profiles[-1].verdict)").text.strip()
    assert verdict in shown.text
    assert verdict in notebook.run("%nbdist profile --show").text


def test_the_magic_profiles_a_loop_in_the_background(notebook: LiveKernel) -> None:
    request = notebook.send(f"%%distribute --background\n{loop(4000)}")
    assert notebook.collect(request).status == "ok"
    try:
        text = notebook.run("%nbdist profile --steps 3")
        assert "profiling the running cell" in text.text, text.text
        below = notebook.below(request, until="part of a step")
        assert any("text/html" in output.get("data", {}) for output in below.outputs)
    finally:
        notebook.run("%nbdist interrupt")
        notebook.run("%nbdist wait")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%nbdist profile --steps 0", "1 to 1000"),
        ("%nbdist profile --trace /proc/nowhere", "Cannot write"),
        ("%%distribute --steps 3\n1", "need --profile"),
        ("%%distribute --profile --steps 0\n1", "1 to 1000"),
    ],
)
def test_bad_lines_are_one_sentence(notebook: LiveKernel, line: str, says: str) -> None:
    shown = notebook.run(line)
    assert shown.status == "error"
    assert says in shown.text
    assert "Traceback" not in shown.text
    assert notebook.run("%%distribute\nrank").status == "ok"


# ---------------------------------------------------------------------- what a loop may be


def test_two_models_with_an_optimizer_each_are_distinguished(session: Session) -> None:
    session.run(
        "other = accelerator.prepare(torch.nn.Linear(64, 64))\n"
        "second = accelerator.prepare(torch.optim.SGD(other.parameters(), lr=1e-3))"
    )
    both = loop(9).replace(
        "    report(",
        "    accelerator.backward(other(torch.ones(8, 64)).square().mean())\n"
        "    second.step()\n    second.zero_grad()\n    report(",
    )
    session.run(both, profile={"steps": 3})
    profile = session.profiles[-1]
    assert profile.share("forward", "backward") > 2 * profile.share("optimizer")
    assert any("2 models" in note for note in profile.notes)
    session.run("del other, second")


def test_accumulation_without_effect_is_said_and_does_not_count(session: Session) -> None:
    session.switch(accumulate=4)
    try:
        session.run(loop(9), profile={"steps": 3})
    finally:
        session.switch(accumulate=1)
    profile = session.profiles[-1]
    assert profile.model is not None
    assert profile.model.accumulate == 1
    assert any("accelerator.accumulate(model)" in note for note in profile.notes)
