"""An unchanged transformers Trainer under every backend, as tutorials write it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaForCausalLM

from nbdist import CellError, Session, SwitchError
from nbdist.strategies import STRATEGIES
from tests import engines
from tests.e2e.training import value_of
from tests.trainers import ROWS, build, logged, make

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETUP = """
from tests.trainers import *
from transformers import EarlyStoppingCallback
"""
EPOCHS: dict[str, Any] = {
    "num_train_epochs": 2,
    "max_steps": -1,
    "gradient_accumulation_steps": 2,
    "label_smoothing_factor": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "eval_strategy": "epoch",
}


@pytest.fixture(scope="module", params=engines.each("fsdp2"))
def ranks(request: pytest.FixtureRequest) -> Iterator[Session]:
    with Session(nproc=2, backend=request.param) as session:
        session.run(SETUP)
        yield session


def test_the_losses_are_those_of_one_process(ranks: Session, tmp_path: Path) -> None:
    alone = make(str(tmp_path), use_cpu=True, **EPOCHS)
    alone.train()
    result = ranks.run(
        f"trainer = make({str(tmp_path)!r}, gradient_checkpointing=True, **{EPOCHS})\n"
        "trainer.train()\n"
        "[logged(trainer, name) for name in ('loss', 'eval_loss', 'eval_accuracy')]"
    )
    for name, found in zip(("loss", "eval_loss", "eval_accuracy"), result.values[0], strict=True):
        assert found == pytest.approx(logged(alone, name), abs=1e-4), name
    shown = {rank: [o["output_type"] for o in result.outputs[rank]] for rank in (0, 1)}
    assert "display_data" in shown[0]  # the table of losses
    assert "display_data" not in shown[1]


RESUME = """
arguments = dict(folder={folder!r}, save_strategy="steps", save_steps=3, save_total_limit=2)
whole = make({folder!r} + "/whole", build(0.1))
whole.train()
make(**arguments, model=build(0.1), callbacks=[StopAt(5)]).train()
"""
RESUMED = """
trainer = make(**arguments, model=build(0.1))
trainer.train(resume_from_checkpoint=True)
logged(trainer)
"""


def test_a_second_trainer_resumes_where_the_first_was_stopped(
    ranks: Session, tmp_path: Path
) -> None:
    ranks.run(RESUME.format(folder=str(tmp_path)))
    assert value_of(ranks, RESUMED) == pytest.approx(value_of(ranks, "logged(whole)"), abs=1e-6)
    folders = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert folders == {"checkpoint-6", "checkpoint-8"}
    ranks.run("del whole")
    backend = ranks.backend
    ranks.switch("ddp" if backend != "ddp" else "zero2", reset_optimizer=True)
    assert ranks.save("resumed", folder=tmp_path / "saved").wait(60).step == 8
    with pytest.raises(CellError, match=rf"was saved under {backend[:4]}.*, but the session uses"):
        ranks.run(RESUMED)
    other = tmp_path / "checkpoint-8" / ranks.options.strategy.trainer_state_files.replace("*", "8")
    other.parent.mkdir(exist_ok=True)
    other.touch()  # as if a run under this backend had saved to the same folder
    with pytest.raises(CellError, match="checkpoint-8 has files of two runs"):
        ranks.run(RESUMED)
    ranks.switch(backend)


RERUN = """
trainer = make({folder!r}, model=model)
trainer.train()
trainer.evaluate()["eval_loss"]
"""


def test_a_model_has_another_trainer(ranks: Session, tmp_path: Path) -> None:
    again, backend = RERUN.format(folder=str(tmp_path)), ranks.backend
    other = "ddp" if backend != "ddp" else "fsdp2"
    model = build()
    trainers = [make(str(tmp_path), model, use_cpu=True) for _ in range(2)]
    expected = [trainer.train() and trainer.evaluate()["eval_loss"] for trainer in trainers]
    ranks.run("model = build()")
    assert [value_of(ranks, again) for _ in range(2)] == pytest.approx(expected, abs=1e-4)
    ranks.save("again", folder=tmp_path, wait=True)
    ranks.run(f"second = make({str(tmp_path)!r}, model=model)\nsecond.train()")
    if not backend.startswith("zero"):  # where the first one keeps its optimizer
        with pytest.raises(SwitchError, match="A model was prepared twice, or two optim"):
            ranks.switch(other)
        ranks.run("del trainer")
    ranks.run("model.extra = torch.nn.Linear(2, 2)")
    with pytest.raises(
        SwitchError, match=r"got or lost 2 parameters after .*, such as extra\.bias"
    ):
        ranks.switch(other)
    ranks.run("del model.extra")
    ranks.switch(other)
    assert value_of(ranks, "model is second.model")
    ranks.switch(backend)
    ranks.run("trainer = None; del second")
    if backend == "ddp":
        ranks.switch(other)
    else:  # the model is sharded
        with pytest.raises(SwitchError, match="Trainer or Accelerator of `model` was deleted"):
            ranks.switch(other)
    value_of(ranks, again)
    ranks.switch(backend)
    ranks.run("del model, trainer")


COMPILED = """
trainer = make({folder!r}, torch_compile=True, torch_compile_backend="eager")
trainer.train()
trainer.evaluate()["eval_loss"]
"""


@pytest.mark.nightly
def test_a_compiled_model_trains_again_after_an_evaluation_and_a_switch(
    ranks: Session, tmp_path: Path
) -> None:
    alone = make(str(tmp_path), use_cpu=True)
    alone.train()
    other = "ddp" if (backend := ranks.backend) != "ddp" else "fsdp2"
    expected = alone.evaluate()["eval_loss"]
    assert value_of(ranks, COMPILED.format(folder=str(tmp_path))) == pytest.approx(
        expected, abs=1e-4
    )
    for step, where in enumerate((backend, other, backend), 2):
        ranks.switch(where)
        alone.train()
        ranks.run("trainer.train()")
        assert value_of(ranks, "logged(trainer)") == pytest.approx(logged(alone), abs=1e-4), step
    ranks.run("del trainer")


STOPPED = """
arguments = dict(folder={folder!r}, num_train_epochs=2, max_steps=-1)
whole = make(**arguments, model=build(0.1))
whole.train()
stopped = make(**arguments, model=build(0.1), callbacks=[{callback}])
stopped.train()
logged(whole)
"""
CONTINUED = """
{name} = make(**arguments, model=build(0.1))
{name}.train(resume_from_checkpoint={folder!r} + "/stopped")
logged({name})
"""


def test_a_trainer_resumes_from_a_save_of_the_session_under_any_backend(
    ranks: Session, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    expected = value_of(ranks, STOPPED.format(folder=folder, callback="StopAt(11)"))
    ranks.save("stopped", folder=tmp_path)  # the resume waits for it
    with pytest.raises(CellError, match=r"2 Trainers, of the variables whole, stopped\. Assign"):
        ranks.run(CONTINUED.format(folder=folder, name="trainer"))
    report = ranks.load("stopped", folder=tmp_path)
    assert "use trainer.train(resume_from_checkpoint=" in str(report)
    ranks.run("del whole")
    backend = ranks.backend
    for reader in (backend, "ddp" if backend != "ddp" else "zero2"):
        ranks.switch(reader)
        found = value_of(ranks, CONTINUED.format(folder=folder, name="stopped"))
        assert found == pytest.approx(expected, abs=1e-6)
    ranks.switch(backend)
    with pytest.raises(CellError, match=r"No checkpoint .*nope.* in .*stopped"):
        ranks.run(f"stopped.train(resume_from_checkpoint={folder!r} + '/nope')")


SAVE_AT = """
class SaveAt(TrainerCallback):
    def on_optimizer_step(self, args, state, control, **_):
        if state.global_step == 4:
            save("stopped", folder={folder!r})
"""


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["random", "group_by_length"])
def test_a_trainer_resumes_from_a_save_within_a_step(
    ranks: Session, tmp_path: Path, order: str
) -> None:
    folder = str(tmp_path)
    ranks.run(SAVE_AT.format(folder=folder))
    code = STOPPED.format(folder=folder, callback="SaveAt()").replace(
        "max_steps=-1", f"max_steps=-1, train_sampling_strategy={order!r}"
    )
    expected = value_of(ranks, code)
    found = value_of(ranks, CONTINUED.format(folder=folder, name="stopped"))
    # It was saved before the fifth step was logged.
    assert found[4:] == pytest.approx(expected[5:], abs=1e-6)


BEST = """
trainer = make(
    {folder!r}, learning_rate=0.3, lr_scheduler_type="constant", max_steps=30, eval_steps=2,
    eval_strategy="steps", save_strategy="steps", save_steps=2, save_total_limit=1,
    load_best_model_at_end=True, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
trainer.save_model({folder!r} + "/best")
predicted = trainer.predict(ROWS[:16])
state = trainer.state
dict(
    steps=state.global_step, best_step=state.best_global_step, best=state.best_metric,
    evaluated=trainer.evaluate()["eval_loss"], predicted=predicted.metrics["test_loss"],
    shape=predicted.predictions.shape,
)
"""


def test_the_best_model_is_loaded_and_saved_for_from_pretrained(
    ranks: Session, tmp_path: Path
) -> None:
    found = value_of(ranks, BEST.format(folder=str(tmp_path)))
    assert found["best_step"] < found["steps"] == found["best_step"] + 4
    assert found["evaluated"] == pytest.approx(found["best"], abs=1e-5)
    assert found["predicted"] == pytest.approx(found["best"], abs=1e-5)
    assert found["shape"] == (16, 24, 211)
    for saved in (tmp_path / "best", tmp_path / f"checkpoint-{found['best_step']}"):
        model = LlamaForCausalLM.from_pretrained(saved)
        loss = make(str(tmp_path), model, use_cpu=True).evaluate()["eval_loss"]
        assert loss == pytest.approx(found["best"], abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        "bf16=True",
        "optim='adafactor'",
        "train_sampling_strategy='group_by_length'",
        "save_strategy='steps', save_steps=4, save_only_model=True",
        "max_grad_norm=0.0, eval_strategy='steps', eval_steps=3",
    ],
)
def test_it_trains_with(ranks: Session, arguments: str, tmp_path: Path) -> None:
    code = f"trainer = make({str(tmp_path)!r}, {arguments}); trainer.train()"
    if "adafactor" in arguments and ranks.backend == "fsdp2":
        with pytest.raises(CellError, match="Adafactor cannot step parameters that fsdp2 shards"):
            ranks.run(code)
        return
    ranks.run(code)
    losses = value_of(ranks, "logged(trainer)")
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.03
    saved = sorted(tmp_path.glob("checkpoint-*/model.safetensors"))
    assert len(saved) == (2 if "save_only" in arguments else 0)


@pytest.mark.nightly
def test_a_model_init_is_called_for_each_training(ranks: Session, tmp_path: Path) -> None:
    cell = f"""
    args = TrainingArguments({str(tmp_path)!r}, max_steps=3, logging_steps=1, save_strategy="no")
    trainer = Trainer(model_init=lambda: build(), args=args, train_dataset=ROWS)
    trainer.train()
    first = logged(trainer)
    trainer.train()
    first, logged(trainer)
    """
    first, second = value_of(ranks, textwrap.dedent(cell))
    assert first == second


AGAIN = """
trainer = make({folder!r}, **{arguments})
trainer.train()
again = logged(trainer)
trainer.train()
again = again, logged(trainer), trainer.evaluate()["eval_loss"]
trainer.train(resume_from_checkpoint={folder!r} + "/checkpoint-2")
again += (logged(trainer), trainer.predict(ROWS[:16]).metrics["test_loss"])
"""
AGAIN_ARGUMENTS: dict[str, Any] = {
    "max_steps": 4,
    "eval_strategy": "epoch",
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.mark.nightly
def test_the_same_trainer_trains_again_and_resumes(ranks: Session, tmp_path: Path) -> None:
    code = AGAIN.format(folder=str(tmp_path / "ranks"), arguments=AGAIN_ARGUMENTS)
    found = value_of(ranks, code + "again")
    alone: dict[str, Any] = {"make": make, "logged": logged, "ROWS": ROWS}
    arguments = AGAIN_ARGUMENTS | {"use_cpu": True}
    exec(AGAIN.format(folder=str(tmp_path / "alone"), arguments=arguments), alone)  # noqa: S102 - the same cell
    for expected, result in zip(alone["again"], found, strict=True):
        assert result == pytest.approx(expected, abs=1e-4)


SAME_FILES = {"fsdp1": "fsdp2", "fsdp2": "fsdp1", "zero1": "zero2", "zero2": "zero1"}


@pytest.mark.nightly
def test_new_ranks_resume_where_others_were_stopped(ranks: Session, tmp_path: Path) -> None:
    ranks.run(RESUME.format(folder=str(tmp_path)))
    expected, backend = value_of(ranks, "logged(whole)"), ranks.backend
    ranks.restart()
    ranks.switch(SAME_FILES.get(backend, backend))
    ranks.run(SETUP)
    ranks.run(RESUME.format(folder=str(tmp_path)).splitlines()[1])
    assert value_of(ranks, RESUMED) == pytest.approx(expected, abs=1e-6)
    ranks.switch(backend)


# -- engines and numbers that TrainingArguments write too

DEEPSPEED = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 12345, "overlap_comm": True},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


@pytest.fixture(scope="module")
def clipped() -> Iterator[Session]:
    with Session(nproc=2, backend="zero2", clip=0.5) as session:
        session.run(SETUP)
        yield session


def test_a_deepspeed_config_that_agrees_is_used(clipped: Session, tmp_path: Path) -> None:
    cell = (
        f"trainer = make({str(tmp_path)!r}, deepspeed={DEEPSPEED}, gradient_accumulation_steps=2)"
    )
    clipped.run(cell + "\ntrainer.train()")
    used = value_of(clipped, "trainer.deepspeed.config")
    assert used["zero_optimization"]["reduce_bucket_size"] == 12345
    assert used["gradient_accumulation_steps"] == 2
    assert used["gradient_clipping"] == 0.5
    clipped.switch("zero1")  # the Trainer's model belongs to the session
    assert value_of(clipped, "trainer.deepspeed.zero_optimization_stage()") == 1
    clipped.switch("zero2")


def test_a_trainer_under_zero_evaluates_before_and_between_trainings(
    clipped: Session, tmp_path: Path
) -> None:
    alone = make(str(tmp_path), use_cpu=True).evaluate()["eval_loss"]
    cell = f"""
    trainer = make({str(tmp_path)!r}, max_steps=2, eval_strategy="epoch", num_train_epochs=1)
    losses = [trainer.evaluate()["eval_loss"], trainer.predict(ROWS[:16]).metrics["test_loss"]]
    for _ in range(2):
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    losses.append(make({str(tmp_path)!r}, trainer.model).evaluate()["eval_loss"])
    losses
    """
    before, predicted, first, second, of_another = value_of(clipped, textwrap.dedent(cell))
    assert before == predicted == pytest.approx(alone, abs=1e-4)
    assert of_another == second < first < before


NEW_OPTIMIZER = """
def create_optimizer(model=None):
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.3)

trainer = make({folder!r}, max_steps=2, logging_steps=1, **{arguments})
trainer.create_optimizer = create_optimizer
trainer.train()
trainer.train()
found = logged(trainer)
"""


def test_a_second_training_may_create_a_new_optimizer(clipped: Session, tmp_path: Path) -> None:
    found = value_of(clipped, NEW_OPTIMIZER.format(folder=str(tmp_path), arguments={}) + "found")
    alone: dict[str, Any] = {"make": make, "logged": logged, "torch": torch}
    arguments = {"use_cpu": True, "max_grad_norm": 0.5}
    exec(NEW_OPTIMIZER.format(folder=str(tmp_path), arguments=arguments), alone)  # noqa: S102 - the same cell
    assert found == pytest.approx(alone["found"], abs=1e-4)


@pytest.mark.parametrize("ranks", ["zero3"], indirect=True)
def test_refused_arguments_do_not_change_what_from_pretrained_returns(
    ranks: Session, tmp_path: Path
) -> None:
    arguments = "save_only_model=True, load_best_model_at_end=True, eval_strategy='steps'"
    with pytest.raises(CellError, match="save_only_model"):
        ranks.run(f"make({str(tmp_path)!r}, {arguments})")
    from_config = "type(build()).from_pretrained(folder).lm_head.weight.numel()"
    ranks.run(f"folder = {str(tmp_path)!r}; rank or build().save_pretrained(folder)")
    ranks.run("accelerator.wait_for_everyone()")
    assert value_of(ranks, f"{from_config} == build().lm_head.weight.numel()")


GIVEN = """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
trainer = make({folder!r}, model, optimizers=(optimizer, scheduler), **{arguments})
trainer.train()
trainer.train()
given = logged(trainer), logged(trainer, "learning_rate")
"""


def test_the_given_optimizer_and_scheduler_are_used(clipped: Session, tmp_path: Path) -> None:
    found = value_of(clipped, GIVEN.format(folder=str(tmp_path), arguments={}) + "given")
    alone: dict[str, Any] = {"build": build, "make": make, "logged": logged, "torch": torch}
    arguments = {"use_cpu": True, "max_grad_norm": 0.5}
    exec(GIVEN.format(folder=str(tmp_path), arguments=arguments), alone)  # noqa: S102 - the same cell
    for expected, result in zip(alone["given"], found, strict=True):
        assert result == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bf16_full_eval=True", r"casts parameters that zero2 owns\. Remove it, or use bf16=True"),
        (
            "deepspeed={'zero_optimization': {'stage': 7}}",
            r"deepspeed has no version or stage 7\. Use one of 1 \(zero1\), 2 \(zero2\)",
        ),
        (
            "deepspeed={'zero_optimization': {'stage': 3, 'offload_optimizer': {'device': 'cpu'}}}",
            r"Use `%%distribute --backend zero3 --offload cpu`, which does the same",
        ),
        (
            "fsdp='full_shard auto_wrap offload'",
            r"Use `%%distribute --backend fsdp2 --offload cpu`, which does the same",
        ),
        ("max_grad_norm=1.0", r"max_grad_norm=1\.0 but the session has --clip 0\.5\. Remove one"),
        (
            "deepspeed={'zero_optimization': {'stage': 2}, 'gradient_clipping': 1.0}",
            r"clip is 0\.5 but the config file has gradient_clipping = 1\.0\. Remove one",
        ),
    ],
)
def test_what_does_not_agree_with_the_session_is_one_sentence(
    clipped: Session, arguments: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CellError, match=message):
        clipped.run(f"make({str(tmp_path)!r}, {arguments})")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "arguments", "used", "expected"),
    [
        (
            "zero3",
            "deepspeed={'zero_optimization': {'stage': 3, 'stage3_max_live_parameters': 7}}",
            "trainer.deepspeed.config['zero_optimization']['stage3_max_live_parameters']",
            7,
        ),
        (
            "fsdp2",
            "fsdp=True, fsdp_config={'reshard_after_forward': False}",
            "trainer.accelerator.state.fsdp_plugin.reshard_after_forward",
            False,
        ),
        (
            "fsdp1",
            "fsdp='shard_grad_op', fsdp_config={'transformer_layer_cls_to_wrap': 'LlamaMLP'}",
            "trainer.accelerator.state.fsdp_plugin.sharding_strategy.name",
            "SHARD_GRAD_OP",
        ),
        (
            "fsdp1",
            "fsdp=True, fsdp_config={'version': 1, 'state_dict_type': 'FULL_STATE_DICT'}",
            "trainer.accelerator.state.fsdp_plugin.state_dict_type.name",
            "FULL_STATE_DICT",
        ),
    ],
)
def test_a_config_that_agrees_is_used(
    backend: str, arguments: str, used: str, expected: object, tmp_path: Path
) -> None:
    with Session(nproc=2, backend=backend) as session:
        session.run(SETUP)
        session.run(f"trainer = make({str(tmp_path)!r}, {arguments}); trainer.train()")
        assert value_of(session, used) == expected
        assert value_of(session, "len(logged(trainer))") == 8


@pytest.mark.nightly
@pytest.mark.parametrize("backend", STRATEGIES)
def test_options_of_the_session_replace_defaults_only(backend: str, tmp_path: Path) -> None:
    numbers = "(args := trainer.args).max_grad_norm, args.gradient_accumulation_steps, args.bf16"
    options = {"clip": 0.5, "accumulate": 2, "precision": "bf16"}
    with Session(nproc=2, backend=backend, **options) as session:
        session.run(SETUP)
        session.run(f"trainer = make({str(tmp_path)!r}); trainer.train()")
        assert value_of(session, numbers) == (0.5, 2, True)
        for written in ("gradient_accumulation_steps=1", "bf16=False"):
            with pytest.raises(CellError, match=f"TrainingArguments has {written} but the session"):
                session.run(f"make({str(tmp_path)!r}, {written})")
        session.switch(backend, clip=None, accumulate=1, precision="no")
        written = "max_grad_norm=0.3, gradient_accumulation_steps=4, bf16=True"
        session.run(f"trainer = make({str(tmp_path)!r}, {written}); trainer.train()")
        assert value_of(session, numbers) == (0.3, 4, True)
        session.switch(backend, compile_model=True)
        compiled = f"make({str(tmp_path)!r}).accelerator.state.dynamo_plugin.backend.name"
        assert value_of(session, compiled) == "INDUCTOR"


@pytest.mark.nightly
def test_auto_decides_for_the_trainer(tmp_path: Path) -> None:
    with Session(nproc=2, auto=True) as session:
        session.run(SETUP)
        with pytest.raises(CellError, match=r"or use `%%distribute --backend zero2`"):
            session.run(f"make({str(tmp_path)!r}, deepspeed={DEEPSPEED})")
        session.run(f"trainer = make({str(tmp_path)!r}, bf16=True, optim='adafactor')")
        session.run("trainer.train()")
        assert session.backend in STRATEGIES
        assert value_of(session, "len(logged(trainer))") == 8
