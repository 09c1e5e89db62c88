"""All six engines on two real CPU ranks: the same cell, the same losses."""

from __future__ import annotations

import textwrap
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nbdist import CellError, Session, SwitchError
from nbdist.strategies import STRATEGIES
from tests import engines
from tests.e2e.cells import TRAINER
from tests.e2e.training import WRAPPED
from tests.nightly import nightly

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 15
TRAINER_STEPS = 8
MODEL = textwrap.dedent(
    """
    from tests.models import gpt2

    def build():
        torch.manual_seed(0)
        return gpt2()

    tokens = torch.randint(0, 211, (64, 24), generator=torch.Generator().manual_seed(5))
    tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % 211
    """
)
CELL = textwrap.dedent(
    """
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10))
    loader = torch.utils.data.DataLoader(tokens, batch_size=4)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses = []
    while len(losses) < {steps}:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if {cell_clip} and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), {cell_clip})
                optimizer.step(); schedule.step(); optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == {steps}: break
    (type(model).__name__, losses)
    """
)
ARGUMENTS = "**nbdist.trainer_arguments()"


def losses(backend: str, **options: Any) -> dict[str, list[float]]:
    """Losses of every way to write the training, under one backend."""
    ways = {
        "plain": CELL.format(steps=STEPS, cell_clip=None),
        "own": "accelerator = __import__('accelerate').Accelerator()\n"
        + CELL.format(steps=STEPS, cell_clip=0.5),
        "trainer": TRAINER.format(steps=TRAINER_STEPS, arguments=""),
        "trainer_arguments": TRAINER.format(steps=TRAINER_STEPS, arguments=ARGUMENTS),
    }
    if not options:
        own = "max_grad_norm=0.3, gradient_accumulation_steps=2, warmup_steps=5"
        ways["trainer with numbers of its own"] = TRAINER.format(steps=TRAINER_STEPS, arguments=own)
    found = {}
    with Session(nproc=2, backend=backend, **options) as session:
        session.run(MODEL)
        for way, code in ways.items():
            wrapped, found[way] = session.run(code).values[0]
            assert wrapped == WRAPPED[backend]
            assert len(found[way]) == (TRAINER_STEPS if "trainer" in way else STEPS)
    return found


@pytest.fixture(scope="module")
def under_ddp() -> dict[str, list[float]]:
    return losses("ddp")


@pytest.fixture(scope="module")
def under_ddp_with_options() -> dict[str, list[float]]:
    return losses("ddp", clip=0.5, accumulate=2)


def assert_same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for way, values in expected.items():
        apart = max(abs(a - b) for a, b in zip(found[way], values, strict=True))
        assert apart <= 1e-4, f"{way}: {apart}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", engines.each("zero3"))
def test_losses_lie_on_those_of_ddp(backend: str, under_ddp: dict[str, list[float]]) -> None:
    assert_same(losses(backend), under_ddp)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", STRATEGIES)
def test_clip_and_accumulate_mean_the_same(
    backend: str, under_ddp_with_options: dict[str, list[float]]
) -> None:
    assert_same(losses(backend, clip=0.5, accumulate=2), under_ddp_with_options)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("option", ["compile", "compile_model"])
@pytest.mark.parametrize("backend", STRATEGIES)
def test_compiled_models_train_and_generate_as_others(
    backend: str, option: str, under_ddp: dict[str, list[float]]
) -> None:
    with Session(nproc=2, backend=backend, **{option: True}) as session:
        session.run(MODEL)
        _, found = session.run(CELL.format(steps=6, cell_clip=None)).values[0]
        assert found == pytest.approx(under_ddp["plain"][:6], abs=1e-4)
        blocks = session.run(
            "blocks = [m for m in model.modules() if type(m).__name__.endswith('GPT2Block')]\n"
            "[block._compiled_call_impl is not None for block in blocks]"
        ).values[0]
        assert blocks == [option == "compile"] * 2
        graphs = "torch._dynamo.utils.counters['stats']['unique_graphs']"
        before = session.run(graphs).values[0]
        session.run("import nbdist\nids = tokens[:3, :4]")
        session.run("batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids))")
        sample = "nbdist.generate(model, batch, max_new_tokens=6, pad_token_id=0)"
        assert session.run(f"tuple({sample}.shape)").values[0] == (3, 10)
        assert session.run(graphs).values[0] == before  # nothing is compiled for a sample


def test_the_late_accelerator_answers_without_an_engine() -> None:
    with Session(nproc=2, backend="zero3") as session:
        before = session.run("(accelerator.num_processes, str(accelerator.device))").values
        assert before == {0: (2, "cpu"), 1: (2, "cpu")}
        assert "built at the first prepare" in session.run("repr(accelerator)").values[0]


@pytest.fixture(scope="module")
def under_zero2() -> Iterator[Session]:
    with Session(nproc=2, backend="zero2") as session:
        session.run(MODEL)
        yield session


def test_an_optimizer_alone_under_deepspeed_is_one_sentence(under_zero2: Session) -> None:
    under_zero2.run("model = build()")
    with pytest.raises(CellError, match="one call for both"):
        under_zero2.run("accelerator.prepare(torch.optim.AdamW(model.parameters()))")


def test_a_plain_loop_gets_a_message_about_what_zero_cannot_do(under_zero2: Session) -> None:
    with pytest.raises(CellError, match=r"clip_grad_norm_ cannot.*accelerator\.clip_grad_norm_"):
        under_zero2.run(
            "model = torch.nn.Linear(4, 1)\n"
            "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))\n"
            "model = model.eval().train()\n"
            "accelerator.backward(model(torch.ones(2, 4)).sum())\n"
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
        )
    with pytest.raises(CellError, match="clip_grad_value_ cannot clip gradients that a DeepSpeed"):
        under_zero2.run("torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)")
    with pytest.raises(CellError, match="clip_grads_with_norm_ cannot clip gradients that a"):
        under_zero2.run(
            "torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.ones(()))"
        )
    under_zero2.run("optimizer.step(); optimizer.zero_grad()")
    with pytest.raises(CellError, match=r"written to parameter\.grad are not used"):
        under_zero2.run(
            "for parameter in model.parameters(): parameter.grad = torch.ones_like(parameter)\n"
            "optimizer.step()"
        )
    with pytest.raises(CellError, match="Give the optimizer all groups before"):
        under_zero2.run("optimizer.add_param_group({'params': []})")
    for call in ("torch.save(optimizer.state_dict(), 'o.pt')", "optimizer.load_state_dict({})"):
        with pytest.raises(CellError, match="would be one rank's part"):
            under_zero2.run(call)


BY_HAND = """
for step in range(3):
    backward(100 * loss(step)); optimizer.zero_grad()  # a batch that is dropped
    optimizer.step()  # without gradients
    backward(100 * loss(step)); later = loss(step + 50); model.zero_grad(); backward(later)
    backward(loss(step + 10) / 2); backward(loss(step + 20) / 2)
    first, second = loss(step + 30), loss(step + 40)
    backward(first); backward(second)
    optimizer.step(); optimizer.zero_grad()
"""
IN_PAIRS = """
for step in (0, 2):
    backward((loss(step) + loss(step + 1)) / 2); optimizer.step(); optimizer.zero_grad()
"""
ACCUMULATED = """
accelerator.gradient_accumulation_steps = 2
for step in range(4):
    with accelerator.accumulate(model):
        backward(loss(step)); optimizer.step(); optimizer.zero_grad()
"""
LINEAR = """
def loss(number):
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    return model(rows[share]).square().mean()

torch.manual_seed(0)
model = torch.nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
LOADED = """
with torch.no_grad(): loss(61)
weight = torch.linspace(-1, 1, 24).reshape(4, 6)
{}.load_state_dict({{"weight": weight, "bias": torch.ones(4)}})
optimizer.zero_grad(); backward(loss(60)); optimizer.step()
"""
WEIGHTS = "with nbdist.full_parameters(model) as bare: found = bare.weight.tolist()"


@pytest.mark.parametrize(
    ("backend", "offload"),
    [
        ("ddp", "none"),
        ("fsdp2", "none"),
        nightly("zero1", "none"),
        ("zero2", "cpu"),
        ("zero3", "none"),
        nightly("zero1", "cpu"),
        nightly("zero2", "none"),
        nightly("zero3", "cpu"),
    ],
)
def test_gradients_add_up_until_a_step_or_zero_grad(backend: str, offload: str) -> None:
    plain: dict[str, Any] = {
        "torch": torch,
        "share": slice(None),
        "backward": torch.Tensor.backward,
    }
    exec(LINEAR + BY_HAND + IN_PAIRS, plain)  # noqa: S102 - on all rows, without ranks
    with Session(nproc=2, backend=backend, offload=offload) as session:
        session.run("import nbdist; share = slice(rank, None, 2); backward = accelerator.backward")
        prepare = "model, optimizer = accelerator.prepare(model, optimizer)"
        session.run(LINEAR + prepare + BY_HAND)
        session.run(ACCUMULATED)
        found = torch.tensor(session.run(WEIGHTS + "\nfound").values[0])
        assert torch.allclose(found, plain["model"].weight, atol=1e-6)
        session.run("backward(loss(50)); model.zero_grad(set_to_none=True); optimizer.step()")
        assert session.run(WEIGHTS + "\nfound").values[0] == found.tolist()
        exec(LOADED.format("model"), plain)  # noqa: S102 - as above
        session.run("accelerator.gradient_accumulation_steps = 1")
        session.run(LOADED.format("accelerator.unwrap_model(model)"))
        found = torch.tensor(session.run(WEIGHTS + "\nfound").values[0])
        assert torch.allclose(found, plain["model"].weight, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("zero1", "no"),
        ("zero2", "bf16"),
        nightly("ddp", "no"),
        nightly("fsdp1", "no"),
        ("fsdp2", "bf16"),
    ],
)
def test_written_weights_are_saved_and_trained_on(backend: str, precision: str) -> None:
    step = "optimizer.zero_grad(); accelerator.backward(loss(1)); optimizer.step()"
    with Session(nproc=2, backend=backend, precision=precision) as session:
        session.run("share = slice(rank, None, 2)\n" + LINEAR)
        session.run("model, optimizer = accelerator.prepare(model, optimizer)\n" + step)
        before = session.pull("model")
        # after an evaluation, which leaves FSDP2's root gathered
        session.run("with torch.no_grad(): loss(0); [*model.parameters()][1].fill_(3)")
        shown = session.run("model(torch.zeros(1, 6)).detach().flatten().tolist()")
        written = session.pull("model")
        session.run(step)
        trained = session.pull("model")
    assert shown.values == dict.fromkeys((0, 1), [3] * 4)
    assert written["bias"].tolist() == [3] * 4
    assert torch.equal(written["weight"], before["weight"])  # as precise as before
    assert 0 < (trained["bias"] - 3).abs().max() < 0.5


SCALED = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.PReLU())
model[1].weight = torch.nn.Parameter(torch.tensor(0.25))  # no dimension, as CLIP's logit_scale
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
"""
SCALED_STEP = """
rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))[share]
model(rows).square().mean().backward()
optimizer.step(); optimizer.zero_grad()
"""


def test_scalar_parameters_are_trained_under_zero_and_refused_under_fsdp() -> None:
    plain: dict[str, Any] = {"torch": torch, "share": slice(None)}
    exec(SCALED + SCALED_STEP * 4, plain)  # noqa: S102 - on all rows, without ranks
    with Session(nproc=2, backend="zero2") as session:
        session.run("share = slice(rank, None, 2)" + SCALED)
        session.run("if rank: model[1].weight.data.fill_(9.0)")  # rank 0's is the model's
        session.run("model, optimizer = accelerator.prepare(model, optimizer)" + SCALED_STEP)
        for backend in ("zero3", "ddp", "zero1"):
            session.switch(backend)
            session.run(SCALED_STEP)
            session.run("accelerator.get_state_dict(model)")
        trained = session.pull("model")["1.weight"]
        with pytest.raises(SwitchError, match=r"model\.get_submodule\('1'\)\.weight = .*reshape"):
            session.switch("fsdp2")
    assert trained.shape == ()
    assert torch.allclose(trained, plain["model"][1].weight, atol=1e-6)


def test_data_of_a_shard_can_be_assigned() -> None:
    with Session(nproc=2, backend="fsdp2") as session:
        session.run("share, backward = slice(rank, None, 2), accelerator.backward" + LINEAR)
        session.run("model, optimizer = accelerator.prepare(model, optimizer)")
        session.run("model.weight.data = model.weight.data * 0 + 2\nbackward(loss(1))")
        assert session.pull("model")["weight"].tolist() == [[2] * 6] * 4


def test_numbers_of_shards_are_those_of_the_whole_parameter() -> None:
    with Session(nproc=2, backend="fsdp2") as session:
        session.run("share, backward = slice(rank, None, 2), accelerator.backward" + LINEAR)
        session.run("whole = model.weight.norm().item()")
        session.run("model, optimizer = accelerator.prepare(model, optimizer)")
        shown = session.run(
            "norm = model.weight.norm()\n"
            "(norm.item(), float(norm), bool((model.bias > 0).any())) == "
            "(whole, whole, bool((model.bias.full_tensor() > 0).any()))"
        )
        assert shown.values == {0: True, 1: True}


PENALTY = """
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1, bias=False)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
PENALIZED = """
for number in range(3):
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))[share]
    rows.requires_grad_()
    (gradient,) = torch.autograd.grad(model(rows).sum(), rows)
    with gathered(model):
        (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        loss = model(rows + gradient).mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("backend", ["fsdp2", "zero1", "zero3", nightly("ddp"), nightly("zero2")])
def test_gradients_of_inputs_can_be_part_of_the_loss(backend: str) -> None:
    plain: dict[str, Any] = {"torch": torch, "share": slice(None), "gathered": nullcontext}
    exec(PENALTY + PENALIZED, plain)  # noqa: S102 - on all rows, without ranks
    with Session(nproc=2, backend=backend, accumulate=2) as session:
        session.run("from nbdist import full_parameters as gathered; share = slice(rank, None, 2)")
        session.run(PENALTY + "model, optimizer = accelerator.prepare(model, optimizer)")
        session.run(PENALIZED)
        trained = session.pull("model")["0.weight"]
    assert torch.allclose(trained, plain["model"][0].weight, atol=1e-6)


@pytest.mark.parametrize("backend", ["zero2", "zero3", nightly("zero1")])
def test_a_plain_backward_of_several_forwards_reduces_all_gradients(backend: str) -> None:
    several = """
for step in range(3):
    optimizer.zero_grad(); (loss(step) + loss(step + 10)).backward(); optimizer.step()
"""
    plain: dict[str, Any] = {"torch": torch, "share": slice(None)}
    exec(LINEAR + several, plain)  # noqa: S102 - on all rows, without ranks
    with Session(nproc=2, backend=backend) as session:
        session.run("import nbdist; share = slice(rank, None, 2)")
        session.run(LINEAR + "model, optimizer = accelerator.prepare(model, optimizer)" + several)
        found = torch.tensor(session.run(WEIGHTS + "\nfound").values[0])
    assert torch.allclose(found, plain["model"].weight, atol=1e-6)


def test_ddp_averages_what_a_skipped_micro_batch_leaves_and_names_unused_layers() -> None:
    skip = ACCUMULATED.replace("backward(loss(step));", "step == 1 or backward(loss(step));")
    with Session(nproc=2, backend="ddp") as session:
        session.run("share = slice(rank, None, 2); backward = accelerator.backward")
        session.run(LINEAR + "model, optimizer = accelerator.prepare(model, optimizer)" + skip)
        session.run("with accelerator.accumulate(model): backward(loss(5))")  # one of two
        session.run("optimizer.zero_grad(); backward(loss(6)); optimizer.step()")
        weights = session.run("model.module.weight.tolist()").values
        plain: dict[str, Any] = {"torch": torch, "share": slice(None)}
        exec(LINEAR, plain)  # noqa: S102 - on all rows, without ranks
        for losses in ("loss(0)", "loss(2) + loss(3)", "loss(6)"):
            exec(f"optimizer.zero_grad(); (({losses}) / 2).backward(); optimizer.step()", plain)  # noqa: S102
        for found in weights.values():
            assert torch.allclose(torch.tensor(found), plain["model"].weight, atol=1e-6)
        session.switch("fsdp")
        assert session.run("accelerator.gradient_accumulation_steps").values[0] == 2

        session.switch("ddp")
        session.run(
            LINEAR + "model.spare = torch.nn.Linear(6, 4); model = accelerator.prepare(model)"
        )
        with pytest.raises(
            CellError, match=r"does not use spare\.weight, spare\.bias, but ddp waits"
        ):
            session.run("backward(loss(0))")


@pytest.mark.parametrize("backend", ["zero2", nightly("ddp")])
def test_a_trained_model_does_not_wait_for_the_backward_of_another(backend: str) -> None:
    prepare = LINEAR + "model, optimizer = accelerator.prepare(model, optimizer)\n"
    with Session(nproc=2, backend=backend) as session:
        session.run("share, backward = slice(rank, None, 2), accelerator.backward")
        session.run(prepare + "backward(loss(1)); optimizer.step(); first = model, optimizer")
        session.run(prepare + "later = loss(2); optimizer.zero_grad(); backward(later)")
        session.run("optimizer.step()")
        session.switch("fsdp")


BRANCHES = """
torch.manual_seed(0)
models = [torch.nn.Linear(6, 4) for _ in "ab"]
models = [accelerator.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
(first, one), (second, other) = models
moved = []
for used in ([first, second], [first], [second]):
    before = [whole(first), whole(second)]
    for _ in range(2):
        with accelerator.accumulate(first, second):
            outputs = torch.cat([model(torch.ones(2, 6)) for model in used])
            accelerator.backward(outputs.square().mean())
            for optimizer in (one, other): optimizer.step(); optimizer.zero_grad()
    moved.append([now != then for now, then in zip([whole(first), whole(second)], before)])
moved
"""
WHOLE = """
import nbdist
def whole(model):
    with nbdist.full_parameters(model) as bare: return bare.weight.tolist()
"""


@pytest.mark.parametrize(
    ("backend", "offload"),
    [("zero1", "none"), nightly("zero2", "cpu"), ("zero3", "none"), nightly("zero3", "cpu")],
)
def test_a_step_moves_what_its_micro_batches_have_used(backend: str, offload: str) -> None:
    with Session(nproc=2, backend=backend, offload=offload, accumulate=2) as session:
        session.run(WHOLE)
        moved = session.run(BRANCHES).values[0]
    assert moved == [[True, True], [True, False], [False, True]]


@pytest.mark.parametrize("backend", [nightly("ddp"), "zero2"])
def test_parameters_that_are_unfrozen_after_prepare_are_refused(backend: str) -> None:
    with Session(nproc=2, backend=backend) as session:
        session.run("share, backward = slice(rank, None, 2), accelerator.backward" + LINEAR)
        session.run("model.bias.requires_grad_(False)")
        session.run("model, optimizer = accelerator.prepare(model, optimizer)")
        session.run("backward(loss(1)); optimizer.step(); optimizer.zero_grad()")
        session.run("accelerator.unwrap_model(model).bias.requires_grad_(True)")
        with pytest.raises(CellError, match=r"Unfreeze them before accelerator\.prepare"):
            session.run("backward(loss(2)); optimizer.step()")


@pytest.mark.parametrize(("backend", "reason"), [("ddp", "ddp waits"), ("zero2", "still change")])
def test_parameters_that_are_frozen_after_prepare_are_refused(backend: str, reason: str) -> None:
    with Session(nproc=2, backend=backend) as session:
        session.run("share, backward = slice(rank, None, 2), accelerator.backward" + LINEAR)
        session.run("model, optimizer = accelerator.prepare(model, optimizer)")
        session.run("backward(loss(1)); optimizer.step(); optimizer.zero_grad()")
        session.run("accelerator.unwrap_model(model).bias.requires_grad_(False)")
        with pytest.raises(CellError, match=reason):
            session.run("backward(loss(2)); optimizer.step()")


@pytest.mark.parametrize("backend", ["fsdp2", nightly("fsdp1")])
def test_gradient_hooks_that_fsdp_does_not_call_are_refused(backend: str) -> None:
    prepare = "\nmodel, optimizer = accelerator.prepare(model, optimizer)"
    with Session(nproc=2, backend=backend) as session:
        session.run("share, backward = slice(rank, None, 2), accelerator.backward" + LINEAR)
        session.run("hook = model.weight.register_hook(lambda gradient: gradient * 0)")
        with pytest.raises(CellError, match="does not call the gradient hook of weight"):
            session.run(prepare)
        session.run("hook.remove()" + prepare + "\nbackward(loss(1)); optimizer.step()")
        session.run("[*model.parameters()][0].register_hook(lambda gradient: gradient * 0)")
        with pytest.raises(CellError, match="does not call the gradient hook of"):
            session.run("backward(loss(2)); optimizer.step()")


def test_a_trainer_under_zero_trains_in_bf16(under_zero2: Session) -> None:
    losses = under_zero2.run(TRAINER.format(steps=5, arguments="use_cpu=True, bf16=True")).values[0]
    exact = under_zero2.run(TRAINER.format(steps=5, arguments="")).values[0]
    engine = under_zero2.run("str(trainer.accelerator.deepspeed_engine_wrapped.engine.dtype)")
    assert losses != exact
    assert losses[1] == pytest.approx(exact[1], abs=1e-2)
    assert engine.values[0] == "torch.float32"


def test_zero_casts_floating_point_inputs_and_starts_no_compiler() -> None:
    code = """import os
model = torch.nn.Linear(4, 1)
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(input=torch.ones(2, 4)).dtype"""
    with Session(nproc=1, backend="zero2", precision="bf16") as session:
        assert session.run(code).values[0] == torch.bfloat16
        assert session.run("os.times().children_user").values[0] == 0


def test_what_a_trainer_logs_is_reported_step_by_step(under_zero2: Session) -> None:
    before = under_zero2.metrics.last_step
    losses = under_zero2.run(TRAINER.format(steps=4, arguments="")).values[0][1]
    metrics = under_zero2.metrics
    assert metrics.steps("loss")[-4:] == [before + step for step in (1, 2, 3, 4)]
    assert list(metrics["loss"][-4:]) == losses
    assert {"loss", "grad_norm", "learning_rate"} == set(metrics)


def test_a_trainer_that_contradicts_the_session_says_so_in_one_sentence() -> None:
    with Session(nproc=2, clip=0.5) as session:
        session.run(MODEL)
        message = r"TrainingArguments has max_grad_norm=0\.3 but the session has --clip 0\.5\. "
        with pytest.raises(CellError, match=message):
            session.run(TRAINER.format(steps=2, arguments="max_grad_norm=0.3"))
        taken = session.run(TRAINER.format(steps=2, arguments=""))
        printed = "".join(output.get("text", "") for output in taken.outputs[0])
        assert "Trainer takes from the session's options: max_grad_norm=0.5." in printed
        # the same arguments after a switch to another number
        session.switch("zero2", clip=0.7)
        session.run("trainer = OwnTrainer(model=build(), args=args, train_dataset=rows)")
        assert session.run("(trainer.train(), args.max_grad_norm)[1]").values[0] == 0.7


@pytest.mark.nightly
def test_a_trainer_fills_the_users_deepspeed_config() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    with Session(nproc=2, backend="zero3", deepspeed_config=config) as session:
        session.run(MODEL)
        arguments = "warmup_steps=3, max_grad_norm=0.3"
        wrapped, _ = session.run(TRAINER.format(steps=10, arguments=arguments)).values[0]
        filled = session.run(
            "c = trainer.accelerator.state.deepspeed_plugin.deepspeed_config\n"
            "(c['optimizer']['params']['lr'], c['scheduler']['params'], c['gradient_clipping'])"
        ).values[0]
    assert wrapped == "DeepSpeedEngine"
    schedule = {
        "warmup_min_lr": 0,
        "warmup_max_lr": 3e-3,
        "warmup_num_steps": 3,
        "total_num_steps": 10,
    }
    assert filled == (3e-3, schedule, 0.3)
