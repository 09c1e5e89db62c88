"""Options change with the engine or without it, and with all kinds of models and optimizers."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from nbdist import Session, SwitchError
from tests.e2e.test_engines import WRAPPED
from tests.e2e.test_switch import MODEL, START, apart, one

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(900)

PRELUDE = textwrap.dedent(
    """
    from nbdist.rank import training
    from nbdist.rank.carry import Carried
    from nbdist.state import digest, layouts

    def digests():
        "Of all state; the same on all ranks."
        (trained,) = training.everything()
        found = Carried(0, trained)
        return digest.agreed(found.share()), found.counts()

    def types():
        "Of the weights that are stepped."
        (trained,) = training.everything()
        found = layouts.of(trained.model).weights(owned=False)
        return sorted({str(one.dtype) for one in found.values()})
    """
)
PLAIN = {
    "precision": "no",
    "offload": "none",
    "activation_checkpointing": False,
    "compile": False,
    "accumulate": 1,
    "clip": None,
}


@pytest.fixture(scope="module")
def trained() -> Iterator[Session]:
    """Two ranks whose model is built anew by each test."""
    with Session(nproc=2) as session:
        session.run(MODEL + PRELUDE)
        yield session


def begin(session: Session, build: str, backend: str, **options: Any) -> None:
    """Train four steps of a new model under a backend with these options only."""
    session.run("bare = model = optimizer = schedule = loader = batches = None")
    session.switch(backend, **{**PLAIN, **options})
    session.run(START.format(build))


@pytest.mark.parametrize(
    ("home", "away"),
    [
        ("ddp", "ddp"),
        ("fsdp2", "fsdp2"),
        ("zero2", "zero2"),
        ("zero3", "fsdp1"),
        ("fsdp2", "zero3"),
        ("fsdp1", "zero1"),
    ],
    ids="-".join,
)
def test_masters_outlive_a_change_of_precision(trained: Session, home: str, away: str) -> None:
    for precision, other in (("bf16", "no"), ("no", "bf16")):
        begin(trained, "", home, precision=precision)
        expected = one(trained, "train(4)")
        begin(trained, "", home, precision=precision)
        before = one(trained, "digests()")
        report = trained.switch(away, precision=other)
        assert report.verified > 80
        assert any("precision" in words for words in report.will_differ)
        assert one(trained, "digests(), types()") == (before, ["torch.float32"])
        assert one(trained, "type(model).__name__") == WRAPPED[away]
        trained.switch(home, precision=precision)
        assert one(trained, "digests()") == before
        assert apart(one(trained, "train(4)"), expected) == 0.0


LION = textwrap.dedent(
    """
    class Lion(torch.optim.Optimizer):
        "Chen et al. 2023 (arXiv:2302.06675): one element-wise tensor of state, and no step."

        def __init__(self, parameters, lr, weight_decay=0.0):
            super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for one in (p for p in group["params"] if p.grad is not None):
                    mean = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
                    one.mul_(1 - group["lr"] * group["weight_decay"])
                    one.sub_(group["lr"] * mean.lerp(one.grad, 0.1).sign_())
                    mean.lerp_(one.grad, 0.01)
    """
)


@pytest.mark.parametrize("away", ["fsdp1", "fsdp2"])
def test_an_optimizer_of_a_cell_is_carried(trained: Session, away: str) -> None:
    build = "make=Lion, lr=1e-4"
    trained.run(LION)
    begin(trained, build, "ddp")
    expected = one(trained, "train(4)")
    begin(trained, build, "ddp")
    trained.switch(away)
    found = one(trained, "train(2)")
    trained.switch("ddp")
    assert apart(found + one(trained, "train(2)"), expected) <= 1e-5


def test_muon_is_refused_before_anything_moves(trained: Session) -> None:
    trained.switch("ddp", **PLAIN)
    trained.run(
        "bare = model = optimizer = schedule = loader = batches = None\n"
        "bare = torch.nn.Linear(4, 4, bias=False)\n"
        "model, optimizer = accelerator.prepare(bare, torch.optim.Muon(bare.parameters()))\n"
        "accelerator.backward(model(torch.ones(2, 4)).sum()); optimizer.step()"
    )
    with pytest.raises(SwitchError, match="Muon"):
        trained.switch("fsdp2")
    assert trained.backend == "ddp"
    report = trained.switch("fsdp1", reset_optimizer=True)
    assert any("without its state" in words for words in report.carried)


@pytest.mark.parametrize(
    ("home", "away", "option"),
    [
        ("fsdp2", "fsdp2", "activation_checkpointing"),
        ("zero3", "ddp", "activation_checkpointing"),
        ("ddp", "fsdp2", "accumulate"),
    ],
)
def test_an_option_changes_on_the_way(trained: Session, home: str, away: str, option: str) -> None:
    value = {"activation_checkpointing": True, "accumulate": 2}[option]
    begin(trained, "", away, **{option: value})
    expected = one(trained, "train(4)")
    begin(trained, "", home)
    before = one(trained, "digests()")
    trained.switch(away, **{option: value})
    assert one(trained, "digests()") == before
    assert trained.options.to_json()[option] == value
    if option == "activation_checkpointing":
        assert apart(one(trained, "train(4)"), expected) <= 1e-6
    else:
        found = one(trained, "train(4)")
        assert len(found) == 4
        assert one(trained, "digests()") != before


def test_two_optimizers_go_where_an_engine_takes_them(trained: Session) -> None:
    trained.switch("ddp", **PLAIN)
    trained.run(
        "bare = model = optimizer = schedule = loader = batches = None\n"
        "torch.manual_seed(0); bare = torch.nn.Sequential(*(torch.nn.Linear(8, 8),) * 1,"
        " torch.nn.Linear(8, 2))\n"
        "model, one_, two = accelerator.prepare(bare, torch.optim.AdamW(bare[0].parameters()),"
        " torch.optim.SGD(bare[1].parameters(), lr=0.1, momentum=0.9))\n"
        "def steps(count):\n"
        "    for _ in range(count):\n"
        "        loss = model(torch.ones(2, 8)).square().mean(); accelerator.backward(loss)\n"
        "        [(o.step(), o.zero_grad()) for o in (one_, two)]\n"
        "    return loss.item()\n"
        "steps(3)"
    )
    with pytest.raises(SwitchError, match="has 2 optimizers and DeepSpeed takes a model with one"):
        trained.switch("zero2")
    before = one(trained, "digests()")
    trained.switch("fsdp1")
    assert one(trained, "digests()") == before
    assert one(trained, "steps(2)") < 10
