"""Checkpoints as other programs write them, some of which try to run code when they are read."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from nbdist.state.shards import Shard, ShardPiece

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nbdist.state import importers
    from nbdist.state.shards import ShapeAndDtype


class Bomb:
    """Makes a file wherever it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def metadata(folder: Path) -> Any:
    """What torch wrote about a folder of our own."""
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - just written


def whole(entry: ShapeAndDtype) -> tuple[torch.Tensor, Shard]:
    """Room for a tensor, and the shard that asks for all of it."""
    room = torch.zeros(entry.shape, dtype=entry.dtype)
    flat = room.view(-1)
    pieces = (ShardPiece(0, flat.numel(), flat),)
    return room, Shard(shape=entry.shape, dtype=entry.dtype, pieces=pieces)


def read(found: importers.ForeignCheckpoint) -> dict[str, torch.Tensor]:
    rooms = {key: whole(entry) for key, entry in found.keys.items()}
    found.read_into({key: shard for key, (_, shard) in rooms.items()})
    return {key: room for key, (room, _) in rooms.items()}


def saved(folder: Path, state: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13: that there is one process alone
        dcp.save({"model": state, "other": 5}, checkpoint_id=folder, no_dist=True)


def bomb_pt(folder: Path, bomb: Any) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": bomb}, folder / "pytorch_model.bin")


def bomb_legacy(folder: Path, bomb: Any) -> None:
    content = {"w": torch.ones(2), "x": bomb}
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def bomb_pickle(folder: Path, bomb: Any) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": bomb}))


def bomb_optimizer(folder: Path, bomb: Any) -> None:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    torch.save({"state": {0: {"x": bomb}}, "param_groups": []}, folder / "optimizer.bin")


def bomb_metadata(folder: Path, bomb: Any) -> None:
    saved(folder, {"w": torch.ones(2)})
    written = metadata(folder)
    written.planner_data = bomb
    (folder / ".metadata").write_bytes(pickle.dumps(written))


def bomb_box(folder: Path, bomb: Any) -> None:
    saved(folder, {"w": torch.ones(2)})
    written = metadata(folder)
    stream = io.BytesIO()
    torch.save(bomb, stream)
    info = next(one for index, one in written.storage_data.items() if "w" in index.fqn)
    (folder / info.relative_path).write_bytes(stream.getvalue())
    info.offset, info.length = 0, len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(written))


def zero(folder: Path, extra: Any = None, *, in_model: Any = None) -> None:
    """Write what ZeRO-1 writes on one rank."""
    flat = torch.arange(6.0)
    state = {"step": torch.tensor(3.0), "exp_avg": flat + 10}
    optim = {
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": {"state": {0: state}, "param_groups": []},
        "loss_scaler": extra,
    }
    torch.save(
        {"optimizer_state_dict": optim}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    model = {
        "module": {"seen": torch.ones(1)},
        "buffer_names": ["seen"],
        "param_shapes": [{"a": torch.Size([2, 2]), "b": torch.Size([2])}],
        "shared_params": {"c": "a"},
        "ds_config": in_model,
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")


def bomb_zero(folder: Path, bomb: Any) -> None:
    zero(folder, bomb)


def bomb_zero_model(folder: Path, bomb: Any) -> None:
    zero(folder, in_model=bomb)


HOSTILE = [
    *(bomb_pt, bomb_legacy, bomb_pickle, bomb_optimizer),
    *(bomb_metadata, bomb_box, bomb_zero, bomb_zero_model),
]
