"""A checkpoint of a LoRA run refers to its base model, and any optimizer goes on."""

from __future__ import annotations

import json
import math
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from nbdist import CheckpointError, NbdistError, Session
from tests import engines
from tests.e2e.training import BACKENDS, max_difference, value_of
from tests.models import llama

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(600)

TRAINING = textwrap.dedent(
    """
    import peft
    import transformers
    from tests.models import llama

    def prepare(bare, make=torch.optim.AdamW, **options):
        global model, optimizer
        trainable = [p for p in bare.parameters() if p.requires_grad]
        model, optimizer = accelerator.prepare(bare, make(trainable, **({"lr": 1e-2} | options)))

    def lora(path="base", seed=0):
        torch.manual_seed(seed)
        bare = transformers.AutoModelForCausalLM.from_pretrained(path)
        config = peft.LoraConfig(r=32, target_modules=["q_proj", "v_proj", "down_proj"])
        prepare(peft.get_peft_model(bare, config))

    def train(steps):
        losses = []
        for number in range(steps):
            generator = torch.Generator().manual_seed(7 * number + rank)
            batch = torch.randint(0, 211, (2, 24), generator=generator)
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step(); optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        return losses

    @torch.no_grad()
    def change_frozen():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.mul_(2)

    def muon(parameters, **options):
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], **options)

    def eight_bits(parameters, lr):
        import bitsandbytes
        return bitsandbytes.optim.AdamW8bit(parameters, lr=lr)

    def quantized(parameters, lr):
        import torchao.optim
        return torchao.optim.AdamW8bit(parameters, lr=lr, block_size=64)

    def relative(parameters, lr):
        return transformers.Adafactor(parameters, lr=lr, relative_step=False)

    class Averaging(torch.optim.Optimizer):
        "Averages as schedule-free optimizers do: state in groups, in float64, and nested."

        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr, "k": 0, "weight_sum": 0.0, "rule": min})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] += 1
                for parameter in filter(lambda p: p.grad is not None, group["params"]):
                    state = self.state[parameter]
                    if not state:
                        state["z"] = parameter.clone()
                        state["norms"] = {"last": (torch.zeros(2, dtype=torch.float64), None)}
                    state["norms"]["last"][0].add_(1 / 3)
                    state["z"].sub_(parameter.grad, alpha=group["lr"])
                    parameter.lerp_(state["z"], 1 / group["k"])

    class Holding(Averaging):
        "Keeps a function in its state."

        def step(self, closure=None):
            super().step()
            self.state[self.param_groups[0]["params"][0]]["rule"] = lambda: 1
    """
)


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two ranks in a folder with two base models."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("adapters")
    os.chdir(folder)
    for seed, name in enumerate(["base", "other"]):
        save_base(name, seed)
    with Session(nproc=2, backend="fsdp2") as session:
        session.run(TRAINING)
        yield session
    os.chdir(before)


def save_base(name: str, seed: int) -> None:
    """Save a model that cells load with `from_pretrained`."""
    torch.manual_seed(seed)
    llama(hidden_size=128, intermediate_size=256).save_pretrained(name)


@pytest.fixture
def session(living: Session) -> Session:
    """Two ranks under FSDP2."""
    if living.backend != "fsdp2":
        living.switch("fsdp2", reset_optimizer=True)
    return living


def trainable_bytes(name: str) -> int:
    """Return the bytes of adapters and of their optimizer state in a checkpoint."""
    keys = json.loads(Path("checkpoints", name, "manifest.json").read_text())["keys"]
    return sum(4 * math.prod(key["shape"]) for name, key in keys.items() if "lora_" in name)


def test_a_lora_checkpoint_has_the_size_of_the_adapter(session: Session) -> None:
    session.run("lora(); train(3)")
    saved = session.save("small", overwrite=True)
    assert saved.wait(60).size_bytes <= 1.2 * trainable_bytes("small")
    assert "20 frozen parameters" in str(saved)
    assert f"by reference to {Path('base').resolve()}" in str(saved)
    session.save("whole", overwrite=True, full=True, wait=True)
    weights = session.checkpoints["whole"].state_dict()
    assert session.checkpoints["whole"].size_bytes > session.checkpoints["small"].size_bytes
    for name, tensor in session.checkpoints["small"].state_dict().items():
        assert torch.equal(tensor, weights[name])
    expected = value_of(session, "train(3)")
    session.run("lora(seed=1)")
    session.load("small")
    assert value_of(session, "train(3)") == expected
    session.switch("zero3")
    session.load("small")
    assert max_difference(value_of(session, "train(3)"), expected) < 1e-6


def test_an_exported_adapter_is_loaded(session: Session, tmp_path: Path) -> None:
    session.run("lora(); train(3)")
    session.export(tmp_path / "adapter")
    expected = value_of(session, "train(1)")
    session.run("lora(seed=1)")
    report = session.load(tmp_path / "adapter")
    assert "tensors are unchanged, not in the checkpoint: " in str(report)
    assert value_of(session, "train(1)") == expected
    session.run(
        "config = peft.LoraConfig(r=32, lora_alpha=64, target_modules=['q_proj'])\n"
        "prepare(peft.get_peft_model(llama(), config))"
    )
    with pytest.raises(CheckpointError, match=r"has lora_alpha=8 instead of 64\. Create the model"):
        session.load(tmp_path / "adapter")
    session.run("prepare(llama())")
    with pytest.raises(CheckpointError, match=r"of \d+ tensors \d+ are missing"):
        session.load(tmp_path / "adapter")


@pytest.mark.nightly
def test_changed_frozen_parameters_are_restored_from_the_base(session: Session) -> None:
    session.run("lora(); train(2)")
    session.save("before", overwrite=True, wait=True)
    expected = value_of(session, "train(2)")
    session.run("change_frozen()")
    changed = session.save("changed", overwrite=True)
    changed.wait(60)
    assert "1 frozen parameters (106 KiB) are stored by value: not equal to" in str(changed)
    session.load("before")
    assert value_of(session, "train(2)") == expected


def test_a_wrong_base_is_one_sentence(session: Session) -> None:
    session.run("lora(); train(1)")
    session.save("fits", overwrite=True, wait=True)
    expected = value_of(session, "train(2)")
    session.run("lora('other'); v = train(1)")
    with pytest.raises(CheckpointError, match=r"needs the base model .*base, but .* from .*other:"):
        session.load("fits")
    save_base("base", 5)
    session.run("lora()")
    with pytest.raises(CheckpointError, match=r"base has changed since the checkpoint was saved"):
        session.load("fits")
    save_base("base", 0)
    session.load("fits")
    assert value_of(session, "train(2)") == expected


def test_a_model_from_a_config_is_stored_by_value(session: Session) -> None:
    session.run(
        "config = peft.LoraConfig(r=4, target_modules=['q_proj'])\n"
        "prepare(peft.get_peft_model(llama(), config)); train(1)"
    )
    saved = session.save("config", overwrite=True)
    saved.wait(60)
    assert "are stored by value: their model was not loaded with from_pretrained" in str(saved)


REFUSED = "cannot step parameters that .* shards"
CANNOT_STEP = {
    **{("muon", engine): REFUSED for engine in ("fsdp1", "zero1", "zero2", "zero3")},
    # torchao 0.18 compiles its step for one shape, and the ranks have shards of different sizes.
    ("quantized", "fsdp2"): "expected size",
    **{(make, "fsdp2"): REFUSED for make in ("eight_bits", "relative", "torch.optim.Adafactor")},
}


def goes_on(session: Session, make: str) -> None:
    """Assert that an optimizer continues exactly after a load."""
    session.run(f"torch.manual_seed(0); prepare(llama(), {make}); train(3)")
    session.save("state", overwrite=True, wait=True)
    expected = value_of(session, "train(3)")
    session.run(f"torch.manual_seed(1); prepare(llama(), {make})")
    session.load("state")
    assert value_of(session, "train(3)") == expected


def test_another_optimizer_continues_under_the_same_engine(session: Session) -> None:
    goes_on(session, "Averaging")
    session.switch("ddp", reset_optimizer=True)
    with pytest.raises(
        CheckpointError, match=r"Averaging.* backend fsdp2 on 2 ranks, .*--reset-optim"
    ):
        session.load("state")
    report = session.load("state", reset_optimizer=True)
    assert "the optimizers begin with new state" in str(report)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", engines.each("none"))
@pytest.mark.parametrize(
    "make",
    ["muon", "eight_bits", "quantized", "torch.optim.Adafactor", "relative", "Averaging"],
)
def test_every_engine_continues_with_every_optimizer(
    living: Session, engine: str, make: str
) -> None:
    if module := {"eight_bits": "bitsandbytes", "quantized": "torchao"}.get(make):
        pytest.importorskip(module)
    if living.backend != engine:
        living.restart(backend=engine)
        living.run(TRAINING)
    if (make, engine) not in CANNOT_STEP:
        goes_on(living, make)
        return
    with pytest.raises(NbdistError, match=CANNOT_STEP[make, engine]):
        living.run(f"prepare(llama(), {make}); train(1)")


@pytest.mark.nightly
@pytest.mark.parametrize("writer", BACKENDS)
def test_every_engine_loads_an_adapter_of_every_engine(living: Session, writer: str) -> None:
    if living.backend != writer:
        living.restart(backend=writer)
        living.run(TRAINING)
    living.run("lora(); train(2)")
    living.save(writer, overwrite=True, wait=True)
    assert living.checkpoints[writer].size_bytes <= 1.3 * trainable_bytes(writer)
    expected = value_of(living, "train(3)")
    for reader in BACKENDS:
        living.switch(reader)
        living.run("lora(seed=3)")
        living.load(writer)
        assert max_difference(value_of(living, "train(3)"), expected) < 2e-6


def test_a_function_in_the_state_is_refused(session: Session) -> None:
    session.run("prepare(llama(), Holding); train(1)")
    with pytest.raises(CheckpointError, match=r"Holding contains state\.0\.rule, of type function"):
        session.save("holding")
    session.run("train(1)")


def test_a_tokenizer_that_is_larger_than_the_embedding_is_named(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(
        "from tokenizers import Tokenizer, models\n"
        "words = {str(number): number for number in range(300)}\n"
        "words = Tokenizer(models.WordLevel(words, unk_token='0'))\n"
        "tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)\n"
        "prepare(llama()); train(1)"
    )
    problem = "The tokenizer 'tokenizer' has 300 tokens, but the embedding of LlamaForCausalLM has"
    assert problem in capsys.readouterr().err
    assert problem in str(session.export(tmp_path / "out"))
    session.run("del tokenizer")
