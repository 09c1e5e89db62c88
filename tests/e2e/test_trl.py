"""TRL's trainers as its README writes them, on two CPU ranks."""

from __future__ import annotations

import itertools
import math
import textwrap
from typing import TYPE_CHECKING

import pytest

from nbdist import CellError, Session
from tests import engines

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a README has in `load_dataset(...)` and in the name of a model is made in tests.fine_tuning.
SETUP = textwrap.dedent(
    """
    import os
    from peft import LoraConfig
    from trl import (
        DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig,
        SFTTrainer,
    )
    from tests.fine_tuning import conversations, preferences, prompts, tokenizer

    os.chdir({output!r})
    model = {folder!r}

    def correct_answer(completions, sum, **_):
        return [float(str(s) in c[0]["content"].split()) for c, s in zip(completions, sum)]
    """
)
TRAINERS = {
    "sft": "SFTTrainer(model=model, args=SFTConfig(max_steps=2, logging_steps=1),"
    " train_dataset=conversations(), peft_config=peft_config)",
    "dpo": "DPOTrainer(model=model, args=DPOConfig(max_steps=2, logging_steps=1),"
    " processing_class=tokenizer(), train_dataset=preferences(), peft_config=peft_config)",
    "reward": "RewardTrainer(model=model, args=RewardConfig(max_steps=2, logging_steps=1),"
    " train_dataset=preferences(), peft_config=peft_config)",
    "grpo": "GRPOTrainer(model=model, reward_funcs=correct_answer, args=GRPOConfig(max_steps=2,"
    " logging_steps=1, max_completion_length=8), train_dataset=prompts(),"
    " peft_config=peft_config)",
}
CASES = [
    *itertools.product(["ddp", "fsdp2", "zero2", "zero3"], TRAINERS, ["None", "LoraConfig()"]),
    ("fsdp1", "grpo", "None"),
]


@pytest.fixture(scope="module")
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    from tests import fine_tuning

    folder = fine_tuning.save_model(tmp_path_factory.mktemp("model"))
    output = str(tmp_path_factory.mktemp("output"))
    with Session(nproc=2, backend=request.param) as started:
        started.run(SETUP.format(folder=folder, output=output))
        yield started


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("session", "trainer", "peft_config"), CASES, indirect=["session"])
def test_a_trainer_of_the_readme_trains(session: Session, trainer: str, peft_config: str) -> None:
    losses = session.run(
        f"peft_config = {peft_config}\n"
        f"trainer = {TRAINERS[trainer]}\n"
        "trainer.train()\n"
        "[row['loss'] for row in trainer.state.log_history if 'loss' in row]"
    ).values
    assert len(losses[0]) == 2
    assert all(map(math.isfinite, losses[0]))
    assert losses[0] == losses[1]


ON_A_GPU = """
from nbdist.strategies import Hardware, Options
from nbdist.worker.engines import accelerator_patch, training_arguments

def precision(chosen, **written):
    gpu = Hardware(kind="cuda", bf16=True)
    session = accelerator_patch.EngineConfig(Options(precision=chosen).validate(gpu), gpu)
    training_arguments.combine(args := SFTConfig("out", **written), session)
    return args.mixed_precision, args.fp16, args.bf16
"""


@pytest.mark.parametrize("session", engines.each("zero3"), indirect=True)
def test_the_precision_of_the_session_replaces_the_default_of_trl(session: Session) -> None:
    session.run(ON_A_GPU)
    found = session.run("precision('fp16'), precision('no'), precision('bf16')").values[0]
    assert found == (("fp16", True, False), ("no", False, False), ("bf16", False, True))
    assert session.run("precision('bf16', fp16=True)").values[0] == ("fp16", True, False)
    with pytest.raises(CellError, match="has bf16=True but the session has --precision fp16"):
        session.run("precision('fp16', bf16=True)")


TWICE = """
from tests.fine_tuning import sft_trainer
import torch

def norms(adapter, num_forwards):
    trainer = sft_trainer(model, "forwards", adapter, logging_steps=1)
    trainer.train()
    batch = {"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]}
    for _ in range(num_forwards):
        with torch.no_grad():
            trainer.model_wrapped(**batch)
    trainer.train()
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
"""


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", ["lora", ""])
@pytest.mark.parametrize("session", engines.each("zero3"), indirect=True)
def test_forwards_between_two_trainings_change_no_gradient(session: Session, adapter: str) -> None:
    session.run(TWICE)
    expected, found = session.run(f"norms({adapter!r}, 0), norms({adapter!r}, 2)").values[0]
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("session", ["ddp", "fsdp2", "zero2"], indirect=True)
def test_a_model_is_freed_with_its_trainer_and_runs_after_a_switch(session: Session) -> None:
    made = "trainer = sft_trainer(model, 'freed', {adapter!r}); trainer.train()"
    session.run("from tests.fine_tuning import sft_trainer\nimport gc, torch, weakref")
    for adapter in ("", "lora"):
        session.run(made.format(adapter=adapter))
        session.run("found = weakref.ref(next(trainer.model.parameters())); del trainer")
        # The first collection of ZeRO's engine runs finalizers.
        code = "gc.collect(); gc.collect(); found() is None"
        assert session.run(code).values == {0: True, 1: True}
    session.run(made.format(adapter=""))
    cell = "with torch.no_grad(): loss = float(trainer.model_wrapped(**batch).loss)"
    session.run("batch = {name: torch.arange(12)[None] for name in ('input_ids', 'labels')}")
    before, backend = session.run(cell + "\nloss").values[0], session.backend
    session.switch("zero1")
    assert session.run(cell + "\nloss").values[0] == pytest.approx(before, abs=1e-5)
    session.switch(backend)
