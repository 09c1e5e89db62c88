"""Readers of checkpoints written by other tools; no code in them is run.

    safetensors     weights, from Hugging Face or any other tool
    DDP             Accelerate's save_state: weights, optimizer state by parameter index
    FSDP            Accelerate's save_state: folders of torch.distributed.checkpoint
    DeepSpeed       ZeRO-1, 2 and 3, from Accelerate or DeepSpeed itself

Each rank reads only the intervals that it needs. Pickles are read by `safe_unpickler` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import CheckpointError
from nbdist.state.importers import dcp, deepspeed, safe_unpickler
from nbdist.state.layouts.base import bare_name
from nbdist.state.tensor_index import (
    ForeignCheckpoint,
    RenamedTensors,
    add_safetensors,
    find_safetensors,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["ForeignCheckpoint", "RenamedTensors", "open_checkpoint"]

_WEIGHTS = "pytorch_model.bin"
_OPTIMIZER = "optimizer.bin"
_NOT_IMPORTED = {
    "scheduler.bin": "the scheduler",
    "random_states_0.pkl": "random generators",
    "scaler.pt": "the loss scale",
    "sampler.bin": "the position in the data",
    "custom_checkpoint_0.pkl": "objects registered for checkpointing",
}


def open_checkpoint(
    path: Path,
    *,
    trust: bool = False,
    names: RenamedTensors | None = None,
    groups: Sequence[Sequence[str]] = (),
) -> ForeignCheckpoint:
    """Index the tensors of a checkpoint; reads file headers, not tensors.

    Args:
        path: folder or file.
        trust: allow code in pickles to run; otherwise such files are refused.
        names: tensor names in the files of the model's class.
        groups: parameter names of the optimizer's groups: Accelerate's optimizer.bin has indices.

    Raises:
        CheckpointError: the format is unknown, the checkpoint is damaged or contains code.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Pass a folder or a file with a checkpoint.")
    index = ForeignCheckpoint(kind="safetensors")
    _find(index, path, names or {}, groups, trust=trust)
    if not index.keys:
        raise CheckpointError(
            f"{path} contains no tensors. Pass a folder or a file with a checkpoint."
        )
    index.check_complete()
    if path.is_dir():
        ignored = [label for name, label in _NOT_IMPORTED.items() if (path / name).exists()]
        index.notes += [f"not loaded: {', '.join(ignored)}"] if ignored else []
    return index


def _find(
    found: ForeignCheckpoint,
    path: Path,
    names: RenamedTensors,
    groups: Sequence[Sequence[str]],
    *,
    trust: bool,
) -> None:
    """Detect the format by the file names and index its tensors."""
    if path.is_file():
        _add_file(found, path, names, trust=trust)
        return
    if folder := deepspeed.find_folder(path):
        deepspeed.add_tensors(found, folder, trust=trust)
        return
    if folders := dcp.find_folders(path):
        found.kind = "FSDP (torch.distributed.checkpoint)"
        for folder in folders:
            dcp.add_tensors(found, folder, trust=trust)
        return
    files = find_safetensors(path)
    if files:
        add_safetensors(found, files, names)
    elif (path / _WEIGHTS).is_file():
        _add_file(found, path / _WEIGHTS, names, trust=trust)
    if (path / _OPTIMIZER).is_file():
        found.kind = "DDP (Accelerate)"
        _add_optimizer(found, path / _OPTIMIZER, groups, trust=trust)


def _add_file(found: ForeignCheckpoint, path: Path, names: RenamedTensors, *, trust: bool) -> None:
    if path.suffix == ".safetensors":
        add_safetensors(found, [path], names)
        return
    found.kind = "torch.save"
    state = safe_unpickler.load_torch_file(path, trust=trust)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} must contain a state dict, got {type(state).__name__}.")
    for name, tensor in state.items():
        if isinstance(name, str) and isinstance(tensor, torch.Tensor):
            found.add_whole_tensor(f"model.{bare_name(name.removeprefix('module.'))}", tensor)


def _add_optimizer(
    found: ForeignCheckpoint, path: Path, groups: Sequence[Sequence[str]], *, trust: bool
) -> None:
    """Index an optimizer's state dict; its parameters are numbered in the order of the groups."""
    state = safe_unpickler.load_torch_file(path, trust=trust)
    try:
        sizes = [len(group["params"]) for group in state["param_groups"]]
        numbers = [
            parameter_number
            for group in state["param_groups"]
            for parameter_number in group["params"]
        ]
        states: Mapping[int, Mapping[str, Any]] = state["state"]
        names = [name for group in groups for name in group]
        if not groups:
            found.notes.append(f"not loaded: {path.name}, as no optimizer is prepared")
            return
        if sizes != [len(group) for group in groups]:
            raise CheckpointError(
                f"{path} has an optimizer with groups of {sizes} parameters, but the prepared one"
                f" has {[len(group) for group in groups]}. Prepare the optimizer that was saved."
            )
        for number, name in zip(numbers, names, strict=True):
            for state_name, value in states.get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    found.add_whole_tensor(f"optim.state.{name}.{state_name}", value)
                elif value is not None:
                    found.scalar_state.setdefault(name, {})[state_name] = float(value)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an optimizer state dict. Load another checkpoint."
        ) from error
