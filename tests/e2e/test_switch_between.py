"""What users do between `prepare()` and a switch: errors, freezing, hooks, objects kept aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist import CellError, Session, SwitchError
from tests.e2e.training import value_of
from tests.nightly import nightly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)

MODEL = """
from torch import nn

class Counting(torch.optim.AdamW):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)

def begin(frozen=False):
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    bare[0].requires_grad_(not frozen)
    optimizer = Counting([p for p in bare.parameters() if p.requires_grad], lr=1e-2)
    return accelerator.prepare(bare, optimizer)

x, y = torch.randn(4, 8), torch.randn(4, 4)

def train(steps, model, optimizer):
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
"""
TENSORS = 18
"""6 parameters with two moments each."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Session]:
    with Session(nproc=2, backend="ddp", precision="no") as session:
        session.run(MODEL)
        yield session


def begin(session: Session, backend: str, arguments: str = "") -> None:
    session.run("model = optimizer = None")
    session.switch(backend)
    session.run(f"model, optimizer = begin({arguments})\ntrain(2, model, optimizer)")


@pytest.mark.parametrize("backend", ["fsdp2", nightly("fsdp1")])
def test_an_error_inside_a_forward_loses_nothing(
    ranks: Session, backend: str, tmp_path: Path
) -> None:
    begin(ranks, backend)
    with pytest.raises(CellError, match="cannot be multiplied"):
        ranks.run("model(torch.zeros(2, 3))", output="none")
    assert len(ranks.save("after", folder=tmp_path).wait(60).state_dict("optim.")) == TENSORS - 6
    assert ranks.switch("ddp").verified == TENSORS
    ranks.run("train(1, model, optimizer)")


def test_layers_that_were_unfrozen_are_trained_on(ranks: Session) -> None:
    begin(ranks, "fsdp2", "frozen=True")
    ranks.run(
        "first = [p for p in model.parameters() if not p.requires_grad]\n"
        "for p in first: p.requires_grad_(True)\n"
        "optimizer.optimizer.add_param_group({'params': first, 'lr': 1e-3})\n"
        "next(p for p in reversed(list(model.parameters()))).requires_grad_(False)\n"
        "train(1, model, optimizer)"
    )
    ranks.switch("ddp")
    ranks.run("from nbdist.worker.memory.memory_probe import current_probe")
    assert value_of(
        ranks, "[list(shape) for shape, _ in current_probe.probe.forward_inputs.values()]"
    ) == [[4, 8]]  # plans go on with the batches that were seen
    assert value_of(ranks, "[len(g['params']) for g in optimizer.param_groups]") == [4, 2]
    assert value_of(ranks, "[p.requires_grad for p in model.parameters()]") == [True] * 5 + [False]


def test_parameters_of_another_model_are_refused(ranks: Session) -> None:
    begin(ranks, "ddp")
    ranks.run("optimizer.add_param_group({'params': list(nn.Linear(2, 2).parameters())})")
    with pytest.raises(
        SwitchError, match="2 parameters of the Counting belong to no prepared model"
    ):
        ranks.switch("fsdp2")


@pytest.mark.parametrize("backend", [nightly("ddp"), "fsdp2"])
def test_tensors_kept_aside_say_that_they_are_old(
    ranks: Session, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(ranks, backend)
    ranks.run(
        "kept = (*model.parameters(), *model.buffers())\n"
        "mean = next(model.buffers())\n"
        "before = mean.clone()"
    )
    ranks.switch("zero1")
    assert value_of(ranks, "torch.equal(mean, before)")
    use = "try:\n    kept[{}].sum()\nexcept Exception as error:\n    said = str(error)\nsaid"
    for place in (0, -1):
        assert f"This object was prepared with {backend}" in value_of(ranks, use.format(place))
    ranks.run("train(3, model, optimizer)")  # measures itself, and trips over nothing
    captured = capsys.readouterr()
    assert "measurement" not in captured.out + captured.err
    ranks.run("kept = None")


def test_hooks_counts_and_schedulers_that_no_prepare_saw_go_on(ranks: Session) -> None:
    begin(ranks, "ddp")
    ranks.run(
        "steps = []\n"
        "optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))\n"
        "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=0)\n"
        "plateau.step(1.0)\n"
        "handle = next(model.parameters()).register_hook(lambda grad: grad)"
    )
    report = ranks.switch("fsdp2")
    assert any("gradient hooks of 1 parameters" in note for note in report.notes)
    ranks.run("train(2, model, optimizer); plateau.step(2.0)")
    assert value_of(ranks, "optimizer.optimizer.calls") == 4
    assert value_of(ranks, "len(steps)") == 2
    assert value_of(ranks, "optimizer.param_groups[0]['lr']") == pytest.approx(1e-3)
    report = ranks.switch("ddp", nproc=1)
    assert any("step hooks of Counting" in note for note in report.notes)
    assert value_of(ranks, "optimizer.optimizer.calls") == 4
    ranks.switch("ddp", nproc=2)


def test_gradients_of_one_model_do_not_wait_for_the_other(ranks: Session, tmp_path: Path) -> None:
    begin(ranks, "ddp")
    ranks.run("other, second = begin()\ntrain(2, model, optimizer)")
    ranks.save("both", folder=tmp_path).wait(60)
    assert ranks.switch("fsdp2").verified > TENSORS
    ranks.run("other = second = None")
