"""Checkpoints of strangers: what is read, and that nothing in them is run."""

from __future__ import annotations

import json
import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from nbdist.errors import CheckpointError
from nbdist.state import importers
from nbdist.state.shards import Shard, ShardPiece
from tests.doubles.foreign_checkpoints import (
    HOSTILE,
    Bomb,
    bomb_metadata,
    bomb_pt,
    metadata,
    read,
    saved,
    zero,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.fault("E9")
@pytest.mark.fault("S7")
@pytest.mark.parametrize("write", HOSTILE, ids=lambda write: write.__name__)
def test_nothing_runs_without_trust(write: Callable[[Path, Any], None], tmp_path: Path) -> None:
    folder, marker = tmp_path / "folder", tmp_path / "marker"
    folder.mkdir()
    write(folder, Bomb(marker))
    assert not marker.exists()
    with pytest.raises(CheckpointError) as caught:
        read(importers.open_checkpoint(folder, groups=[["w"]]))
    assert not marker.exists()
    words = str(caught.value)
    assert "--trust" in words
    assert "runs any code" in words
    assert "\n" not in words
    assert len(words) < 1000


@pytest.mark.parametrize("write", [bomb_pt, bomb_metadata], ids=lambda write: write.__name__)
def test_trust_runs_what_is_there(write: Callable[[Path, Any], None], tmp_path: Path) -> None:
    folder, marker = tmp_path / "folder", tmp_path / "marker"
    folder.mkdir()
    write(folder, Bomb(marker))
    assert not marker.exists()
    found = importers.open_checkpoint(folder, trust=True)
    assert marker.exists()
    assert read(found)["model.w"].tolist() == [1, 1]


@pytest.mark.fault("S8")
def test_an_old_torch_does_not_read_what_others_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(CheckpointError, match=r"Install torch 2\.10 or newer"):
        importers.open_checkpoint(tmp_path)
    assert "model.w" in importers.open_checkpoint(tmp_path, trust=True).keys


def test_no_class_of_torch_is_made_or_changed(tmp_path: Path) -> None:
    """A pickle may set attributes on classes that it names."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    polluted = b"\x80\x02" + name + b"(N}X\x05\x00\x00\x00ownedK\x01stb."
    (tmp_path / ".metadata").write_bytes(polluted)
    with pytest.raises(CheckpointError):
        importers.open_checkpoint(tmp_path)
    assert not hasattr(dcp.metadata.Metadata, "owned")


@pytest.mark.parametrize(
    "asked", [("builtins", "eval"), ("torch", "load"), ("os", "system"), ("torch", "ops.x")]
)
def test_metadata_may_name_nothing_else(asked: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"c%s\n%s\n." % tuple(part.encode() for part in asked))
    with pytest.raises(CheckpointError, match=r"it uses|--trust"):
        importers.open_checkpoint(tmp_path)


def test_safetensors_by_file_and_index(tmp_path: Path) -> None:
    one, two = torch.arange(12.0).view(3, 4), torch.ones(5, dtype=torch.bfloat16)
    save_file({"a": one}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": two}, tmp_path / "model-00002-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {n: f"model-0000{i}-of-00002.safetensors" for i, n in ((1, "a"), (2, "b"))}
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = read(importers.open_checkpoint(tmp_path))
    assert torch.equal(found["model.a"], one)
    assert torch.equal(found["model.b"], two)
    alone = importers.open_checkpoint(tmp_path / weight_map["a"])
    assert alone.keys == {"model.a": ((3, 4), torch.float32)}
    room = torch.zeros(5)
    alone.read_into(
        {"model.a": Shard(shape=(3, 4), dtype=torch.float32, pieces=(ShardPiece(2, 7, room),))}
    )
    assert room.tolist() == [2, 3, 4, 5, 6]
    half = {"a": ("model.x", 12, (2, 12)), "b": ("model.y", 0, (5,))}
    with pytest.raises(CheckpointError, match=r"Element 0 of 'model\.x' is in no file"):
        importers.open_checkpoint(tmp_path, names=half)


@pytest.mark.fault("E10")
@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "a", 5, ".x.safetensors"])
def test_an_index_names_files_beside_it_only(name: object, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not a file name in its folder"):
        importers.open_checkpoint(tmp_path)


def test_folders_of_torch_checkpoint(tmp_path: Path) -> None:
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(2.0)}
    saved(tmp_path, state)
    found = importers.open_checkpoint(tmp_path)
    assert {key: entry.shape for key, entry in found.keys.items()} == {
        "model.a": (3, 4),
        "model.b": (),
    }
    assert torch.equal(read(found)["model.a"], state["a"])
    written = metadata(tmp_path)
    for info in written.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    with pytest.raises(CheckpointError, match="not a file name in its folder"):
        importers.open_checkpoint(tmp_path)


def test_folders_of_zero(tmp_path: Path) -> None:
    zero(tmp_path)
    found = importers.open_checkpoint(tmp_path)
    assert found.kind == "DeepSpeed ZeRO-1 or 2"
    assert found.scalar_state == {"a": {"step": 3.0}, "b": {"step": 3.0}}
    tensors = read(found)
    assert tensors["model.a"].tolist() == [[0, 1], [2, 3]]
    assert tensors["optim.state.b.exp_avg"].tolist() == [14, 15]
    assert tensors["model.seen"].tolist() == [1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_zero_3_in_sub_groups(ranks: int, tmp_path: Path) -> None:
    shapes = {"a": torch.Size([5]), "b": torch.Size([2, 2]), "c": torch.Size([1])}
    whole = {
        name: torch.arange(float(math.prod(s))) + 10 * i
        for i, (name, s) in enumerate(shapes.items())
    }
    each = {name: -(-one.numel() // ranks) for name, one in whole.items()}
    for rank in range(ranks):
        cut = {
            name: torch.nn.functional.pad(one, (0, each[name] * ranks - one.numel()))[
                rank * each[name] : (rank + 1) * each[name]
            ]
            for name, one in whole.items()
        }
        flats = [torch.cat([cut["a"], cut["b"]]), cut["c"]]
        states = {i: {"step": torch.tensor(2.0), "exp_avg": -one} for i, one in enumerate(flats)}
        optim = {"fp32_flat_groups": flats, "optimizer_state_dict": {"state": states}}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optim}, tmp_path / f"{name}_optim_states.pt")
        model = {"module": {}, "buffer_names": [], "param_shapes": [shapes]}
        torch.save(model, tmp_path / f"{name}_model_states.pt")
    found = importers.open_checkpoint(tmp_path)
    assert found.kind == "DeepSpeed ZeRO-3"
    tensors = read(found)
    for name, one in whole.items():
        assert torch.equal(tensors[f"model.{name}"].view(-1), one)
        assert torch.equal(tensors[f"optim.state.{name}.exp_avg"].view(-1), -one)
        assert found.scalar_state[name] == {"step": 2.0}
    (tmp_path / f"zero_pp_rank_{ranks}_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError):
        importers.open_checkpoint(tmp_path)


def test_optimizers_by_number(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": [model.bias]}, {"params": [model.weight]}])
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    found = importers.open_checkpoint(tmp_path, groups=[["bias"], ["weight"]])
    tensors = read(found)
    state = optimizer.state[model.bias]
    assert torch.equal(tensors["optim.state.bias.exp_avg"], state["exp_avg"])
    assert found.scalar_state["weight"] == {"step": 1.0}
    with pytest.raises(CheckpointError, match=r"groups of \[1, 1\] parameters"):
        importers.open_checkpoint(tmp_path, groups=[["bias", "weight"]])
    assert "no optimizer is prepared" in importers.open_checkpoint(tmp_path).notes[0]


def test_other_files_are_rejected_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no tensors"):
        importers.open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        importers.open_checkpoint(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        importers.open_checkpoint(tmp_path)
