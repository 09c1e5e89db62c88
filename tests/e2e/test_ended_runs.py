"""A run that is ended from outside loses no step: all ranks save, and the next session resumes."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nbdist import CellInterrupted, CheckpointError, RankDied, Session, SessionError
from nbdist.cluster.node_group import ClusterLauncherProvider
from tests import engines
from tests.conftest import eventually
from tests.interrupts import meanwhile
from tests.live_kernel import LiveKernel
from tests.two_nodes import LocalNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES = 400
PREPARE = textwrap.dedent(
    f"""
    import time
    torch.manual_seed(0)
    data = torch.arange({SAMPLES}.0)[:, None].expand(-1, 8)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
)
LOOP = textwrap.dedent(
    """
    with open("seen", "a", buffering=1) as seen:
        while True:
            for batch in loader:
                accelerator.backward((model(batch) / 400).square().mean())
                optimizer.step()
                ids = accelerator.gather(batch[:, 0]).int().tolist()
                if rank == 0: seen.write(f"{ids}\\n")
                optimizer.zero_grad()
                time.sleep(0.002)
    """
)
"""Writes the samples of each step, once it is made."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the notebook, with its checkpoints and what was trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen").touch()
    return tmp_path


def steps(folder: Path) -> list[list[int]]:
    """Return the samples of each step so far."""
    lines = (folder / "seen").read_text().split("\n")[:-1]  # the last one may be incomplete
    return [ast.literal_eval(line) for line in lines]


def assert_each_step_was_made_once(folder: Path, at_step: int) -> None:
    """Check the samples of all sessions: every epoch has each once, and none was lost."""
    made = steps(folder)
    assert len(made) == at_step
    samples = [number for step in made for number in step]
    for begin in range(0, len(samples), SAMPLES):
        epoch = samples[begin : begin + SAMPLES]
        assert len(set(epoch)) == len(epoch)


def train_until_ended(session: Session, end: Callable[[], object]) -> str:
    """Train, and call `end` after some steps; return the error of the cell."""
    before = len(steps(Path.cwd()))

    def later() -> None:
        eventually(lambda: len(steps(Path.cwd())) > before + 20, within_s=60)
        end()

    with meanwhile(later), pytest.raises(CellInterrupted) as excinfo:
        session.run(LOOP)
    return str(excinfo.value)


def send_sigterm(session: Session, rank: int) -> None:
    os.kill(session.status()["ranks"][rank]["pid"], signal.SIGTERM)


@pytest.fixture
def session(folder: Path) -> Iterator[Session]:  # noqa: ARG001 - where it saves
    with Session(nproc=2, backend="fsdp2", precision="no") as running:
        running.run(PREPARE)
        yield running


@pytest.mark.fault("B17")
def test_sigterm_to_one_rank_saves_all_and_the_next_session_resumes(
    session: Session, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of a run"):
        session.resume()
    text = train_until_ended(session, lambda: send_sigterm(session, 1))
    (saved,) = session.checkpoints
    assert "Ended by SIGTERM to rank 1: all ranks stopped after step" in text
    assert saved.name in text
    assert_each_step_was_made_once(folder, saved.step)
    eventually(lambda: session.state == "dead", within_s=10)
    with pytest.raises(RankDied, match="SIGTERM to rank 1; all ranks were terminated"):
        session.run("rank")
    session.restart()
    session.run(PREPARE)
    assert session.resume().step == saved.step
    text = train_until_ended(session, lambda: session.set_deadline(str(int(time.time()) + 9)))
    assert "Ended by the deadline" in text
    capsys.readouterr()
    session.replay()
    assert text in capsys.readouterr().err
    last = session.checkpoints[-1]
    assert (last.ended, last.step > saved.step) == ("the deadline", True)
    assert_each_step_was_made_once(folder, last.step)
    assert session.run("rank").ok  # a deadline does not end the ranks
    text = train_until_ended(session, session.interrupt)
    assert text == "Interrupted on all ranks; all variables are kept."


@pytest.mark.nightly
def test_a_save_that_takes_longer_than_the_time_left_is_announced(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(
        "from nbdist.worker.operations import save as saving\n"
        "saving.before_save_stage.append(lambda stage: time.sleep(4 * (stage == 'write')))"
    )
    session.save("slow").wait()
    session.set_deadline(str(int(time.time()) + 4))
    lines: list[str] = []

    def is_announced() -> bool:
        lines.append(capsys.readouterr().err)
        return "nbdist: a save is predicted to take 4" in "".join(lines)

    eventually(is_announced, within_s=4)
    assert "before the deadline. Save earlier with %nbdist save NAME" in "".join(lines)


@pytest.mark.nightly
@pytest.mark.fault("B17")
def test_sigterm_to_a_rank_does_not_end_the_ranks_of_a_restart(session: Session) -> None:
    send_sigterm(session, 1)
    with contextlib.suppress(CellInterrupted, RankDied):  # they may be ended before it
        session.run("rank")  # SIGTERM is reported meanwhile
    session.restart()
    assert session.run("__import__('time').sleep(1); rank").values == {0: 0, 1: 1}


@pytest.mark.nightly
@pytest.mark.fault("B17")
def test_sigterm_to_a_kernel_that_runs_a_cell_saves_before_it_ends(folder: Path) -> None:
    with LiveKernel(folder) as kernel:
        kernel.run("%load_ext nbdist")
        kernel.run(f"%%distribute -n 2 --precision no\n{PREPARE}")
        request = kernel.send(f"%%distribute\n{LOOP}")
        eventually(lambda: len(steps(folder)) > 20, within_s=60)
        os.kill(kernel.manager.provisioner.pid, signal.SIGTERM)
        text = kernel.collect(request, until="then use %nbdist resume").error
        assert "Ended by SIGTERM: all ranks stopped after step" in text["evalue"]
        eventually(lambda: not kernel.manager.is_alive(), within_s=30)
    with LiveKernel(folder) as kernel:
        kernel.run("%load_ext nbdist")
        shown = kernel.run(f"%%distribute -n 2 --precision no\n{PREPARE}")
        assert (
            "is from a run ended by SIGTERM: prepare the model, then use %nbdist resume"
            in shown.text
        )
        assert f"step {len(steps(folder))}" in kernel.run("%nbdist resume").text


@pytest.mark.nightly
@pytest.mark.parametrize("backend", engines.each())
def test_every_engine_resumes_where_it_was_ended(folder: Path, backend: str) -> None:
    with Session(nproc=2, backend=backend, precision="no") as session:
        for _ in range(2):
            session.run(PREPARE)
            if session.checkpoints:
                session.resume()
            train_until_ended(session, lambda: send_sigterm(session, 0))
            assert_each_step_was_made_once(folder, session.checkpoints[-1].step)
            eventually(lambda: session.state == "dead", within_s=10)
            session.restart()


@pytest.mark.nightly
@pytest.mark.fault("B17")
@pytest.mark.timeout(3600)
def test_a_hundred_sigterms_at_random_moments_lose_no_step(folder: Path) -> None:
    chance = random.Random(0)  # noqa: S311 - moments
    with Session(nproc=2, backend="fsdp2", precision="no") as session:
        for number in range(100):
            session.run(PREPARE)
            if number:
                session.resume()
            pause, rank = chance.uniform(0, 0.3), chance.randrange(2)

            def end(pause: float = pause, rank: int = rank) -> None:
                threading.Event().wait(pause)
                send_sigterm(session, rank)

            train_until_ended(session, end)
            assert_each_step_was_made_once(folder, session.checkpoints[-1].step)
            eventually(lambda: session.state == "dead", within_s=20)
            session.restart()


@pytest.mark.nightly
@pytest.mark.fault("B17")
def test_sigterm_to_the_agent_of_a_node_saves_all_ranks(folder: Path) -> None:
    nodes = LocalNodes("alpha", "beta")
    with Session(nproc=2, precision="no", engine=ClusterLauncherProvider(nodes)) as session:
        session.run(PREPARE)
        text = train_until_ended(session, nodes.agents["beta"].terminate)
        assert "SIGTERM to the agent of node beta" in text
        assert_each_step_was_made_once(folder, session.checkpoints[-1].step)
        eventually(lambda: session.state == "dead", within_s=20)


@pytest.mark.nightly
@pytest.mark.fault("B17")
def test_a_node_that_is_drained_saves_all_ranks(folder: Path) -> None:
    nodes = LocalNodes("alpha", "beta")
    with Session(nproc=2, precision="no", engine=ClusterLauncherProvider(nodes)) as session:
        session.run(PREPARE)
        text = train_until_ended(session, lambda: nodes.drained.update({1: time.time() + 25}))
        assert "Ended by the drain of node beta (127.0.0.1): all ranks stopped after step" in text
        assert_each_step_was_made_once(folder, session.checkpoints[-1].step)
        eventually(lambda: session.state == "dead", within_s=20)


@pytest.mark.nightly
@pytest.mark.fault("B4")
def test_sigterm_to_the_launcher_saves_all_ranks(session: Session, folder: Path) -> None:
    pid = session.status()["launcher"]["pid"]
    text = train_until_ended(session, lambda: os.kill(pid, signal.SIGTERM))
    assert "SIGTERM to the launcher" in text
    assert_each_step_was_made_once(folder, session.checkpoints[-1].step)
    eventually(lambda: session.state == "dead", within_s=20)
    with pytest.raises((RankDied, SessionError)):
        session.run("rank")
