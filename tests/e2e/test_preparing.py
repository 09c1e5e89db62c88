"""Preparing again: what a notebook does all day, on two real CPU ranks under all six engines."""

from __future__ import annotations

import re
import textwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from nbdist import CellError, Session
from tests import engines
from tests.e2e.training import value_of
from tests.nightly import nightly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = textwrap.dedent(
    """
    import gc, tempfile, weakref
    from tests.models import gpt2

    def build():
        torch.manual_seed(0)
        return gpt2()

    def adam(model):
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(model, optimizer, steps=4):
        model.train()
        for start in range(steps):
            batch = tokens[4 * (2 * start + rank):][:4]
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean").item()

    tokens = torch.randint(0, 211, (64, 24), generator=torch.Generator().manual_seed(5))
    tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % 211
    models = []
    """
)
RERUN = textwrap.dedent(
    """
    model = build()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    loader = torch.utils.data.DataLoader(tokens, batch_size=4)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    at_once, earlier = sum(each() is not None for each in models), list(models)
    models += [weakref.ref(model), weakref.ref(accelerator.unwrap_model(model))]
    for batch in loader:
        outputs = model(input_ids=batch, labels=batch)
        loss = outputs.loss
        accelerator.backward(loss)
        optimizer.step(); schedule.step(); optimizer.zero_grad()
        break
    still_alive = sum(each() is not None for each in earlier)
    at_once, still_alive, len(accelerator._models), len(accelerator._optimizers)
    """
)
TRAINER = textwrap.dedent(
    """
    from tests.trainers import logged, make
    trainer = make(tempfile.mkdtemp(), build(), max_steps=6, disable_tqdm=True)
    {before}
    trainer.train()
    logged(trainer)
    """
)
SHARED = textwrap.dedent(
    """
    from tests import models as tiny

    def bert():
        torch.manual_seed(0)
        return tiny.bert()

    def t5():
        torch.manual_seed(0)
        return tiny.t5()

    def without_engine(model, optimizer, steps=4):
        model.train()
        for start in range(steps):
            batch = tokens[8 * start:][:8]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); optimizer.zero_grad()
        return loss.item()
    """
)
"""Models whose embedding or head has a parameter in common with yet another module."""
WRAPPED = {
    "ddp": "DistributedDataParallel",
    "fsdp": "FullyShardedDataParallel|FSDP(Bert|T5)For.*",
    "zero": "DeepSpeedEngine",
}
IN_ONE_CALL = "model = build(); model, optimizer = accelerator.prepare(model, adam(model))\n"


@pytest.fixture(scope="module", params=engines.each("zero3"))
def ranks(request: pytest.FixtureRequest) -> Iterator[Session]:
    with Session(nproc=2, backend=request.param) as session:
        session.run(MODEL)
        yield session


def test_a_rerun_frees_the_earlier_model_before_the_new_one_needs_room(ranks: Session) -> None:
    for _ in range(3):
        assert ranks.run(RERUN).values == {0: (0, 0, 1, 1), 1: (0, 0, 1, 1)}
        ranks.run("del outputs, loss")
    ranks.run("del model, optimizer, schedule, loader")


@pytest.mark.parametrize("ranks", ["zero2"], indirect=True)
def test_a_rerun_frees_an_engine_with_offload(ranks: Session) -> None:
    ranks.switch(offload="cpu")
    test_a_rerun_frees_the_earlier_model_before_the_new_one_needs_room(ranks)
    ranks.switch(offload="none")


def test_an_earlier_model_whose_loss_is_held_goes_at_the_next_backward(ranks: Session) -> None:
    for _ in range(3):
        result = ranks.run(RERUN)
        assert [value[1:] for value in result.values.values()] == [(0, 1, 1), (0, 1, 1)]
    ranks.run("del model, optimizer, schedule, loader, outputs, loss")


def test_an_earlier_model_whose_loss_is_held_is_neither_loaded_nor_switched(
    ranks: Session, tmp_path: Path
) -> None:
    backend = ranks.options.backend
    again = IN_ONE_CALL + "loss = model(input_ids=tokens[:4], labels=tokens[:4]).loss"
    ranks.run(again)
    ranks.save("first", folder=tmp_path, wait=True)
    ranks.run(IN_ONE_CALL)
    assert str(ranks.load("first", folder=tmp_path)).count("GPT2LMHeadModel") == 1
    ranks.run(again)
    ranks.run(IN_ONE_CALL)
    assert str(ranks.switch("zero1" if backend == "zero2" else "zero2")).count("GPT2") == 1
    ranks.switch(backend)
    ranks.run("del model, optimizer, loss")


@pytest.mark.parametrize("ranks", [nightly("fsdp1"), "fsdp2", "zero3"], indirect=True)
def test_an_earlier_model_whose_loss_is_kept_is_not_saved(ranks: Session, tmp_path: Path) -> None:
    ranks.run("losses = []")
    for _ in range(2):
        ranks.run(IN_ONE_CALL + "loss = model(input_ids=tokens[:4], labels=tokens[:4]).loss")
        ranks.run("losses.append(loss); accelerator.backward(loss); optimizer.step()")
    ranks.save("kept", folder=tmp_path, wait=True)
    assert str(ranks.load("kept", folder=tmp_path)).count("GPT2LMHeadModel") == 1
    ranks.run("del model, optimizer, loss, losses")


def test_preparing_what_is_prepared_changes_nothing(ranks: Session) -> None:
    expected = value_of(ranks, IN_ONE_CALL + "train(model, optimizer)\ntrain(model, optimizer)")
    code = (
        "again = accelerator.prepare(model, optimizer); "
        "assert again[0] is model and again[1] is optimizer; "
        "loader, same = accelerator.prepare(torch.utils.data.DataLoader(tokens), model); "
        "assert same is model and len(loader) == 32\n"
    )
    found = value_of(ranks, f"{IN_ONE_CALL}train(model, optimizer)\n{code}train(model, optimizer)")
    assert found == pytest.approx(expected, abs=1e-5)
    ranks.run("del model, optimizer, again, same, loader")


ANOTHER_OPTIMIZER = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
train(model, optimizer)
"""


def test_a_prepared_model_gets_another_optimizer(ranks: Session) -> None:
    once = "model = build()" + ANOTHER_OPTIMIZER
    expected = value_of(ranks, once + "train(model, optimizer)")
    assert value_of(ranks, once + ANOTHER_OPTIMIZER) == pytest.approx(expected, abs=1e-5)
    if ranks.backend.startswith("fsdp"):
        with pytest.raises(CellError, match="Sequential contains a model that FSDP has sharded"):
            ranks.run("around = torch.nn.Sequential(model); accelerator.prepare(around, optimizer)")
        ranks.run("del around")
    ranks.run("del model, optimizer")


@pytest.mark.parametrize("ranks", ["fsdp2"], indirect=True)
def test_what_is_prepared_after_its_model_is_wrapped_once(ranks: Session) -> None:
    ranks.run("model = accelerator.prepare(build()); optimizer = adam(model)")
    ranks.run("loader = torch.utils.data.DataLoader(tokens)")
    again = "optimizer, loader = accelerator.prepare(optimizer, loader)\n" * 2
    found = value_of(ranks, again + "len(loader), type(optimizer.optimizer).__name__")
    assert found == (32, "AdamW")
    ranks.run("del model, optimizer, loader")


@pytest.mark.nightly
def test_an_optimizer_that_was_in_use_during_prepare_goes_afterwards(ranks: Session) -> None:
    watch = "models.append(weakref.ref(accelerator.unwrap_model(model)))\n"
    for _ in range(2):
        ranks.run(IN_ONE_CALL + watch + "loss = train(model, optimizer)")
    alive = "sum(each() is not None for each in models)"
    assert value_of(ranks, f"gc.collect(); {alive}, len(accelerator._optimizers)") == (1, 1)
    ranks.run("del model, optimizer")


def test_the_bare_model_of_a_prepared_one_can_be_prepared_again(ranks: Session) -> None:
    expected = value_of(ranks, IN_ONE_CALL + "train(model, optimizer)\ntrain(model, optimizer)")
    first = "net = build(); raw = adam(net); "
    twice = "model, optimizer = accelerator.prepare(net, raw); train(model, optimizer)\n"
    assert value_of(ranks, first + twice * 2) == expected
    ranks.run("del model, optimizer, net, raw")


CRITIC = IN_ONE_CALL.replace("model", "critic").replace("optimizer", "second")


def test_two_models_stay_and_both_train(ranks: Session, tmp_path: Path) -> None:
    code = IN_ONE_CALL + CRITIC + "two = train(model, optimizer), train(critic, second)\n"
    losses, kept = value_of(ranks, code + "two, len(accelerator._models)")
    ranks.save("both", folder=tmp_path, wait=True)  # no gradients of a model are pending
    ranks.run("models = [critic]; del critic, second")
    loaded = ranks.load("both", folder=tmp_path, weights_only=True)
    assert str(loaded).count("GPT2LMHeadModel") == 2  # also the one in the list
    ranks.run("del model, optimizer, models[:]")
    assert kept == 2
    assert losses[0] == losses[1]
    if ranks.backend not in {"ddp", "fsdp1"}:
        with pytest.raises(CellError, match=r"got 2 models, .* one in a call"):
            ranks.run("accelerator.prepare(build(), build())")
    if "zero" in ranks.backend:
        with pytest.raises(CellError, match="got 2 optimizers"):
            ranks.run("twice = build(); accelerator.prepare(twice, adam(twice), adam(twice))")


COMPILED = """
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
net, steps = accelerator.prepare({net}, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(3):
    loss = net(torch.arange(16.0).view(2, 8)).mean()
    accelerator.backward(loss); steps.step(); steps.zero_grad()
loss.item()
"""


@pytest.mark.nightly
def test_a_compiled_model_is_prepared_saved_and_exported(ranks: Session, tmp_path: Path) -> None:
    expected = value_of(ranks, COMPILED.format(net="net"))
    ranks.run("del net, steps, loss")
    compiled = COMPILED.format(net="torch.compile(net, backend='aot_eager')")
    assert value_of(ranks, compiled) == pytest.approx(expected, abs=1e-5)
    ranks.save("compiled", folder=tmp_path, wait=True)
    ranks.load("compiled", folder=tmp_path)
    ranks.export(tmp_path / "model", model="net")
    assert "0.weight" in load_file(tmp_path / "model" / "model.safetensors")
    ranks.run("del net, steps, loss")


def test_a_model_trains_on_after_an_error_in_backward(ranks: Session) -> None:
    expected = value_of(ranks, IN_ONE_CALL + "train(model, optimizer)")
    ranks.run(IN_ONE_CALL + "kept = model(input_ids=tokens[:4], labels=tokens[:4])")
    with pytest.raises(CellError, match="on purpose"):
        ranks.run(
            "def fail(_): raise ValueError('on purpose')\n"
            "kept.loss.register_hook(fail); accelerator.backward(kept.loss)"
        )
    assert value_of(ranks, "train(model, optimizer)") == pytest.approx(expected, abs=1e-5)
    ranks.run("del kept")


def test_two_models_may_be_loaded_in_another_order(ranks: Session, tmp_path: Path) -> None:
    ranks.run(IN_ONE_CALL + CRITIC + "train(critic, second)")
    ranks.save("both", folder=tmp_path, wait=True)
    expected = value_of(ranks, "train(model, optimizer), train(critic, second)")
    ranks.run("del model, optimizer, critic, second")
    ranks.run(CRITIC + IN_ONE_CALL)
    ranks.load("both", folder=tmp_path)
    assert value_of(ranks, "train(model, optimizer), train(critic, second)") == expected
    ranks.run("del model, optimizer, critic, second")


@pytest.mark.parametrize("build", [nightly("bert"), "t5"])
def test_a_model_whose_embedding_or_head_is_shared_trains_as_without_an_engine(
    ranks: Session, build: str
) -> None:
    ranks.run(SHARED)
    expected = value_of(ranks, f"model = {build}(); without_engine(model, adam(model))")
    code = IN_ONE_CALL.replace("build", build) + "train(model, optimizer), type(model).__name__\n"
    loss, wrapped = value_of(ranks, code)
    head = value_of(ranks, "type(accelerator.unwrap_model(model).get_output_embeddings()).__name__")
    ranks.run("del model, optimizer")
    assert re.fullmatch(WRAPPED[ranks.backend.rstrip("123")], wrapped)
    assert head in {"Linear", "FSDPLinear"}
    assert loss == pytest.approx(expected, abs=1e-4)


def test_the_state_of_the_living_models_is_saved(ranks: Session, tmp_path: Path) -> None:
    for _ in range(2):
        ranks.run(IN_ONE_CALL)
    ranks.run(f"_ = accelerator.save_state({str(tmp_path)!r})")
    saved = {name.name for name in tmp_path.iterdir()}
    assert saved - {"random_states_0.pkl", "random_states_1.pkl"}
    assert not [name for name in saved if "_1" in name and "random" not in name]
    ranks.run("model, optimizer = accelerator.free_memory(model, optimizer)")
    assert ranks.run(RERUN).values[0][0] == 0
    ranks.run("del outputs, loss")


@pytest.mark.parametrize(
    "ranks", [*map(nightly, ("ddp", "fsdp1", "fsdp2")), "zero3"], indirect=True
)
def test_a_trainer_may_evaluate_before_it_trains(ranks: Session) -> None:
    expected = value_of(ranks, TRAINER.format(before=""))
    found = value_of(ranks, TRAINER.format(before="trainer.evaluate()"))
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("ranks", [nightly("fsdp1"), "zero3"], indirect=True)
def test_a_trainer_may_get_its_training_data_after_an_evaluation(ranks: Session) -> None:
    before = (
        "rows, trainer.train_dataset = trainer.train_dataset, None\n"
        "trainer.evaluate(); trainer.train_dataset = rows"
    )
    if ranks.backend == "fsdp1":
        with pytest.raises(CellError, match="create a new model and Trainer"):
            ranks.run(TRAINER.format(before=before))
    else:
        expected = value_of(ranks, TRAINER.format(before=""))
        assert value_of(ranks, TRAINER.format(before=before)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("ranks", ["fsdp2"], indirect=True)
def test_model_first_and_its_optimizer_later_is_the_same(ranks: Session) -> None:
    expected = value_of(ranks, IN_ONE_CALL + "train(model, optimizer)")
    before = "model = build(); raw = adam(model); model = accelerator.prepare(model)\n"
    after = "model = accelerator.prepare(build())\nwith torch.no_grad(): model(input_ids=tokens)\n"
    ways = (
        before + "optimizer = accelerator.prepare(raw)\n",
        before + "model, optimizer = accelerator.prepare(model, raw)\n",
        after + "optimizer = accelerator.prepare(adam(model))\n",
        after + "model, optimizer = accelerator.prepare(model, adam(model))\n",
    )
    for way in ways:
        assert value_of(ranks, way + "train(model, optimizer)") == pytest.approx(expected, abs=1e-5)
    with pytest.raises(CellError, match="not those of a prepared model"):
        ranks.run("accelerator.prepare(adam(build()))")


@pytest.mark.parametrize("ranks", ["fsdp2"], indirect=True)
def test_an_optimizer_of_parameters_that_were_replaced_is_refused(ranks: Session) -> None:
    ranks.run("model = build(); optimizer = adam(model); model = accelerator.prepare(model)")
    with pytest.raises(CellError, match=r"was built before accelerator\.prepare"):
        ranks.run("train(model, optimizer)")
    ranks.run("optimizer = adam(model); train(model, optimizer)")


@pytest.mark.parametrize("ranks", ["fsdp2"], indirect=True)
def test_an_optimizer_that_is_built_or_extended_after_an_evaluation_trains(ranks: Session) -> None:
    expected = value_of(ranks, IN_ONE_CALL + "train(model, optimizer)")
    evaluate = "with torch.no_grad(): model(input_ids=tokens)\n"
    built = "model = accelerator.prepare(build())\n" + evaluate + "optimizer = adam(model)\n"
    extended = (
        "model = build(); optimizer = adam(model.transformer.h)\n"
        "model, optimizer = accelerator.prepare(model, optimizer)\n"
        + evaluate
        + "rest = [each for name, each in model.named_parameters() if '.h.' not in name]\n"
        "optimizer.add_param_group({'params': rest})\n"
    )
    for way in (built, extended):
        assert value_of(ranks, way + "train(model, optimizer)") == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("ranks", ["fsdp2", "zero3"], indirect=True)
def test_shards_used_as_whole_parameters_fail_with_advice(ranks: Session) -> None:
    ranks.run("linear = torch.nn.Linear(4, 8); average = torch.zeros(8, 4)")
    ranks.run("model, optimizer = accelerator.prepare(linear, adam(linear))")
    add = "with torch.no_grad(): average += {}.weight"
    with pytest.raises(CellError) as failed:
        ranks.run(add.format("accelerator.unwrap_model(model)"))
    (shown,) = failed.value.__notes__
    advised = "with nbdist.full_parameters(model) as bare:"
    assert f"run it on all ranks within `{advised}`" in shown
    ranks.run(f"import nbdist\n{advised}\n    {add.format('bare')}")


POLICY = """
class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x):
        return {output}

torch.manual_seed(0)
model = Policy()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
inputs, chosen = torch.randn(16, 8), torch.arange(16) % 4
for _ in range(3):
    loss = -{log_prob}(chosen).mean()
    accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
loss.item()
"""


@pytest.mark.parametrize("ranks", ["ddp", nightly("fsdp1"), "fsdp2", "zero3"], indirect=True)
def test_a_model_may_return_a_distribution(ranks: Session) -> None:
    categorical = "torch.distributions.Categorical(logits=self.layer(x))"
    cell = POLICY.format(output=categorical, log_prob="model(inputs).log_prob")
    plain = SimpleNamespace(prepare=lambda *given: given, backward=torch.Tensor.backward)
    alone: dict[str, Any] = {"torch": torch, "accelerator": plain}
    exec(cell, alone)  # noqa: S102 - the same cell, without ranks
    assert value_of(ranks, cell) == pytest.approx(alone["loss"].item(), abs=1e-4)
    if ranks.backend == "fsdp2":
        hidden = POLICY.format(
            output=f"(lambda: {categorical})", log_prob="model(inputs)().log_prob"
        )
        with pytest.raises(CellError, match="found no tensor of the loss in what forward"):
            ranks.run(hidden)
    ranks.run("del model, optimizer, loss")


@pytest.mark.parametrize("ranks", ["ddp", nightly("fsdp1"), "fsdp2", "zero3"], indirect=True)
def test_state_dict_of_full_parameters_is_whole_and_stays(ranks: Session) -> None:
    ranks.run("""
        import nbdist
        from tests.models import llama

        def total(weights): return sum(each.double().sum() for each in weights.values()).item()

        bare, ids = llama(), torch.arange(8).view(2, 4)
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=1.0))
        with nbdist.full_parameters(model) as bare:
            best = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
            kept = bare.state_dict()
    """)
    train = "accelerator.backward(model(input_ids=ids, labels=ids).loss); optimizer.step()"
    ranks.run(f"{train}; llama().load_state_dict(kept); torch.save(best, '/dev/null')")
    again = "with nbdist.full_parameters(model) as bare: trained = total(bare.state_dict())\n"
    assert value_of(ranks, again + "abs(trained - total(best))") > 1e-3
    ranks.run("accelerator.unwrap_model(model).load_state_dict(best)")
    assert value_of(ranks, again + "abs(trained - total(best))") < 1e-6
    if ranks.backend != "ddp":  # where it is the live model
        assert value_of(ranks, "abs(total(kept) - total(best))") < 1e-6
    ranks.run("del model, optimizer, bare, best, kept")


@pytest.mark.parametrize("ranks", ["zero2"], indirect=True)
def test_two_models_may_share_a_frozen_part(ranks: Session) -> None:
    ranks.run("""
        base, norms, models = torch.nn.Linear(4, 4).requires_grad_(False), [], []
        for _ in range(2):
            model = torch.nn.Sequential(base, torch.nn.Linear(4, 1))
            model, optimizer = accelerator.prepare(model, adam(model[1]))
            accelerator.backward(model(torch.ones(2, 4)).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step(); models += [model, optimizer]
    """)
    assert min(value_of(ranks, "norms")) > 0
    ranks.run("del models, model, optimizer")


@pytest.mark.parametrize("ranks", [nightly("fsdp1"), "fsdp2", "zero3"], indirect=True)
def test_parameters_outside_of_the_model_are_refused(ranks: Session) -> None:
    ranks.run("model = build(); weights = torch.nn.Parameter(torch.zeros(2))")
    with pytest.raises(CellError, match="1 parameters of the SGD belong to no prepared model"):
        ranks.run("accelerator.prepare(model, torch.optim.SGD([*model.parameters(), weights]))")


@pytest.mark.parametrize("ranks", ["ddp", "fsdp2", "zero2", "zero3"], indirect=True)
def test_copying_a_prepared_model_fails_with_advice(ranks: Session) -> None:
    ranks.run("import copy, pickle; linear = torch.nn.Linear(4, 8)")
    ranks.run("model, optimizer = accelerator.prepare(linear, adam(linear))")
    copied = "pickle.dumps(model)" if ranks.backend == "ddp" else "copy.deepcopy(model)"
    with pytest.raises(CellError) as failed:
        ranks.run(copied)
    advised = "weights = accelerator.get_state_dict(model)"
    assert f"rank 0 gets them if all ranks run `{advised}`" in failed.value.__notes__[0]
    ranks.run(f"{advised}\nif rank == 0: torch.nn.Linear(4, 8).load_state_dict(weights)")


@pytest.mark.parametrize("ranks", ["zero3"], indirect=True)
def test_a_model_that_was_prepared_without_its_optimizer_is_named(ranks: Session) -> None:
    ranks.run("model = accelerator.prepare(build())")
    with pytest.raises(CellError, match="prepared without an optimizer"):
        ranks.run("train(model, adam(model))")
    ranks.run(IN_ONE_CALL + "train(model, optimizer)")


@pytest.mark.parametrize("ranks", ["ddp"], indirect=True)
def test_an_optimizer_of_an_earlier_model_is_named(ranks: Session) -> None:
    ranks.run(IN_ONE_CALL + "train(model, optimizer)")
    with pytest.raises(CellError, match="A new model needs an optimizer of its own"):
        ranks.run(
            "model = accelerator.prepare(build())\n"
            "accelerator.backward(model(input_ids=tokens[:4], labels=tokens[:4]).loss)\n"
            "optimizer.step(); optimizer.zero_grad()"
        )


FSDP_FILE = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "GPT2MLP",
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
DEEPSPEED_FILE = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


@pytest.mark.nightly
def test_an_fsdp_config_file_cuts_where_it_says() -> None:
    with Session(nproc=2, backend="fsdp", fsdp_config=FSDP_FILE) as session:
        session.run(MODEL)
        units = "[type(m).__name__ for m in model.modules() if hasattr(m, 'unshard')]"
        found = value_of(session, IN_ONE_CALL + f"train(model, optimizer), {units}")
        assert found[1].count("FSDPGPT2MLP") == 2
        assert "FSDPGPT2Block" not in found[1]
        assert found[0] < 5.4


@pytest.mark.nightly
def test_a_deepspeed_config_file_with_auto_values_trains() -> None:
    with Session(nproc=2, backend="zero3", deepspeed_config=DEEPSPEED_FILE) as session:
        session.run(MODEL)
        for _ in range(2):
            assert session.run(RERUN).values[0][1:] == (0, 1, 1)
        config = "accelerator.deepspeed_config['zero_optimization']['reduce_bucket_size']"
        assert value_of(session, config) == 45 * 45
        assert value_of(session, "train(model, optimizer)") < 5.4


@pytest.mark.nightly
def test_a_model_with_tensor_parallelism_is_refused(ranks: Session) -> None:
    with pytest.raises(CellError, match="has DTensor parameters"):
        ranks.run("""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (world_size,))
cut = parallelize_module(torch.nn.Sequential(torch.nn.Linear(8, 8)), mesh, {"0": ColwiseParallel()})
accelerator.prepare(cut, torch.optim.AdamW(cut.parameters()))
""")
