"""Save, load, switch, export and pull where one rank fails, hangs or is stopped."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist import CellInterrupted, NbdistError, PayloadError, RankDied, Session
from nbdist.errors import CheckpointError
from tests.conftest import eventually
from tests.faults.training import TRAPPED
from tests.interrupts import meanwhile
from tests.nightly import nightly
from tests.session_internals import workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PREPARE = """
import os, signal, time, torch
trap = None

def spring():
    global trap
    kind = trap
    if kind == "error":
        raise LookupError("my own mistake")
    trap = None
    if kind == "exit":
        raise SystemExit(3)
    if kind == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "swallows":
        try:
            while True: time.sleep(0.05)
        except KeyboardInterrupt:
            kind = "hang"
    while kind == "hang": time.sleep(0.05)
    while kind == "busy": pass
"""
STEP = """
def step():
    loss = model(torch.ones(2, 8)).sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

step()

class Torn:
    @property
    def __class__(self):
        raise LookupError("torn")

torn = Torn()
"""


@pytest.fixture(scope="module", params=["ddp", nightly("fsdp2")])
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    """Two CPU ranks with a model in training, and a checkpoint."""
    with nbdist.Session(nproc=2, backend=request.param) as running:
        running.run(PREPARE + TRAPPED + STEP)
        root = tmp_path_factory.mktemp("root")
        running.checkpoints.root = root
        running.save("whole", folder=root, wait=True)
        yield running


def works(root: Path) -> dict[str, Callable[[Session], object]]:
    """What all ranks do together, by name."""
    return {
        "save": lambda s: s.save("another", overwrite=True, folder=root, wait=True),
        "load": lambda s: s.load("whole", folder=s.checkpoints.root),
        "switch": lambda s: s.switch("fsdp2" if s.backend == "ddp" else "ddp"),
        "export": lambda s: s.export(root / "exported", overwrite=True),
        "pull": lambda s: s.pull("model"),
    }


def trains_on(session: Session) -> bool:
    """Whether all ranks make further steps with the same weights."""
    session.run("trap = None")
    losses = session.run("[step() for _ in range(3)][-1]").values
    return losses[0] == losses[1]


@pytest.mark.parametrize("trap", ["error", nightly("exit")])
@pytest.mark.parametrize("work", ["save", "load", "switch", "export", "pull"])
def test_one_rank_that_fails_is_named_soon_and_the_models_train_on(
    session: Session, tmp_path: Path, work: str, trap: str
) -> None:
    backend = session.backend
    session.run(f"if rank == 1: trap = {trap!r}")
    began = time.monotonic()
    with pytest.raises(NbdistError, match=r"LookupError: my own mistake|SystemExit: 3") as excinfo:
        works(tmp_path)[work](session)
    assert time.monotonic() - began < 30  # with the import of a library, on a machine in use
    assert "rank 1" in str(excinfo.value)
    assert session.backend == backend
    assert trains_on(session)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("E14")
@pytest.mark.parametrize(
    ("work", "trap"),
    [
        ("save", "hang"),
        ("switch", "busy"),
        *(
            nightly(*pair)
            for pair in itertools.product(["load", "export", "pull"], ["hang", "busy"])
        ),
        nightly("save", "busy"),
        nightly("switch", "hang"),
        nightly("switch", "swallows"),
    ],
)
def test_stop_ends_what_does_not_get_on_and_the_models_train_on(
    session: Session, tmp_path: Path, work: str, trap: str
) -> None:
    backend = session.backend
    session.run(f"if rank == 1: trap = {trap!r}")
    pressed: list[float] = []

    def press() -> None:
        def noticed() -> bool:  # between two requests of one command there is none
            joint = workers(session).collective_request
            return joint is not None and bool(joint.notice)

        eventually(noticed, within_s=120)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(press), pytest.raises(CellInterrupted, match="interrupted") as excinfo:
        works(tmp_path)[work](session)
    assert time.monotonic() - pressed[0] < 10
    assert "could not" not in str(excinfo.value)
    assert session.backend == backend
    assert trains_on(session)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("B2")
def test_a_rank_that_dies_in_a_save_is_named(tmp_path: Path) -> None:
    with nbdist.Session(nproc=2) as session:
        session.run(PREPARE + TRAPPED + STEP)
        session.run("if rank == 1: trap = 'death'")
        with pytest.raises(RankDied, match=r"(?s)rank 1.*SIGKILL"):
            session.save("never", folder=tmp_path, wait=True)
        assert not list(tmp_path.iterdir())


@pytest.mark.fault("E17")
def test_a_folder_that_one_rank_cannot_write_is_reported_at_once(
    session: Session, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="file"):
        session.save("never", folder=tmp_path / "file" / "below", wait=True)
    assert trains_on(session)


def test_an_unexpected_error_is_answered_too(session: Session) -> None:
    with pytest.raises(PayloadError, match="LookupError: torn"):
        session.pull("torn")
    eventually(lambda: "LookupError: torn" in session.log(), within_s=10)
    assert session.run("rank").values == {0: 0, 1: 1}
