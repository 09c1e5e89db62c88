"""Starts that fail, are slow, or meet another: reported within seconds, nothing is left."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist import Session, StartError
from nbdist.cluster.local_launcher import LocalLauncherProvider
from nbdist.session import startup
from tests.conftest import eventually
from tests.live_kernel import LiveKernel
from tests.nightly import nightly

if TYPE_CHECKING:
    from collections.abc import Iterator

DOUBLES = Path(__file__).parents[1] / "doubles"
REPORTED_S = 60.0
"""Imports of the launcher included, on a machine that does other things too."""


@pytest.fixture
def nothing_runs() -> Iterator[None]:
    """No process is left by a start that failed."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def why_it_failed(session: Session) -> str:
    began = time.monotonic()
    with pytest.raises(StartError) as caught:
        session.start()
    assert time.monotonic() - began < REPORTED_S
    return str(caught.value)


@pytest.mark.fault("A2")
@pytest.mark.usefixtures("nothing_runs")
def test_a_launcher_that_crashes_on_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'nbdist.launcher' in sys.orig_argv: os.write(2, b'no licence\\n'); os._exit(5)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    text = why_it_failed(Session(nproc=2))
    assert "the launcher ended with exit code 5" in text
    assert "no licence" in text


@pytest.mark.fault("A2")
@pytest.mark.usefixtures("nothing_runs")
def test_a_broken_module_of_the_user_is_reported_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('not the torch you want')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    text = why_it_failed(Session(nproc=2))
    assert "the launcher ended with exit code 1" in text
    assert str(tmp_path / "torch.py") in text
    assert "RuntimeError: not the torch you want" in text


@pytest.mark.fault("A2")
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("code", ["7", nightly("0")])
def test_a_rank_that_crashes_on_start_is_reported_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("PYTHONSTARTUP", str(DOUBLES / "crash_on_start.py"))
    monkeypatch.setenv("NBDIST_TEST_EXIT", code)
    text = why_it_failed(Session(nproc=2))
    assert "The ranks failed to start: rank " in text
    assert f"ended with exit code {code}" in text
    assert "this is the last line of the crash" in text


@pytest.mark.fault("A3")
def test_a_slow_start_says_who_is_missing_and_is_not_dead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONSTARTUP", str(DOUBLES / "slow_start.py"))
    monkeypatch.setenv("NBDIST_TEST_SLOW_S", "4")
    monkeypatch.setattr(startup, "PROGRESS_INTERVAL_S", 1.0)
    with Session(nproc=2) as session:
        assert session.run("rank").values == {0: 0, 1: 1}
    assert "starting the ranks; no message from ranks 0-1 for 1 s" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.fault("A3")
@pytest.mark.usefixtures("nothing_runs")
def test_a_start_that_never_ends_shows_where_all_processes_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LocalLauncherProvider()
    engine.warm_up("cpu")
    warm = engine._warm
    assert warm is not None
    eventually(lambda: warm.is_warm, within_s=REPORTED_S)
    monkeypatch.setenv("PYTHONSTARTUP", str(DOUBLES / "slow_start.py"))
    monkeypatch.setattr(startup, "START_TIMEOUT_S", 6.0)
    text = why_it_failed(Session(nproc=2, engine=engine))
    assert "No message from the ranks for 6 s" in text
    assert "-- launcher --" in text
    assert "fork_ranks.py" in text
    assert "-- rank0 --" in text
    assert "-- rank1 --" in text
    assert text.count(str(DOUBLES / "slow_start.py")) >= 2


@pytest.mark.fault("B16")
@pytest.mark.usefixtures("nothing_runs")
def test_an_error_of_the_launcher_reaches_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getcwd", lambda: "/not/there")
    text = why_it_failed(Session(nproc=2))
    assert "FileNotFoundError" in text
    assert "/not/there" in text
    assert "Traceback" in text


@pytest.mark.nightly
@pytest.mark.fault("A1", "A5")
def test_sessions_at_once_in_one_kernel_and_in_two(tmp_path: Path) -> None:
    with LiveKernel(tmp_path) as kernel:
        kernel.run("%load_ext nbdist")
        other = kernel.send("%%distribute -n 2\nrank")
        with Session(nproc=2) as one, Session(nproc=2) as two:
            assert one.run("x = 'one'; rank").values == {0: 0, 1: 1}
            assert two.run("x = 'two'; rank").values == {0: 0, 1: 1}
            assert one.run("x").values == {0: "one", 1: "one"}
            assert "[1] 1" in kernel.collect(other).text
            restarts_at_once(one)


def restarts_at_once(session: Session) -> None:
    """Two restarts and a start from three threads: one launcher, living ranks."""
    family = {child.pid for child in psutil.Process().children()}
    threads = [
        threading.Thread(target=call) for call in (session.restart, session.restart, session.start)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {child.pid for child in psutil.Process().children()} == family
    assert session.run("rank").values == {0: 0, 1: 1}
