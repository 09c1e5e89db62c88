"""Ranks that run in the Python of another environment, which lacks DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist import rank_python
from nbdist.cluster.local_launcher import LocalLauncherProvider
from nbdist.errors import OptionError, StartError
from nbdist.protocol import messages
from tests.environments import environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("env"), without=("deepspeed",))


@pytest.fixture(autouse=True)
def own_python_again() -> Iterator[None]:
    """The next module's plans ask about the Python of the tests again."""
    yield
    rank_python.select(rank_python.KERNEL_PYTHON)


@pytest.fixture(scope="module")
def session(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbdist.Session]:
    folder = tmp_path_factory.mktemp("checkpoints")
    provider = LocalLauncherProvider()
    with nbdist.Session(
        nproc=2, python=str(python), checkpoints=folder, engine=provider
    ) as running:
        yield running


def test_ranks_run_that_python(session: nbdist.Session, python: Path) -> None:
    session.run("import sys, nbdist\nused, package = sys.executable, nbdist.__file__")
    assert session.pull("used", "package") == [str(python), nbdist.__file__]
    assert session.python == str(python)


def test_ddp_trains_and_saves_without_deepspeed(session: nbdist.Session) -> None:
    session.run("import torch\nmodel = torch.nn.Linear(4, 4)")
    session.run(
        "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))"
    )
    session.run("accelerator.backward(model(torch.ones(2, 4)).sum()); optimizer.step()")
    session.save("first", wait=True)
    session.load("first")
    assert "first" in str(session.checkpoints)


def test_zero_says_how_to_install_deepspeed(session: nbdist.Session) -> None:
    with pytest.raises(OptionError, match="`pip install deepspeed`"):
        session.switch("zero2")
    rank_python.select(rank_python.find(session.python))
    rows = nbdist.plan("125m", batch_size=1).rows
    refused = {row.backend for row in rows if "`pip install deepspeed`" in row.why}
    assert refused == {"zero1", "zero2", "zero3"}


def test_a_session_keeps_its_python(session: nbdist.Session) -> None:
    assert session.differing(python=session.python) == {}
    with pytest.raises(OptionError, match=r"--python .* this session's ranks run .* %nbdist stop"):
        session.restart(python=f"{session.python}3")


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROTOCOL", 2)
    with (
        pytest.raises(StartError, match=r"uses protocol 1 .* Restart the notebook's kernel"),
        nbdist.Session(nproc=1, engine=LocalLauncherProvider()),
    ):
        pass
