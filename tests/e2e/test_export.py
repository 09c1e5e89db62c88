"""The prepared model as a folder that others read, and back in the notebook, from any engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open

from nbdist import CellError, CellInterrupted, CheckpointError, OptionError, PayloadError, Session
from tests import engines
from tests.e2e.cells import MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live_kernel import LiveKernel

pytestmark = pytest.mark.timeout(600)
DEFINITIONS = MODELS

BUILD = "before, model, optimizer = build({})"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that names, types and all bits are the same."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("backend", engines.each("fsdp2", "zero3"))
def test_every_engine_exports_what_save_pretrained_would(
    trained: Session, backend: str, tmp_path: Path
) -> None:
    trained.switch(backend)
    for make in ("gpt2", "llama", "untied"):
        trained.run(BUILD.format(make))
        report = trained.export(tmp_path / make)
        trained.run(f"if rank == 0: before.save_pretrained({str(tmp_path / 'before')!r})")
        assert_same(tensors(tmp_path / make), tensors(tmp_path / "before"))
        assert left(tmp_path / make) == left(tmp_path / "before")
        for name in ("config.json", "generation_config.json"):
            found, expected = (
                json.loads((tmp_path / folder / name).read_text()) for folder in (make, "before")
            )
            assert found == expected
        assert report.gathered_bytes == 0
    trained.run("step()")
    trained.export(tmp_path / "stepped")
    trained.run(
        "accelerator.unwrap_model(model).save_pretrained("
        f"{str(tmp_path / 'documented')!r}, is_main_process=accelerator.is_main_process,"
        " save_function=accelerator.save, state_dict=accelerator.get_state_dict(model))"
    )
    assert_same(tensors(tmp_path / "documented"), tensors(tmp_path / "stepped"))
    code = (
        f"again = type(before).from_pretrained({str(tmp_path / 'stepped')!r}).eval();"
        "model.eval(); ids = torch.arange(20)[None];"
        "value = (again(ids).logits - model(input_ids=ids).logits).abs().max().item();"
        "value, len(again.state_dict()) == len(before.state_dict())"
    )
    assert set(trained.run(code).values.values()) == {(0.0, True)}


@pytest.mark.nightly
@pytest.mark.parametrize("make", ["mixtral", "bert", "t5", "resnet"])
@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_names_and_shapes_in_files_are_those_of_the_class(
    trained: Session, backend: str, make: str, tmp_path: Path
) -> None:
    trained.switch(backend)
    trained.run(BUILD.format(make))
    size = "5KB" if make == "resnet" else "20KB"
    trained.export(tmp_path / "out", max_shard_size=size)
    trained.run(
        f"if rank == 0: before.save_pretrained({str(tmp_path / 'before')!r},"
        f" max_shard_size={size!r})"
    )
    assert_same(tensors(tmp_path / "out"), tensors(tmp_path / "before"))
    expected = json.loads((tmp_path / "before/model.safetensors.index.json").read_text())
    found = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert found["weight_map"].keys() == expected["weight_map"].keys()
    assert found["metadata"]["total_size"] == expected["metadata"]["total_size"]
    assert set(found["weight_map"].values()) == {
        path.name for path in (tmp_path / "out").glob("*.safetensors")
    }
    if make != "mixtral":  # whose experts transformers keeps in one file, however large
        assert found == expected


def test_another_type_and_files_of_a_size(trained: Session, tmp_path: Path) -> None:
    trained.switch("fsdp1")
    trained.run(BUILD.format("gpt2"))
    report = trained.export(tmp_path / "out", "bf16", max_shard_size="20KB")
    trained.run(
        f"if rank == 0: before.bfloat16().save_pretrained({str(tmp_path / 'before')!r},"
        " max_shard_size='20KB')"
    )
    assert len(report.files) > 2
    assert left(tmp_path / "out") == left(tmp_path / "before")
    assert_same(tensors(tmp_path / "out"), tensors(tmp_path / "before"))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(OptionError, match=r"Unknown dtype 'int3'\. Use bf16"):
        trained.export(tmp_path / "other", "int3")
    with pytest.raises(CheckpointError, match="Cannot parse max_shard_size 'large'"):
        trained.export(tmp_path / "other", max_shard_size="large")
    with pytest.raises(OptionError, match=r"An export needs a folder, and s3://b/m is a URL"):
        trained.export("s3://b/m")
    assert left(tmp_path) == ["before", "out"]


def test_a_plain_module_and_what_belongs_beside_a_model(trained: Session, tmp_path: Path) -> None:
    trained.switch("fsdp2")
    trained.run(BUILD.format("Plain"))
    report = trained.export(tmp_path / "plain")
    assert left(tmp_path / "plain") == ["model.safetensors"]
    assert sorted(tensors(tmp_path / "plain")) == [
        *("count", "first.bias", "first.weight", "second.bias", "seen")
    ]
    assert "huggingface_hub.load_torch_model" in report.how
    code = (
        "from huggingface_hub import load_torch_model;"
        f"again = Plain(); load_torch_model(again, {str(tmp_path / 'plain')!r});"
        "all(torch.equal(one, before.state_dict()[name])"
        " for name, one in again.state_dict().items())"
    )
    assert set(trained.run(code).values.values()) == {True}
    trained.run(
        "from tokenizers import Tokenizer, models as kinds;"
        "tokenizer = PreTrainedTokenizerFast("
        "tokenizer_object=Tokenizer(kinds.WordLevel({'a': 0, '[UNK]': 1}, unk_token='[UNK]')))"
    )
    trained.run(BUILD.format("gpt2"))
    report = trained.export(tmp_path / "text")
    assert report.companions == ("tokenizer",)
    assert "tokenizer.json" in left(tmp_path / "text")
    trained.run("spare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)")
    trained.run("one = tokenizer; del tokenizer")
    report = trained.export(tmp_path / "texts")
    assert report.companions == ()
    assert report.notes == (
        "none of spare, one was saved with the model: name the right one 'tokenizer'",
    )
    trained.run("del one, spare")


def test_a_folder_appears_whole_or_not_at_all(trained: Session, tmp_path: Path) -> None:
    trained.switch("ddp")
    trained.run(BUILD.format("gpt2"))
    trained.run(
        "import resource, signal\n"
        "if rank == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))"
    )
    with pytest.raises(CheckpointError, match=r"writing, on rank 1: File too large \(EFBIG\)"):
        trained.export(tmp_path / "out")
    trained.run("resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)")
    assert left(tmp_path) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        trained.export(tmp_path / "out")
    trained.export(tmp_path / "out", overwrite=True, max_shard_size="20KB")
    shards = {name for name in left(tmp_path / "out") if "-of-" in name}
    assert len(shards) > 2
    (tmp_path / "out/adapter_config.json").write_text("{}")  # of an adapter's export
    trained.export(tmp_path / "out", overwrite=True)
    assert left(tmp_path / "out") == [
        *("config.json", "generation_config.json", "model.safetensors", "notes.txt")
    ]
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    assert left(tmp_path) == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"is a file\. Use a folder"):
        trained.export(tmp_path / "file", overwrite=True)
    with pytest.raises(CheckpointError, match="'step' is not a prepared model"):
        trained.export(tmp_path / "none", model="step")


@pytest.mark.parametrize("backend", engines.each("zero3"))
def test_every_engine_gives_a_state_dict(trained: Session, backend: str) -> None:
    trained.switch(backend)
    trained.run(BUILD.format("gpt2"))
    trained.run("expected = dict(before.state_dict()); other = 5")
    expected = trained.pull("expected")
    found, other = trained.pull("model", "other")
    assert other == 5
    assert_same(found, expected)
    tied = ("lm_head.weight", "transformer.wte.weight")
    assert found[tied[0]] is found[tied[1]]
    arrays = trained.pull("model", as_numpy=True)
    assert all((arrays[name] == tensor.numpy()).all() for name, tensor in expected.items())
    part = trained.pull("before")  # prepared by nobody
    assert_same(part, expected)
    trained.run("inner = accelerator.unwrap_model(model).transformer.h[1]")
    part = trained.pull("inner")
    prefix = "transformer.h.1."
    assert_same(
        part, {n.removeprefix(prefix): t for n, t in expected.items() if n.startswith(prefix)}
    )
    with pytest.raises(PayloadError, match="gpt2 is a function"):
        trained.pull("gpt2")


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_torch_save_writes_whole_tensors_or_refuses(
    trained: Session, backend: str, tmp_path: Path
) -> None:
    trained.switch(backend)
    trained.run(BUILD.format("gpt2"))
    trained.run("import safetensors.torch; before_engine = accelerator.unwrap_model(model)")
    file = str(tmp_path / "model.pt")
    for saved in (
        "torch.save({'model': model.state_dict()}",
        "torch.save([{f'backbone.{name}': value for name, value in model.state_dict().items()}]",
        "accelerator.save(model.state_dict()",
        "torch.save({'model': dict(model.named_parameters())}",
        "safetensors.torch.save_file(dict(model.named_parameters())",
        "safetensors.torch.save_model(before_engine",
    ):
        refused = r"(torch\.save|safetensors would).*%nbdist export.*get_state_dict"
        if backend == "zero3" and "state_dict" in saved:
            refused = r"state_dict\(\) returns empty tensors under zero3.*full_parameters"
        with pytest.raises(CellError, match=refused):
            trained.run(f"if rank == 0: {saved}, {file!r})")
        assert left(tmp_path) == []
    # a library of the environment below a rank's own, as with --system-site-packages
    library = f"torch.save(model.state_dict(), {file!r} + str(rank))"
    trained.run(f"exec(compile({library!r}, '/usr/lib/python3/dist-packages/library.py', 'exec'))")
    trained.run("own = {'weight': torch.tensor([]), 'lazy': torch.nn.LazyLinear(2)}")
    trained.run(f"own['self'] = own; torch.save(own, {file!r} + str(rank))")
    trained.run("weights = accelerator.get_state_dict(model)")
    trained.run(f"if rank == 0: torch.save({{'model': weights}}, {file!r})")
    trained.run("expected = dict(before.state_dict())")
    assert_same(torch.load(file)["model"], trained.pull("expected"))


def test_a_save_by_the_main_process_only_ends_with_what_to_do(
    trained: Session, tmp_path: Path
) -> None:
    trained.switch("fsdp2")
    trained.run(BUILD.format("gpt2"))
    saved = f"accelerator.unwrap_model(model).save_pretrained({str(tmp_path)!r})"
    with pytest.raises(CellInterrupted, match=r"rank 1 has finished the cell\. All ranks must run"):
        trained.run(f"if accelerator.is_main_process: {saved}")
    trained.run(saved)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.nightly
def test_one_rank_exports_too(tmp_path: Path) -> None:
    with Session(nproc=1, backend="zero3") as session:
        session.run(MODELS)
        session.run(BUILD.format("mixtral"))
        session.export(tmp_path / "out")
        session.run(f"before.save_pretrained({str(tmp_path / 'before')!r})")
        assert_same(tensors(tmp_path / "out"), tensors(tmp_path / "before"))
        session.run("expected = dict(before.state_dict())")
        assert_same(session.pull("model"), session.pull("expected"))


def test_the_magics_export_pull_and_load(notebook: LiveKernel, tmp_path: Path) -> None:
    notebook.run(f"%%distribute -n 1\n{MODELS}\n{BUILD.format('gpt2')}")
    shown = notebook.run(f"%nbdist export {tmp_path / 'out'} --dtype bf16")
    assert shown.status == "ok", shown
    assert "GPT2LMHeadModel.from_pretrained(" in shown.text
    notebook.run("%nbdist pull model")
    assert "torch.float32" in notebook.run("model['lm_head.weight'].dtype").text
    shown = notebook.run(f"%nbdist load {tmp_path / 'out'}")
    assert "28 tensors" in shown.text, shown
    assert "weights only" in shown.text
    assert "--max-shard-size" in notebook.run("%nbdist export -h").text
