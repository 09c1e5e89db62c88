"""`@nbdist.distribute`: functions of a script or a notebook whose body runs on the ranks."""

# ruff: noqa: F821 - the ranks define accelerator and rank

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import nbdist
from nbdist import CellError, Session
from nbdist.errors import OptionError, PayloadError
from nbdist.worker.distributed_function import call
from tests.e2e import averages
from tests.e2e.averages import mean_over_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.live_kernel import LiveKernel

rank: int
accelerator: Any
offset = 100


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(nproc=2) as session:
        yield session


def shifted(value: float) -> float:
    return value + offset


@nbdist.distribute
def train(steps: int, *, lr: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    for _ in range(steps):
        loss = model(torch.ones(2, 4) * (rank + 1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"rank": shifted(rank), "loss": loss.detach()}


@nbdist.distribute(ranks="1")
def fail(reason: object) -> None:
    raise ValueError(f"rank {rank} fails: {reason}")


class Trainer:
    """Its method runs on the ranks; `self` is a copy."""

    rate = 0.5

    @nbdist.distribute
    def scaled(self, value: float) -> float:
        return self.rate * value + rank


@nbdist.distribute
def numbers() -> Iterator[int]:
    return iter([1, 2])


@pytest.mark.usefixtures("session")
def test_a_call_returns_the_value_of_each_rank() -> None:
    first, second = train(3, lr=0.01)
    assert (first["rank"], second["rank"]) == (100, 101)
    assert second["loss"] > first["loss"] > 0


def test_a_function_brings_its_closure_and_sees_variables_of_cells(session: Session) -> None:
    session.run("from_cell = 10 * rank")
    mine = torch.arange(3)

    @nbdist.distribute
    def add() -> torch.Tensor:
        return mine + from_cell  # type: ignore[name-defined]

    assert [value.tolist() for value in add()] == [[0, 1, 2], [10, 11, 12]]


@pytest.mark.usefixtures("session")
def test_a_method_brings_its_instance() -> None:
    trainer = Trainer()
    trainer.rate = 3
    assert trainer.scaled(2) == [6, 7]


@pytest.mark.usefixtures("session")
def test_on_a_rank_functions_of_other_modules_are_called_directly() -> None:
    @nbdist.distribute
    def both() -> list[float]:
        return [averages.mean_over_ranks(rank), mean_over_ranks(rank)]

    assert both() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.usefixtures("session")
def test_an_error_points_into_the_file_of_the_function() -> None:
    with pytest.raises(CellError, match=r"ValueError: rank 1 fails: no data \(rank 1\)") as caught:
        fail("no data")
    (traceback,) = caught.value.__notes__
    assert "test_distributed_function.py:" in traceback
    assert 'raise ValueError(f"rank {rank} fails: {reason}")' in traceback
    assert "Cell In" not in traceback


@pytest.mark.usefixtures("session")
def test_what_cannot_be_copied_is_one_sentence() -> None:
    with pytest.raises(PayloadError, match=r"fail\(\) cannot be copied .* '_thread.lock' object"):
        fail(threading.Lock())
    with pytest.raises(OptionError, match="decorates a function defined with def, not 3"):
        nbdist.distribute(3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"steps\(\) cannot be distributed.* without async"):

        @nbdist.distribute
        async def steps() -> None:
            pass


def test_a_value_that_cannot_be_moved_names_the_function(session: Session) -> None:
    with pytest.raises(PayloadError, match=r"The value of numbers\(\) is a list_iterator"):
        numbers()
    session.run("left = [globals().get(name) for name in ('_function', '_result')]")
    assert session.pull("left") == [None, None]


def test_a_rank_of_another_python_does_not_read_the_function() -> None:
    with pytest.raises(OptionError, match=r"same version of Python .* the notebook runs 3\.10\.1"):
        call({"_function": b"bytes of Python 3.10"}, "3.10.1")


def test_options_of_the_decorator_switch_the_session(session: Session) -> None:
    backend = nbdist.distribute(backend="zero2")(lambda: accelerator.distributed_type.value)
    assert backend() == ["DEEPSPEED", "DEEPSPEED"]
    assert session.backend == "zero2"


def test_a_function_of_a_notebook_cell(notebook: LiveKernel) -> None:
    notebook.run("import nbdist\n@nbdist.distribute(nproc=2)\ndef divide(x):\n    return x / rank")
    shown = notebook.run("divide(3)")
    assert "ZeroDivisionError" in shown.text
    assert "----> 4     return x / rank" in shown.text
