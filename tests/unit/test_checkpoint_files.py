"""Tensors to files and back: any cut into any other, read by torch and safetensors as well."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import small_checkpoints
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from nbdist import checkpoint
from nbdist.checkpoint import FolderStorage, PendingFolderCheckpoint
from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES
from nbdist.errors import CheckpointError
from nbdist.state import shard_io
from nbdist.state.shards import Shard, ShardPiece

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

State = dict[str, torch.Tensor]
Cut = list[tuple[int, int]]
PLAIN = "ignore:.*torch.distributed is disabled:UserWarning"


def state() -> State:
    """All that can be odd about a tensor."""
    torch.manual_seed(0)
    made: State = {
        "model.cube": torch.randn(7, 5, 3),
        "model.bias": torch.randn(13),
        "model.scalar": torch.tensor(3.5),
        "model.none": torch.empty(0, 4),
        "model.half": torch.randn(11, 3).bfloat16(),
        "model.flags": torch.tensor([True, False, True]),
        "optim.state.cube.exp_avg": torch.randn(7, 5, 3),
        "optim.state.bias.exp_avg": torch.randn(13, dtype=torch.float64),
    }
    return made


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def evenly(numel: int, rank: int, ranks: int) -> Cut:
    return [(numel * rank // ranks, numel * (rank + 1) // ranks)]


def at_random(numel: int, rank: int, ranks: int) -> Cut:
    """Several intervals for each rank, some of which follow each other."""
    dice = random.Random(numel)  # noqa: S311 - cases of a test
    marks = sorted({0, numel, *(dice.randint(0, numel) for _ in range(4 * ranks))})
    spans = list(pairwise(marks))
    owners = [dice.randrange(ranks) for _ in spans]
    return [span for span, owner in zip(spans, owners, strict=True) if owner == rank]


def shard(tensor: torch.Tensor, cut: Cut) -> Shard:
    """Pieces of a tensor; each a view into memory of its own."""
    flat = tensor.detach().reshape(-1)
    pieces = tuple(ShardPiece(start, stop, flat[start:stop].clone()) for start, stop in cut)
    return Shard(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=pieces)


def save(
    root: Path,
    full: State,
    *,
    ranks: int = 1,
    cut: Callable[[int, int, int], Cut] = evenly,
    aliases: dict[str, str] | None = None,
) -> Path:
    """A checkpoint as so many ranks would write it."""
    draft = FolderStorage(root).begin("a", overwrite=True)
    for rank in range(ranks):
        parts = []
        for kind in ("model", "optim"):
            shards = {
                name: shard(tensor, cut(tensor.numel(), rank, ranks))
                for name, tensor in full.items()
                if name.startswith(kind)
            }
            parts += shard_io.write_shards(shards, draft, rank, kind)
        draft.write_report(rank, parts, {})
    made = small_checkpoints.manifest(
        small_checkpoints.files_of(draft, ranks),
        world_size=ranks,
        keys={
            name: checkpoint.TensorMetadata(
                shape=tuple(one.shape), dtype=str(one.dtype).removeprefix("torch."), digest=0
            )
            for name, one in full.items()
        },
        aliases=aliases or {},
    )
    return draft.commit("a", made, overwrite=True)


def blank(full: State, cut: Cut | None = None) -> dict[str, Shard]:
    """Room for all of each tensor, or for a part."""
    return {
        name: shard(torch.zeros_like(one), [(0, one.numel())] if cut is None else cut)
        for name, one in full.items()
    }


def assert_filled(target: dict[str, Shard], full: State) -> None:
    for name, found in target.items():
        flat = full[name].reshape(-1)
        for start, stop, view in found.pieces:
            assert torch.equal(octets(view), octets(flat[start:stop])), name


@pytest.mark.parametrize("cut", [evenly, at_random])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_cut_into_any_other(tmp_path: Path, ranks: int, cut: Callable[..., Cut]) -> None:
    full = state()
    path = save(tmp_path, full, ranks=ranks, cut=cut)
    manifest = checkpoint.verify_files(path)
    for wanted in (1, 2, 4):
        total = 0
        for rank in range(wanted):
            target = {
                name: shard(torch.zeros_like(one), at_random(one.numel(), rank, wanted))
                for name, one in full.items()
            }
            values: list[int] = []
            read_bytes = shard_io.read_shards(path, manifest, target, values.append)
            assert values[-1] == read_bytes
            total += read_bytes
            assert_filled(target, full)
        assert total == sum(one.nbytes for one in full.values())


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    full = state()
    path = save(tmp_path, full, ranks=2)
    target = {"model.cube": shard(torch.zeros(7, 5, 3), [(3, 5), (100, 105)])}
    assert shard_io.read_shards(path, checkpoint.verify_files(path), target) == 4 * 7
    assert_filled(target, full)
    assert shard_io.read_shards(path, checkpoint.verify_files(path), {}) == 0
    nothing = {"model.cube": shard(torch.zeros(7, 5, 3), [])}
    assert shard_io.read_shards(path, checkpoint.verify_files(path), nothing) == 0


def test_numbers_are_converted(tmp_path: Path) -> None:
    full = {"model.w": torch.randn(50, 7)}
    path = save(tmp_path, full, ranks=2)
    target = {"model.w": shard(torch.zeros(50, 7, dtype=torch.bfloat16), [(0, 9), (30, 350)])}
    read_bytes = shard_io.read_shards(path, checkpoint.verify_files(path), target)
    assert read_bytes == 4 * 329
    assert_filled(target, {"model.w": full["model.w"].bfloat16()})


@pytest.mark.parametrize("name", sorted(SAFETENSORS_DTYPES))
def test_every_dtype_of_the_format(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    bits = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    full = {"model.w": bits.view(dtype).view(2, 3), "model.b": torch.tensor(2.0)}
    path = save(tmp_path, full, ranks=2)
    target = blank(full)
    shard_io.read_shards(path, checkpoint.verify_files(path), target)
    assert_filled(target, full)
    with safe_open(path / "model-00000-0.safetensors", framework="pt") as file:
        assert file.get_tensor("model.w").dtype == dtype


def test_a_dtype_that_no_file_has_is_refused(tmp_path: Path) -> None:
    shards = {"model.w": shard(torch.zeros(3, dtype=torch.complex128), [(0, 3)])}
    with pytest.raises(CheckpointError, match="complex128, which safetensors does not support"):
        shard_io.write_shards(shards, PendingFolderCheckpoint(tmp_path), 0, "model")
    assert list(tmp_path.iterdir()) == []


# What does not fit


def test_missing_tensors_are_named_before_anything_is_filled(tmp_path: Path) -> None:
    full = state()
    path = save(tmp_path, full)
    target = blank(full) | {f"model.new{n}": shard(torch.zeros(2), [(0, 2)]) for n in range(12)}
    with pytest.raises(
        CheckpointError, match=r"of 20 tensors 12 are missing: model\.new0, .*, \.\.\.\."
    ):
        shard_io.read_shards(path, checkpoint.verify_files(path), target)
    assert not any(octets(view).any() for one in target.values() for _, _, view in one.pieces)


def test_other_shapes_are_named_before_anything_is_filled(tmp_path: Path) -> None:
    full = state()
    path = save(tmp_path, full)
    target = blank(full) | {"model.cube": shard(torch.zeros(5, 7, 3), [(0, 105)])}
    with pytest.raises(CheckpointError, match=r"\(5, 7, 3\) \(saved \(7, 5, 3\)\)"):
        shard_io.read_shards(path, checkpoint.verify_files(path), target)
    assert not any(octets(view).any() for one in target.values() for _, _, view in one.pieces)


def test_a_checkpoint_that_was_replaced_is_not_mixed_in(tmp_path: Path) -> None:
    full = state()
    manifest = checkpoint.verify_files(save(tmp_path, full))
    path = save(tmp_path, full)
    with pytest.raises(CheckpointError, match="replaced by a newer save"):
        shard_io.read_shards(path, manifest, blank(full))


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> checkpoint.Manifest:
    tree = json.loads((path / "manifest.json").read_text())
    change(tree)
    (path / "manifest.json").write_text(json.dumps(tree))
    return checkpoint.verify_files(path)


def test_a_manifest_that_promises_more_is_found_out(tmp_path: Path) -> None:
    full = {"model.w": torch.randn(4, 4)}
    path = save(tmp_path, full)
    huge = [1 << 30, 1 << 30]
    manifest = rewritten(path, lambda tree: tree["keys"]["model.w"].update(shape=huge))
    target = {"model.w": Shard(shape=(1 << 30, 1 << 30), dtype=torch.float32)}
    shard_io.read_shards(path, manifest, target)  # nothing is wanted
    wanted = Shard(
        shape=(1 << 30, 1 << 30), dtype=torch.float32, pieces=(ShardPiece(0, 8, torch.zeros(8)),)
    )
    with pytest.raises(CheckpointError, match=r"Element 4 of .* is in no file"):
        shard_io.read_shards(path, manifest, {"model.w": wanted})
    with pytest.raises(CheckpointError, match=r"files lack elements of 'model\.w'"):
        shard_io.read_state_dict(path)


@pytest.mark.parametrize(
    "change", [{"shape": [4, 3]}, {"dtype": "int32"}, {"shape": [16]}], ids=str
)
def test_a_manifest_that_says_otherwise_is_found_out(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = save(tmp_path, {"model.w": torch.randn(4, 4)})
    rewritten(path, lambda tree: tree["keys"]["model.w"].update(change))
    with pytest.raises(CheckpointError, match=r"does not match the manifest|lack elements of"):
        shard_io.read_state_dict(path)


# Without ranks


def test_a_state_dict_in_any_process(tmp_path: Path) -> None:
    full = state()
    for ranks in (1, 3):
        path = save(tmp_path, full, ranks=ranks, aliases={"model.tied": "model.cube"})
        found = shard_io.read_state_dict(path)
        assert found.pop("tied") is found["cube"]
        assert {f"model.{name}" for name in found} == {n for n in full if n.startswith("model")}
        for name, tensor in found.items():
            assert tensor.shape == full[f"model.{name}"].shape
            assert tensor.dtype == full[f"model.{name}"].dtype
            assert torch.equal(octets(tensor), octets(full[f"model.{name}"]))


def test_a_state_dict_is_mapped_and_private(tmp_path: Path) -> None:
    full = {"model.w": torch.randn(1000), "model.b": torch.randn(3)}
    path = save(tmp_path, full)
    first, second = shard_io.read_state_dict(path), shard_io.read_state_dict(path)
    assert first["w"].data_ptr() - first["b"].data_ptr() == 12  # as they lie in the file
    first["w"].zero_()
    assert torch.equal(second["w"], full["model.w"])
    checkpoint.verify_files(path)
    save(tmp_path, {"model.w": torch.zeros(1000), "model.b": torch.zeros(3)})
    assert torch.equal(second["w"], full["model.w"])  # lives on after it was replaced


# Other readers


@pytest.mark.filterwarnings(PLAIN)
@pytest.mark.parametrize("cut", [evenly, at_random])
@pytest.mark.parametrize("ranks", [1, 3])
def test_plain_torch_reads_it(tmp_path: Path, ranks: int, cut: Callable[..., Cut]) -> None:
    full = state()
    path = save(tmp_path, full, ranks=ranks, cut=cut)
    flat = {name: torch.zeros_like(one) for name, one in full.items()}
    dcp.load(flat, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, one in full.items():
        assert torch.equal(octets(flat[name]), octets(one)), name
    model = {n.removeprefix("model."): torch.zeros_like(flat[n]) for n in full if "model" in n}
    nested = {"model": model}
    dcp.load(nested, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(model["cube"], full["model.cube"])
