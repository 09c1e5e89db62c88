"""What Accelerate and DeepSpeed have written by themselves goes into a model under any engine."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from nbdist import CheckpointError, Session
from nbdist.strategies import STRATEGIES
from tests import engines
from tests.e2e.cells import MODELS
from tests.e2e.training import value_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)

BACKENDS = list(STRATEGIES)
DEFINITIONS = MODELS + textwrap.dedent(
    """
    def groups(model):
        parameters = list(model.parameters())
        return [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]

    def prepared(make, seed):
        torch.manual_seed(seed)
        bare = make()
        return accelerator.prepare(bare, torch.optim.AdamW(groups(bare), lr=1e-3))

    def train(steps):
        losses = []
        for _ in range(steps):
            ids = torch.arange(24)[None] + rank
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses
    """
)


@pytest.mark.parametrize("backend", engines.each("zero3"))
def test_training_goes_on_under_another_engine(
    trained: Session, backend: str, tmp_path: Path
) -> None:
    trained.switch(backend)
    trained.run("model, optimizer = prepared(llama, seed=1); train(3)")
    trained.run(f"accelerator.save_state({str(tmp_path / 'state')!r});")
    expected = value_of(trained, "train(3)")
    for other in (backend, "fsdp2" if "zero" in backend else "zero3"):
        trained.switch(other)
        trained.run("model, optimizer = prepared(llama, seed=2)")
        report = trained.load_foreign(tmp_path / "state")
        assert report.steps == 3
        found = value_of(trained, "train(3)")
        report = trained.load(tmp_path / "state", weights_only=True)
        assert report.notes[-1] == "weights only: the optimizer state is unchanged"
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-6


def test_weights_of_hugging_face_under_every_name(trained: Session, tmp_path: Path) -> None:
    trained.switch("fsdp2")
    for make in ("gpt2", "mixtral"):
        trained.run(f"torch.manual_seed(5); other = {make}()")
        trained.run(
            f"if rank == 0: other.save_pretrained({str(tmp_path / make)!r}, max_shard_size='20KB')"
        )
        trained.run(f"expected = dict(other.state_dict()); model, optimizer = prepared({make}, 6)")
        report = trained.load_foreign(tmp_path / make)
        assert report.steps is None
        expected, found = trained.pull("expected"), trained.pull("model")
        assert all((expected[name] == found[name]).all() for name in expected)
    before = trained.pull("model")
    with pytest.raises(CheckpointError, match=r"of \d+ tensors \d+ are missing: .*, \.\.\."):
        trained.load_foreign(tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match="does not exist"):
        trained.load_foreign(tmp_path / "nothing")
    after = trained.pull("model")
    assert all((before[name] == after[name]).all() for name in before)
