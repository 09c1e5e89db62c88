"""Adapters of PEFT, trained by TRL's SFTTrainer: equal to one process, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from nbdist import CellError, Session
from nbdist.strategies import STRATEGIES
from tests import engines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Otherwise every parameter of a tiny model is on every rank.
SHARD_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
EVERY_BACKEND = pytest.mark.parametrize("backend", STRATEGIES, indirect=True, scope="module")
ZERO2_FIRST = pytest.mark.parametrize(
    "backend", engines.each("zero2"), indirect=True, scope="module"
)
TOLERANCE = 1e-5


QUANTIZED = """
from transformers import BitsAndBytesConfig
config = BitsAndBytesConfig({config})
trainer = sft_trainer(
    folder, {output!r}, "lora", max_steps=2, logging_steps=1, per_device_train_batch_size=4,
    quantization_config=config,
)
trainer.train()
trainer.save_model()
[row["loss"] for row in trainer.state.log_history if "loss" in row]
"""
TRAIN_AGAIN = "trainer.train()\n[row['loss'] for row in trainer.state.log_history if 'loss' in row]"
NF4 = "load_in_4bit=True, bnb_4bit_quant_type='nf4'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests import fine_tuning

    return fine_tuning.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(
    request: pytest.FixtureRequest, folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    options = {"deepspeed_config": SHARD_ALL} if request.param == "zero3" else {}
    checkpoints = str(tmp_path_factory.mktemp("checkpoints"))
    with Session(nproc=2, backend=request.param, checkpoints=checkpoints, **options) as session:
        session.run(f"from tests.fine_tuning import *\nfolder = {folder!r}")
        yield session


@pytest.fixture(scope="module")
def of_one_process(
    folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """Weights that one process without nbdist trains on the same global batch."""
    known: dict[str, dict[str, Any]] = {}

    def weights(adapter: str) -> dict[str, Any]:
        if adapter not in known:
            output = str(tmp_path_factory.mktemp("single"))
            given = {"folder": folder, "output": output, "adapter": adapter}
            given["per_device_train_batch_size"] = 8
            command = [sys.executable, "-m", "tests.fine_tuning", json.dumps(given)]
            subprocess.run(command, check=True, capture_output=True, timeout=200)
            known[adapter] = saved_weights(output)
        return known[adapter]

    return weights


def saved_weights(folder: str | Path) -> dict[str, Any]:
    files = list(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference of two sets of weights with the same names."""
    assert first.keys() == second.keys() != set()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def trained(session: Session, output: Path, adapter: str) -> dict[str, Any]:
    session.run(
        f"trainer = sft_trainer(folder, {str(output)!r}, {adapter!r},"
        " per_device_train_batch_size=4)\n"
        "trainer.train()\n"
        "trainer.save_model()"
    )
    return saved_weights(output)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("adapter", ["lora", "dora", "modules_to_save", "prompt"])
@EVERY_BACKEND
def test_every_kind_of_adapter_is_trained_as_in_one_process(
    backend: Session,
    adapter: str,
    of_one_process: Callable[[str], dict[str, Any]],
    tmp_path: Path,
) -> None:
    weights = trained(backend, tmp_path, adapter)
    assert largest_difference(weights, of_one_process(adapter)) < TOLERANCE


@pytest.mark.nightly
@pytest.mark.timeout(300)
@EVERY_BACKEND
def test_resume_from_checkpoint_loses_nothing_of_the_adapter(
    backend: Session, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    backend.run(
        f"trainer = sft_trainer(folder, {str(straight)!r}, 'lora', save_strategy='steps',"
        " save_steps=2)\n"
        "trainer.train()\n"
        "trainer.save_model()\n"
        f"trainer = sft_trainer(folder, {str(resumed)!r}, 'lora')\n"
        f"trainer.train(resume_from_checkpoint={str(straight / 'checkpoint-2')!r})\n"
        "trainer.save_model()"
    )
    first, second = map(saved_weights, (straight, resumed))
    assert largest_difference(first, second) == 0


@pytest.mark.timeout(300)
@ZERO2_FIRST
def test_save_and_load_lose_nothing_of_the_adapter(backend: Session, tmp_path: Path) -> None:
    two, four, again = (tmp_path / name for name in ("two", "four", "again"))
    backend.run(
        f"trainer = sft_trainer(folder, {str(two)!r}, 'lora', max_steps=2)\n"
        "trainer.train()\n"
        "trainer.save_model()"
    )
    backend.save("adapter", overwrite=True)
    backend.run(f"trainer.train()\ntrainer.save_model({str(four)!r})")
    backend.load("adapter")
    backend.run(f"trainer.train()\ntrainer.save_model({str(again)!r})")
    after_two, after_four, repeated = map(saved_weights, (two, four, again))
    assert largest_difference(after_four, repeated) == 0
    assert largest_difference(after_two, after_four) > TOLERANCE


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("adapter", ["lora", ""])
@EVERY_BACKEND
def test_save_pretrained_writes_what_save_model_writes(
    backend: Session, adapter: str, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "save_pretrained", tmp_path / "save_model"
    backend.run(
        f"trainer = sft_trainer(folder, {str(theirs)!r}, {adapter!r}, max_steps=1)\n"
        "trainer.train()\n"
        "trainer.save_model()\n"
        f"trainer.model.save_pretrained({str(ours)!r})"
    )
    first, second = map(saved_weights, (ours, theirs))
    assert largest_difference(first, second) == 0


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_adapter_moves_from_fsdp2_to_zero3_and_trains_on(folder: str, tmp_path: Path) -> None:
    before, after, trained_on = (tmp_path / name for name in ("before", "after", "trained_on"))
    with Session(nproc=2, backend="fsdp2") as session:
        session.run(
            "from tests.fine_tuning import *\n"
            f"trainer = sft_trainer({folder!r}, {str(before)!r}, 'lora', max_steps=2)\n"
            "trainer.train()\n"
            "trainer.save_model()"
        )
        session.switch("zero3")
        session.run(
            f"trainer.save_model({str(after)!r})\n"
            "trainer.train()\n"
            f"trainer.save_model({str(trained_on)!r})"
        )
    weights = {path: saved_weights(path) for path in (before, after, trained_on)}
    assert largest_difference(weights[before], weights[after]) == 0
    assert largest_difference(weights[after], weights[trained_on]) > TOLERANCE


@pytest.mark.nightly
@pytest.mark.timeout(300)
@EVERY_BACKEND
def test_a_4_bit_base_is_trained_with_an_adapter_or_refused(
    backend: Session, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    cell = QUANTIZED.format(config=NF4, output=str(tmp_path))
    if backend.status()["options"]["backend"] == "fsdp1":
        with pytest.raises(CellError, match=r"of one floating-point dtype.* Use the backend fsdp2"):
            backend.run(cell)
        return
    losses = backend.run(cell).values[0]
    # A 4-bit Llama of this seed, trained by one process.
    assert losses == pytest.approx([4.0, 3.9], abs=0.2)
    assert len(saved_weights(tmp_path)) == 8


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("config", "backends"), [(NF4, ["ddp", "fsdp2"]), ("load_in_8bit=True", ["zero3", "ddp"])]
)
def test_a_switch_keeps_a_quantized_base(
    folder: str, tmp_path: Path, config: str, backends: list[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    losses = []
    for backend in backends:
        with Session(nproc=2, backend=backends[0]) as session:
            session.run(f"from tests.fine_tuning import *\nfolder = {folder!r}")
            session.run(QUANTIZED.format(config=config, output=str(tmp_path / backend)))
            if backend != backends[0]:
                session.switch(backend)
            losses.append(session.run(TRAIN_AGAIN).values[0])
            assert "8 tensors" in str(session.export(tmp_path / f"export-{backend}"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_evaluation_keeps_4_bit_shards(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = f"{NF4}, bnb_4bit_quant_storage=torch.bfloat16"
    with Session(nproc=2, backend="fsdp2") as session:
        session.run(f"from tests.fine_tuning import *\nfolder = {folder!r}")
        session.run(QUANTIZED.format(config=config, output=str(tmp_path)))
        found = session.run(
            "model = trainer.model_wrapped.eval()\n"
            "batch = next(iter(trainer.get_train_dataloader()))\n"
            "with torch.no_grad():\n"
            "    losses = [model(**batch).loss.item() for _ in range(3)]\n"
            "losses"
        ).values[0]
    assert found == [found[0]] * 3


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_weights_without_collectives_are_refused_in_one_sentence(folder: str) -> None:
    pytest.importorskip("torchao")
    with Session(nproc=2, backend="fsdp2") as session:
        session.run(f"from tests.fine_tuning import *\nfolder = {folder!r}\noutput = '/unused'")
        with pytest.raises(CellError, match="8-bit weights of bitsandbytes: they lose their scale"):
            session.run(QUANTIZED.format(config="load_in_8bit=True", output="/unused"))
        with pytest.raises(CellError, match="torchao's Int8Tensor, which supports no collective"):
            session.run(
                "from torchao.quantization import Int8WeightOnlyConfig\n"
                "from transformers import TorchAoConfig\n"
                "config = TorchAoConfig(Int8WeightOnlyConfig())\n"
                "sft_trainer(folder, '/unused', 'lora', quantization_config=config).train()"
            )


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "zero3", "deepspeed_config": SHARD_ALL},
        {"backend": "fsdp2"},
        {"backend": "fsdp1"},
    ],
)
def test_a_merge_into_partitioned_parameters_is_refused(
    folder: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    with Session(nproc=2, **options) as session:
        session.run(
            "from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM\n"
            "from tests.fine_tuning import *\n"
            f"trainer = sft_trainer({folder!r}, {str(tmp_path)!r}, 'lora')\n"
            "trainer.train()\n"
            "trainer.save_model()"
        )
        with pytest.raises(
            CellError, match=r"Save the adapter, and merge it into a new copy of the base"
        ):
            session.run("trainer.model.merge_and_unload()")
        session.run(
            f"base = AutoModelForCausalLM.from_pretrained({folder!r})\n"
            f"merged = PeftModel.from_pretrained(base, {str(tmp_path)!r}).merge_and_unload()\n"
            f"merged.save_pretrained({str(tmp_path / 'merged')!r}) if rank == 0 else None"
        )
    before, after = map(saved_weights, (folder, tmp_path / "merged"))
    assert largest_difference(before, after) > 1e-3


@ZERO2_FIRST
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_an_adapter_is_trained_on_a_model_that_was_trained(
    backend: Session, tmp_path: Path
) -> None:
    import peft
    import torch

    from tests.trainers import build, logged, make

    def adapted(model: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    model = build()
    make(str(tmp_path), model, use_cpu=True).train()
    alone = make(str(tmp_path), adapted(model), use_cpu=True)
    alone.train()
    backend.run(f"from tests.trainers import *\nimport peft\nout = {str(tmp_path)!r}")
    backend.run("model = build()\nfirst = make(out, model)\nfirst.train()")
    second = (
        "torch.manual_seed(0)\n"
        "config = peft.LoraConfig(r=4, target_modules='all-linear', task_type='CAUSAL_LM')\n"
        "second = make(out, peft.get_peft_model(model, config))\nsecond.train()\nlogged(second)"
    )
    if backend.backend.startswith("fsdp"):
        with pytest.raises(CellError, match=r"PeftModel.* contains a model that FSDP has sharded"):
            backend.run(second)
    else:
        losses = backend.run(second).values[0]
        assert losses == pytest.approx(logged(alone), abs=1e-4)
    backend.run("del first, second, model")
