"""A model of from_pretrained is loaded as shards, with the values of a full load."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nbdist import Session
from nbdist.strategies import STRATEGIES
from tests import models
from tests.nightly import with_core

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CELL = """
    import torch, peft
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    def load(**arguments):
        return AutoModelForCausalLM.from_pretrained(folder, **arguments)

    def read_all(model):
        "Use each weight, so that the model is loaded as a whole."
        for parameter in model.parameters():
            parameter.sum()

    def prepare(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        return accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1))

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    tokens = torch.arange(48).reshape(2, 24)
"""
WAYS = {
    "unchanged": "",
    "one weight is used on rank 0": "if rank == 0: print(model.model.norm.weight.sum())",
    "resized": "model.resize_token_embeddings(220, mean_resizing=False)",
    "edited": "with torch.no_grad(): model.model.layers[0].mlp.up_proj.weight.mul_(2)",
    "cast": "model = load(dtype=torch.float16).float()",
    "partly frozen": "model.model.layers[0].requires_grad_(False)",
    "LoRA": """
lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
model = peft.get_peft_model(model, lora)
""",
    "load_adapter": """
if rank == 0:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(load(), lora).save_pretrained(f"{folder}-lora")
accelerator.wait_for_everyone()
model.load_adapter(f"{folder}-lora", is_trainable=True)
""",
}


SHARDED = [name for name, strategy in STRATEGIES.items() if "parameters" in strategy.shards]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model with tied embeddings, in fp32."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    models.llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=with_core(SHARDED, "zero3"))
def session(request: pytest.FixtureRequest, folder: Path) -> Iterator[Session]:
    with Session(nproc=2, backend=request.param, precision="no") as session:
        session.push(folder=str(folder))
        session.run(textwrap.dedent(CELL))
        yield session


def load(session: Session, way: str, *, whole: bool) -> tuple[dict[str, torch.Tensor], Any, str]:
    """Return the loaded weights, the losses of two steps, and what the cell printed."""
    session.run(
        "torch.manual_seed(1); model = load()\n"
        + WAYS[way]
        + ("\nread_all(model)" if whole else "")
    )
    cell = session.run("model, optimizer = prepare(model)")
    weights = session.pull("model")
    text = "".join(output.get("text", "") for output in cell.outputs[0])
    return weights, session.run("step(), step()").values, text


@pytest.mark.parametrize("way", WAYS)
def test_shards_have_the_values_of_a_full_load(session: Session, way: str) -> None:
    shards, losses, text = load(session, way, whole=False)
    weights, expected, nothing = load(session, way, whole=True)
    assert ("as shards" in text) == (way != "cast")
    assert "as shards" not in nothing
    assert shards.keys() == weights.keys()
    assert all(torch.equal(shards[name], weights[name]) for name in weights)
    assert losses == expected


BOTH = "accelerator.prepare(model := load(), torch.optim.SGD(model.parameters()))"


@pytest.mark.parametrize("prepare", [BOTH, "accelerator.prepare(load())"], ids=["both", "model"])
def test_fsdp2_frees_whole_weights_unit_by_unit(folder: Path, prepare: str) -> None:
    """On a GPU they are there until then: FSDP2 moves the weights of a unit, then shards them."""
    with Session(nproc=2, backend="fsdp2") as session:
        session.push(folder=str(folder))
        session.run(textwrap.dedent(CELL))
        session.run(
            textwrap.dedent("""
            import weakref
            from torch.distributed.fsdp._fully_shard import _fsdp_init
            whole, alive, move = [], [], _fsdp_init._move_states_to_device

            def count(parameters, *args):
                alive.append(sum(each() is not None for each in whole))
                whole.extend(map(weakref.ref, parameters))
                return move(parameters, *args)

            _fsdp_init._move_states_to_device = count
            """)
        )
        session.run(f"result = {prepare}")
        units, weights = session.run("alive, len(whole)").values[0]
    assert weights > 4 * len(units)
    assert max(units) <= 2  # accelerate 1.15 has the input and output embeddings in variables
