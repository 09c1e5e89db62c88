"""Options change with the engine or without it, and with all kinds of models and optimizers."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from nbdist import Session, SwitchError
from tests.e2e.training import (
    BACKENDS,
    MODEL,
    START,
    WRAPPED,
    max_difference,
    train_without_switch,
    value_of,
)
from tests.nightly import nightly, with_core

pytestmark = pytest.mark.timeout(900)

DEFINITIONS = MODEL + textwrap.dedent(
    """
    from nbdist.worker.training import prepared_models as training
    from nbdist.worker.training.training_state import ModelAndOptimizerState
    from nbdist.state import tensor_digest, layouts

    def digests():
        "Of all state; the same on all ranks."
        (trained,) = training.all_models()
        found = ModelAndOptimizerState(trained)
        return tensor_digest.global_digests(found.owned_shards()), found.layout.scalar_state()

    def types():
        "Of the weights that are stepped."
        (trained,) = training.all_models()
        found = layouts.layout_for(trained.model).weights(owned=False)
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


def begin(session: Session, build: str, backend: str, **options: Any) -> None:
    """Train four steps of a new model under a backend with these options only."""
    session.run("bare = model = optimizer = schedule = loader = batches = None")
    session.switch(backend, **{**PLAIN, **options})
    session.run(START.format(build))


@pytest.mark.parametrize(
    ("home", "away"),
    [
        nightly("ddp", "zero2"),
        nightly("fsdp2", "fsdp2"),
        nightly("zero3", "fsdp1"),
    ],
)
def test_masters_outlive_a_change_of_precision(trained: Session, home: str, away: str) -> None:
    for precision, other in (("bf16", "no"), ("no", "bf16")):
        begin(trained, "", home, precision=precision)
        expected = value_of(trained, "train(6)")
        begin(trained, "", home, precision=precision)
        before = value_of(trained, "digests()")
        report = trained.switch(away, precision=other)
        assert report.verified > 80
        assert any("precision" in words for words in report.will_differ)
        assert value_of(trained, "digests(), types()") == (before, ["torch.float32"])
        trained.switch(home, precision=precision)
        assert value_of(trained, "digests()") == before
        assert max_difference(value_of(trained, "train(3)"), expected[:3]) == 0.0
        trained.switch(away, precision=other)
        assert value_of(trained, "type(model).__name__") == WRAPPED[away]
        assert max_difference(value_of(trained, "train(3)"), expected[3:]) <= 2e-2


def goes_on(
    session: Session, build: str, walk: list[tuple[str, dict[str, Any]]], *, seen: str = "None"
) -> list[Any]:
    """Compare a training that switches through a walk with one that does not switch.

    Returns what `seen` is after each switch.
    """
    begin(session, build, "ddp")
    expected = value_of(session, f"train({2 * len(walk)})")
    begin(session, build, "ddp")
    found: list[float] = []
    values = []
    for backend, options in walk:
        before = value_of(session, "len(digests()[0])")
        report = session.switch(backend, **options)
        assert report.verified == before
        value, losses = value_of(session, f"({seen}, train(2))")
        values.append(value)
        found += losses
    assert max_difference(found, expected) <= 2e-6
    return values


@pytest.mark.nightly
def test_an_offload_comes_and_goes(trained: Session) -> None:
    """DeepSpeed's own Adam, which it needs, is compiled by the first switch on a machine."""
    walk = [
        ("fsdp2", "cpu"),
        ("zero2", "cpu"),
        ("zero2", "none"),
        ("zero3", "cpu"),
        ("fsdp2", "none"),
        ("fsdp2", "cpu"),
        ("ddp", "none"),
    ]
    inner = "type(training.all_models()[0].live_optimizers[0].inner_optimizer).__name__"
    options = [(backend, {"offload": offload}) for backend, offload in walk]
    steppers = goes_on(trained, "", options, seen=inner)
    assert steppers == ["AdamW", "DeepSpeedCPUAdam", "AdamW", "DeepSpeedCPUAdam", *["AdamW"] * 3]


OWN_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    # deepspeed 0.19.8 then forgets the order when it links parameters to their masters
    ("zero2", {"stage": 2, "round_robin_gradients": True}),
    ("zero1", {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1000}),
    # several masters a parameter group, and few parameters or none that stay gathered
    ("zero3", {"stage": 3, "sub_group_size": 2000, "stage3_param_persistence_threshold": 0}),
    ("zero3", {"stage": 3, "sub_group_size": 5000, "stage3_param_persistence_threshold": 100}),
    ("fsdp1", {"sharding_strategy": "NO_SHARD"}),
    ("fsdp1", {"sharding_strategy": "SHARD_GRAD_OP"}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "own"), OWN_OPTIONS)
def test_engines_with_options_of_their_own(
    trained: Session, backend: str, own: dict[str, Any]
) -> None:
    zero = {"deepspeed_config": {"zero_optimization": own}}
    options = {"fsdp_config": own} if backend == "fsdp1" else zero
    goes_on(trained, "", [(backend, options), ("fsdp2", {}), (backend, options), ("ddp", {})])


@pytest.mark.nightly
def test_deepspeeds_other_optimizer_for_bfloat16(trained: Session) -> None:
    options = {"deepspeed_config": {"data_types": {"grad_accum_dtype": "fp32"}}}
    begin(trained, "", "zero1", precision="bf16", **options)
    expected = value_of(trained, "train(3)")
    begin(trained, "", "zero1", precision="bf16", **options)
    before = value_of(trained, "digests()")
    trained.switch("fsdp1")
    assert value_of(trained, "digests()") == before
    trained.switch("zero1", **options)
    assert value_of(trained, "type(model.optimizer).__name__, digests()") == (
        "BF16_Optimizer",
        before,
    )
    assert max_difference(value_of(trained, "train(3)"), expected) == 0.0


TORCHS_OWN = textwrap.dedent(
    """
    from torch import nn
    from transformers.modeling_outputs import CausalLMOutput

    class Plain(nn.Module):
        "Blocks of torch's own."

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(211, 64)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(64, 2, 128, dropout=0.1, batch_first=True)
                for _ in range(2)
            )
            self.head = nn.Linear(64, 211)

        def forward(self, input_ids, labels):
            hidden = self.embed(input_ids)
            for block in self.blocks:
                hidden = block(hidden)
            scores = self.head(hidden).flatten(0, 1)
            return CausalLMOutput(loss=nn.functional.cross_entropy(scores, labels.flatten()))

    def recomputes():
        return any(
            getattr(one, "gradient_checkpointing", False)
            or hasattr(one, "_checkpoint_wrapped_module")
            for one in model.modules()
        )
    """
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "build",
    [pytest.param("lambda: gpt2(0.1)", id="transformers"), pytest.param("Plain", id="torch")],
)
def test_activation_checkpointing_comes_and_goes(trained: Session, build: str) -> None:
    trained.run(TORCHS_OWN)
    walk = [
        ("ddp", True),
        ("fsdp2", True),
        ("zero3", True),
        ("zero3", False),
        ("fsdp1", True),
        ("zero1", True),
        ("ddp", False),
    ]
    options = [(backend, {"activation_checkpointing": on}) for backend, on in walk]
    assert goes_on(trained, build, options, seen="recomputes()") == [on for _, on in walk]


@pytest.mark.nightly
def test_compiling_comes_and_goes(trained: Session) -> None:
    trained.run(TORCHS_OWN.replace("dropout=0.1", "dropout=0.0"))
    walk = [("ddp", True), ("zero2", True), ("fsdp2", True), ("fsdp2", False)]
    options = [(backend, {"compile": on}) for backend, on in walk]
    compiled = "any(hasattr(m, '_orig_mod') or m._compiled_call_impl for m in model.modules())"
    assert goes_on(trained, "Plain", options, seen=compiled) == [on for _, on in walk]


MODELS = textwrap.dedent(
    """
    import peft
    from lion_pytorch import Lion
    from torch import nn
    from transformers import GPT2LMHeadModel

    def lora():
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(gpt2(), config)

    class Mixed(GPT2LMHeadModel):
        "Tied embeddings, a frozen block, buffers that count: one in no state dict."

        def __init__(self):
            super().__init__(gpt2().config)
            self.transformer.h[0].requires_grad_(False)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("hidden", torch.zeros(()), persistent=False)

        def forward(self, **inputs):
            result = super().forward(**inputs)
            self.seen += 1
            self.hidden += 2
            result.loss = result.loss * (1 + 0.1 * self.seen + 0.01 * self.hidden)
            return result

    def trainable(make, second=None):
        "Of what is trained; the second group with options of its own."
        def made(groups, **options):
            kept = [
                {**group, "params": [one for one in group["params"] if one.requires_grad]}
                for group in groups
            ]
            kept[1] |= second or {}
            return make([group for group in kept if group["params"]], **options)
        return made
    """
)
KINDS = {
    "lora": "lora, trainable(torch.optim.AdamW)",
    "tied, frozen, buffers": "Mixed, trainable(torch.optim.AdamW)",
    "groups": "gpt2, trainable(torch.optim.AdamW, dict(lr=1e-3, betas=(0.8, 0.9), eps=1e-6))",
    "lion": "gpt2, Lion, lr=1e-4",
    "nadam": "gpt2, torch.optim.NAdam",
}


@pytest.mark.parametrize(
    "kind",
    with_core(KINDS, "lora"),
)
def test_models_and_optimizers_go_through_all_engines(trained: Session, kind: str) -> None:
    trained.run(MODELS)
    walk: list[tuple[str, dict[str, Any]]] = [
        (backend, {}) for backend in [*BACKENDS[1:], BACKENDS[0]]
    ]
    wrapped = goes_on(trained, KINDS[kind], walk, seen="type(model).__name__")
    assert all(name.startswith(("FSDP", "Fully", "DeepSpeed", "Distri")) for name in wrapped)


SEVERAL = textwrap.dedent(
    """
    def build(*_):
        accelerator.step = 0
        torch.manual_seed(0)
        bare = gpt2()
        named = dict(bare.named_parameters())
        inside = [one for name, one in named.items() if ".h." in name]
        rest = [one for name, one in named.items() if ".h." not in name]
        fast = torch.optim.AdamW(inside, lr=3e-3)
        slow = torch.optim.SGD(rest, lr=1e-2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(slow, lambda n: 1 / (1 + n / 40))
        return bare, *accelerator.prepare(bare, fast, slow, schedule)

    def train(steps):
        losses = []
        for step in range(steps):
            batch = tokens[4 * ((global_step := accelerator.step) + rank):][:4]
            accelerator.step = global_step + 2
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            fast.step(); slow.step(); schedule.step(); model.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    def start():
        global bare, model, fast, slow, schedule
        bare = model = fast = slow = schedule = optimizer = None
        bare, model, fast, slow, schedule = build()
        train(4)
    """
)


def test_a_schedule_free_optimizer_switches_while_it_evaluates(trained: Session) -> None:
    trained.run("""
        from schedulefree import AdamWScheduleFree

        def free(groups, **options):
            optimizer = AdamWScheduleFree(groups, **options)
            optimizer.train()
            return optimizer
    """)
    expected = train_without_switch(trained, "gpt2, free", 6)
    trained.run(START.format("gpt2, free"))
    found: list[float] = []
    for backend in ("fsdp2", "fsdp1", "ddp"):
        trained.run("optimizer.eval()\nwith torch.no_grad(): model(input_ids=tokens[:2])")
        trained.switch(backend)
        found += value_of(trained, "optimizer.train(); train(2)")
    assert max_difference(found, expected) <= 2e-6
    with pytest.raises(SwitchError, match="cannot step parameters that zero2 shards"):
        trained.switch("zero2")


OF_ANY_LIBRARY = textwrap.dedent(
    """
    class Lagging(torch.optim.Optimizer):
        "Counts its steps in a group and in an attribute, and keeps two tensors and a number."

        def __init__(self, params, lr, *, lag=3):
            self._lag, self._steps = lag, 0
            super().__init__(params, {"lr": lr, "seen": 0})

        @torch.no_grad()
        def step(self, closure=None):
            self._steps += 1
            for group in self.param_groups:
                group["seen"] += 1
                for one in group["params"]:
                    state = self.state[one]
                    if not state:
                        state.update(mean=torch.zeros_like(one), last=one.clone(), rate=1.0)
                    state["rate"] *= 0.9
                    state["mean"].lerp_(one.grad, 1 / group["seen"])
                    if self._steps % self._lag == 0:
                        state["last"].copy_(one)
                    lag = one - state["last"]
                    one.add_(state["mean"] * state["rate"] + lag, alpha=-group["lr"])

    def lagging(groups, **options):
        return Lagging(groups, lr=options["lr"], lag=2)

    class Averaging(torch.optim.AdamW):
        "Keeps tensors where a new optimizer would not find them."

        def step(self, closure=None):
            super().step()
            self.average = [one.detach().clone() for one in self.param_groups[0]["params"]]

    class Wrapping(torch.optim.AdamW):
        "Cannot be created again with the options of its groups."

        def __init__(self, params, lr):
            groups = [dict(group) for group in params]
            assert all("initial_lr" not in group for group in groups)
            super().__init__(groups, lr=lr)
    """
)


def test_an_optimizer_of_any_library_keeps_its_state(trained: Session) -> None:
    trained.run(OF_ANY_LIBRARY)
    expected = train_without_switch(trained, "gpt2, lagging", 6)
    trained.run(START.format("gpt2, lagging"))
    found: list[float] = []
    for backend in ("zero2", "fsdp2", "ddp"):
        trained.switch(backend)
        found += value_of(trained, "train(2)")
    assert max_difference(found, expected) <= 2e-6


@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("Averaging", "keeps tensors in its attribute average, not in its state"),
        ("Wrapping", "Wrapping cannot be created again: AssertionError"),
    ],
)
def test_an_optimizer_that_would_not_continue_is_refused_before_anything_changes(
    trained: Session, make: str, why: str
) -> None:
    trained.run(OF_ANY_LIBRARY)
    begin(trained, f"gpt2, {make}", "ddp")
    with pytest.raises(SwitchError, match=why):
        trained.switch("fsdp2")
    assert len(value_of(trained, "train(1)")) == 1


@pytest.mark.nightly
def test_several_optimizers_of_one_model(trained: Session) -> None:
    begin(trained, "", "ddp")
    trained.run("bare = model = optimizer = schedule = loader = batches = None")
    trained.run(SEVERAL + "\nstart()")
    walk = ["fsdp2", "fsdp1", "ddp", "fsdp1", "fsdp2", "ddp"]
    expected = value_of(trained, f"train({2 * len(walk)})")
    trained.run("start()")
    found: list[float] = []
    for backend in walk:
        with pytest.raises(
            SwitchError, match="has 2 optimizers, but DeepSpeed supports exactly one"
        ):
            trained.switch("zero2")
        report = trained.switch(backend)
        assert {"bare", "model", "fast", "slow", "schedule"} & {*report.bound} >= {"fast", "slow"}
        found += value_of(trained, "train(2)")
    assert max_difference(found, expected) <= 1e-6
    trained.run("bare = model = fast = slow = schedule = None")
    trained.run(MODEL)


REFUSED = textwrap.dedent(
    """
    class Blockwise(torch.optim.AdamW):
        "Keeps its first moment in eight bits, a scale for each block of 64."

        def step(self, closure=None):
            for group in self.param_groups:
                for one in group["params"]:
                    state = self.state[one]
                    blocks = nn.functional.pad(one.grad.flatten(), (0, -one.numel() % 64))
                    blocks = blocks.view(-1, 64)
                    state["scale"] = blocks.abs().amax(1, keepdim=True) + 1e-12
                    state["moment"] = (blocks / state["scale"] * 127).to(torch.int8)
                    one.data.add_(one.grad, alpha=-group["lr"])

    class Adam8bit(torch.optim.Optimizer):
        "Of a library that is not known."

        def __init__(self, params, lr=1e-3):
            super().__init__(params, {"lr": lr})

        step = Blockwise.step
    """
)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("Adam8bit", "Adam8bit is not known to update parameters element-wise"),
        ("Blockwise", "Blockwise is not known to update parameters element-wise"),
    ],
    ids=["unknown", "blockwise"],
)
def test_state_that_cannot_be_cut_is_refused(trained: Session, make: str, why: str) -> None:
    trained.run(MODELS + REFUSED)
    begin(trained, f"make={make}, lr=1e-3", "ddp")
    trained.run("known = bare, model, optimizer")
    for backend in ("fsdp2", "zero2"):
        with pytest.raises(SwitchError, match=why):
            trained.switch(backend)
    assert value_of(trained, "known == (bare, model, optimizer)")
    assert len(value_of(trained, "train(1)")) == 1
    trained.run("del known")


def test_zero_refuses_several_counts_in_a_group(trained: Session) -> None:
    begin(trained, "", "ddp")
    trained.run("optimizer.state[bare.lm_head.weight]['step'] += 1")
    with pytest.raises(SwitchError, match="one group were stepped 4 to 5 times, but DeepSpeed"):
        trained.switch("zero2")


@pytest.mark.nightly
def test_another_memory_order_is_kept_or_refused(trained: Session) -> None:
    trained.run(
        "def transposed():\n"
        "    model = gpt2()\n"
        "    weight = model.transformer.h[0].mlp.c_fc.weight\n"
        "    weight.data = weight.data.t().contiguous().t()\n"
        "    return model"
    )
    walk: list[tuple[str, dict[str, Any]]] = [("ddp", {"clip": 1e6}), ("ddp", {"clip": None})]
    row_major = "bare.transformer.h[0].mlp.c_fc.weight.is_contiguous()"
    assert goes_on(trained, "transposed", walk, seen=row_major) == [False, False]
    with pytest.raises(SwitchError, match=r"0\.mlp\.c_fc\.weight is not in row-major memory order"):
        trained.switch("fsdp1")
