"""Frozen tensors are found in the files of a base model, and their values are verified there."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nbdist.checkpoint import Manifest
from nbdist.errors import CheckpointError
from nbdist.state import base_model
from nbdist.state.shards import Shard, ShardPiece
from tests.models import llama

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shards(**tensors: torch.Tensor) -> dict[str, Shard]:
    """Whole tensors as shards, in two pieces."""
    made = {}
    for name, tensor in tensors.items():
        flat, half = tensor.reshape(-1), tensor.numel() // 2
        pieces = ShardPiece(0, half, flat[:half]), ShardPiece(half, flat.numel(), flat[half:])
        made[name] = Shard(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=pieces)
    return made


def manifest(stored: base_model.StoredByReference) -> Manifest:
    """A manifest that has only references, as it is read from disk."""
    made = Manifest(
        backend="ddp", world_size=1, step=0, keys=stored.keys, files=(), bases=stored.bases
    )
    return Manifest.from_json(made.to_json())


@pytest.fixture
def base(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Two tensors in a file of `tmp_path`."""
    tensors = {"a": torch.randn(5, 7), "b": torch.randn(9).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


def test_tensors_are_found_by_their_values(tmp_path: Path, base: dict[str, torch.Tensor]) -> None:
    frozen = shards(x=base["a"], y=base["b"].float(), z=base["a"] + 1)
    stored = base_model.find_references(frozen, [str(tmp_path)])
    assert stored.bases[0].tensors == {"x": "a", "y": "b"}
    assert stored.keys["y"].dtype == "float32"
    assert "1 frozen parameters (140 bytes) are stored by value: not equal" in stored.notes[1]
    index = base_model.open_references(manifest(stored), ["x", "y"], [])
    target = shards(x=torch.zeros(5, 7), y=torch.zeros(9))
    index.read_into(target)
    assert base_model.different_from(manifest(stored), target) == []
    assert base_model.different_from(manifest(stored), shards(x=base["a"] + 1)) == ["x"]


def test_a_changed_file_is_read_again_and_refused(
    tmp_path: Path, base: dict[str, torch.Tensor]
) -> None:
    bases = [str(tmp_path)]
    stored = base_model.find_references(shards(x=base["a"]), bases)
    save_file({"a": base["a"] + 1}, tmp_path / "model.safetensors")
    assert not base_model.find_references(shards(x=base["a"]), bases).keys
    with pytest.raises(CheckpointError, match=r"has changed .*: 1 of 1 tensors differ, .* 'x'"):
        base_model.open_references(manifest(stored), ["x"], bases)
    with pytest.raises(CheckpointError, match=r"but the prepared model was made from /other: "):
        base_model.open_references(manifest(stored), ["x"], ["/other"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no safetensors files\. Prepare a model from"):
        base_model.open_references(manifest(stored), ["x"], bases)


def test_a_repository_is_found_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--some--model"
    llama().save_pretrained(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / ("f" * 40)).mkdir()
    model = AutoModelForCausalLM.from_pretrained("some/model", cache_dir=tmp_path)
    bases = base_model.bases_of(model)
    assert bases == ["some/model"]
    frozen = shards(**{name: tensor.detach() for name, tensor in model.named_parameters()})
    stored = base_model.find_references(frozen, bases)
    assert stored.keys.keys() == frozen.keys()
    assert stored.bases[0].revision == COMMIT
    assert "by reference to some/model at revision 0123456789ab" in stored.notes[0]
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"some/model at revision 0123.* is not on this"):
        base_model.open_references(manifest(stored), list(frozen), bases)
