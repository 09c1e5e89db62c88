"""Small checkpoints without torch, for the tests of nbdist/checkpoint."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from nbdist import checkpoint
from nbdist.checkpoint import FolderStorage
from nbdist.checkpoint.durable_io import DurableFile
from nbdist.checkpoint.safetensors_writer import SafetensorsWriter, StoredTensor

if TYPE_CHECKING:
    from pathlib import Path

NUMEL = 1000
DAMAGE: dict[str, Any] = {
    "one byte less": lambda content: content[:-1],
    "empty": lambda content: content[:0],
    "one byte more": lambda content: content + b"\0",
    "one bit of data": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "one bit of the header": lambda content: content[:9] + bytes([content[9] ^ 1]) + content[10:],
}


def manifest(
    files: tuple[checkpoint.CheckpointFile, ...] = (), **given: Any
) -> checkpoint.Manifest:
    """A manifest that says something in every field."""
    options: dict[str, Any] = {
        "backend": "zero3",
        "world_size": 1,
        "step": 7,
        "samples": 28,
        "keys": {
            "model.w": checkpoint.TensorMetadata(shape=(NUMEL,), dtype="float32", digest=2**64 - 1)
        },
        "files": files,
        "options": {"offload": None, "zero_stage": 3, "bucket": 5e8},
        "versions": {"nbdist": "0.1.0", "torch": "2.13.0"},
        "aliases": {"model.tied": "model.w"},
        "optimizers": (
            checkpoint.OptimizerMetadata(
                prefix="optim",
                kind="torch.optim.adamw.AdamW",
                defaults={"lr": 1e-3, "betas": [0.9, 0.999]},
                groups=(checkpoint.ParamGroup(options={"lr": 1e-3, "fused": None}, names=("w",)),),
                counts={"w": {"step": 7.0}},
            ),
        ),
        "schedulers": ({"best": float("inf"), "last_epoch": 7},),
        "rng": ([3, [2**32 - 1, 5], None],),
        "positions": ({"epoch": 1, "batch": 3},),
    }
    return checkpoint.Manifest(**options | given)


def save(root: Path, name: str, *, overwrite: bool = False, seed: int = 0, **given: Any) -> Path:
    """Write a checkpoint of one rank from start to end."""
    draft = FolderStorage(root).begin(name, overwrite=overwrite)
    draft.write_report(0, [write(draft.location / "model-00000-0.safetensors", seed)], {})
    made = manifest(files_of(draft, 1), **given)
    return draft.commit(name, made, overwrite=overwrite)


def write(path: Path, seed: int = 0, numel: int = NUMEL) -> checkpoint.CheckpointFile:
    """One file with one tensor of random bytes."""
    content = random.Random(seed).randbytes(4 * numel)  # noqa: S311 - any bytes
    stored = StoredTensor(name="model.w", dtype="float32", shape=(numel,), offsets=(0,))
    with SafetensorsWriter(path.name, [stored], DurableFile(path)) as writer:
        writer.write(memoryview(content))
    return writer.result


def files_of(draft: checkpoint.PendingCheckpoint, world_size: int) -> tuple[Any, ...]:
    reports = draft.read_reports(range(world_size))
    return tuple(file for rank in range(world_size) for file in reports[rank].files)
