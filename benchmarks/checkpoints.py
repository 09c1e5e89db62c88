"""Saving and loading 256 MB of training state, beside plain safetensors.

One process writes and reads the same tensors in turns: nbdist with manifest, checksums,
commit and verification, safetensors with `save_file`, `load_file` and the copy into the
living tensors. Both wait until the disk has it. Reading is from memory, as right after a save.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from results import Row, middle
from safetensors.torch import load_file, save_file

from nbdist import checkpoint
from nbdist.checkpoint import FolderStorage
from nbdist.state import shard_io
from nbdist.state.shards import Shard, ShardPiece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 8
WIDTH, LAYERS = 1024, 5
State = dict[str, torch.Tensor]
Times = dict[str, list[float]]


def measure(folder: Path | None = None) -> Iterator[Row]:
    """Rows about one rank's bandwidth.

    Args:
        folder: on the disk to measure; by default the one of temporary files.
    """
    with tempfile.TemporaryDirectory(dir=folder) as made:
        yield from rows(*timed(Path(made)))


def timed(root: Path) -> tuple[Times, int]:
    """Seconds of each step, and the bytes that each moves."""
    torch.manual_seed(0)
    state = training_state()
    living = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    plain, own = root / "plain", root / "nbdist"
    turns: list[tuple[Path, dict[str, Callable[[], object]]]] = [
        (
            plain,
            {
                "safetensors write": lambda: plain_save(state, plain),
                "safetensors read": lambda: plain_load(living, plain),
            },
        ),
        (
            own,
            {
                "nbdist write": lambda: save(state, own),
                "nbdist read": lambda: load(living, own),
                "nbdist read, not verified": lambda: load(living, own, crc=False),
            },
        ),
    ]
    times: Times = {name: [] for _, steps in turns for name in steps}
    for number in range(-1, ROUNDS):
        for folder, steps in turns if number % 2 else turns[::-1]:
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if number >= 0:  # the first round touches memory for the first time
                    times[name].append(time.perf_counter() - begin)
            shutil.rmtree(folder)
    assert all(torch.equal(living[name], tensor) for name, tensor in state.items())
    return times, sum(tensor.nbytes for tensor in state.values())


def rows(times: Times, size_bytes: int) -> Iterator[Row]:
    """Bandwidth there and back, as a part of safetensors'."""
    ours, plain = (
        middle(times[f"{who} write"]) + middle(times[f"{who} read"])
        for who in ("nbdist", "safetensors")
    )
    speeds = {name: size_bytes / 1e9 / middle(values) for name, values in times.items()}
    yield Row(
        name="checkpoint of one rank there and back, against safetensors",
        value=plain / ours,
        unit="x",
        limit=0.6,
        sense=">=",
        detail=", ".join(f"{name} {speed:.2f} GB/s" for name, speed in speeds.items()),
    )


def training_state() -> State:
    """Weights and Adam's moments of a small transformer, 240 MB of float32."""
    shapes = {"attention": (4 * WIDTH, WIDTH), "norm": (WIDTH,)}
    names = ["model.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq"]
    return {
        name.format(f"layers.{layer}.{part}"): torch.randn(shape)
        for name in names
        for layer in range(LAYERS)
        for part, shape in shapes.items()
    }


def plain_save(state: State, folder: Path) -> None:
    """What a script would do, and wait for the disk."""
    folder.mkdir()
    save_file(state, folder / "state.safetensors")
    for path in (folder / "state.safetensors", folder, folder.parent):
        with opened(path) as fd:
            os.fsync(fd)


def plain_load(living: State, folder: Path) -> None:
    """Into tensors that are there, as `load_state_dict` does."""
    for name, tensor in load_file(folder / "state.safetensors").items():
        living[name].copy_(tensor)


def save(state: State, root: Path) -> None:
    draft = FolderStorage(root).begin("bench", size_bytes=sum(one.nbytes for one in state.values()))
    shards = whole(state)
    parts = []
    for kind in ("model", "optim"):
        chosen = {name: one for name, one in shards.items() if name.startswith(kind)}
        parts += shard_io.write_shards(chosen, draft, 0, kind)
    draft.write_report(0, parts, {})
    manifest = checkpoint.Manifest(
        backend="ddp",
        world_size=1,
        step=1,
        keys={
            name: checkpoint.TensorMetadata(shape=tuple(one.shape), dtype="float32", digest=0)
            for name, one in state.items()
        },
        files=draft.read_reports([0])[0].files,
    )
    draft.commit("bench", manifest)


def load(living: State, root: Path, *, crc: bool = True) -> None:
    path = FolderStorage(root).find("bench")
    manifest = checkpoint.verify_files(path, files=None if crc else [])
    shard_io.read_shards(path, manifest, whole(living))


def whole(state: State) -> dict[str, Shard]:
    """All of each tensor in one piece."""
    return {
        name: Shard(
            shape=tuple(one.shape),
            dtype=one.dtype,
            pieces=(ShardPiece(0, one.numel(), one.view(-1)),),
        )
        for name, one in state.items()
    }


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor for fsync."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
