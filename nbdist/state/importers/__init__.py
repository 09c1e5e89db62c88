"""Readers of checkpoints written by other tools; no code in them is run.

    safetensors     of Hugging Face and of anybody: weights
    DDP             Accelerate's save_state: weights, optimizer by position in its groups
    FSDP            Accelerate's save_state: folders of torch.distributed.checkpoint
    DeepSpeed       of Accelerate or DeepSpeed itself, ZeRO-1, 2 and 3

Nothing is gathered: each rank reads the intervals that it wants. `unpickled` is the only
module of nbdist that reads pickles, and says how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import CheckpointError
from nbdist.state.importers import dcp, deepspeed, safe_unpickler, safetensors
from nbdist.state.importers.tensor_index import Entry, Foreign, Names
from nbdist.state.layouts.base import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Entry", "Foreign", "Names", "opened"]

_WEIGHTS = "pytorch_model.bin"
_OPTIMIZER = "optimizer.bin"
_NOT_TAKEN = {
    "scheduler.bin": "the scheduler",
    "random_states_0.pkl": "random generators",
    "scaler.pt": "the loss scale",
    "sampler.bin": "the position in the data",
    "custom_checkpoint_0.pkl": "objects registered for checkpointing",
}


def opened(
    path: Path,
    *,
    trust: bool = False,
    names: Names | None = None,
    groups: Sequence[Sequence[str]] = (),
) -> Foreign:
    """Find out what a foreign checkpoint holds; reads heads of files, not tensors.

    Args:
        path: of a folder or a file.
        trust: whether code in it may run; without it, files that need that are refused.
        names: how the model's class names its tensors in files.
        groups: parameters of the optimizer's groups: Accelerate's optimizer.bin has numbers.

    Raises:
        CheckpointError: nothing known is there, it is damaged, or it holds code.
    """
    if not path.exists():
        message = f"{path} does not exist; give a folder or a file with a checkpoint."
        raise CheckpointError(message)
    found = Foreign(kind="safetensors")
    _find(found, path, names or {}, groups, trust=trust)
    if not found.keys:
        message = f"{path} holds no tensors; give a folder or a file with a checkpoint."
        raise CheckpointError(message)
    found.check()
    if path.is_dir():
        left = [words for name, words in _NOT_TAKEN.items() if (path / name).exists()]
        found.notes += [f"not taken: {', '.join(left)}"] if left else []
    return found


def _find(
    found: Foreign, path: Path, names: Names, groups: Sequence[Sequence[str]], *, trust: bool
) -> None:
    """Tell the kinds apart by their files."""
    if path.is_file():
        _add_file(found, path, names, trust=trust)
        return
    if folder := deepspeed.folder_of(path):
        deepspeed.add(found, folder, trust=trust)
        return
    folders = _dcp_folders(path)
    for folder, named in folders:
        found.kind = "FSDP (torch.distributed.checkpoint)"
        dcp.add(found, folder, named, trust=trust)
    if folders:
        return
    files = safetensors.files_of(path)
    if files:
        safetensors.add(found, files, names)
    elif (path / _WEIGHTS).is_file():
        _add_file(found, path / _WEIGHTS, names, trust=trust)
    if (path / _OPTIMIZER).is_file():
        found.kind = "DDP (Accelerate)"
        _add_optimizer(found, path / _OPTIMIZER, groups, trust=trust)


def _add_file(found: Foreign, path: Path, names: Names, *, trust: bool) -> None:
    """Weights in one file."""
    if path.suffix == ".safetensors":
        safetensors.add(found, [path], names)
        return
    found.kind = "torch.save"
    state = safe_unpickler.torch_file(path, trust=trust)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        message = f"{path} holds {type(state).__name__} where a state dict belongs."
        raise CheckpointError(message)
    for name, tensor in state.items():
        if isinstance(name, str) and isinstance(tensor, torch.Tensor):
            found.add_whole(f"model.{plain(name.removeprefix('module.'))}", tensor)


def _dcp_folders(path: Path) -> list[tuple[Path, Any]]:
    """Folders of torch.distributed.checkpoint, each with what its names mean."""
    if (path / ".metadata").is_file():
        return [(path, _of_any)]
    kinds = {"pytorch_model_fsdp_0": _of_model, "optimizer_0": _of_optimizer}
    return [
        (path / name, named)
        for name, named in kinds.items()
        if (path / name / ".metadata").is_file()
    ]


def _of_model(name: str) -> tuple[str, str] | None:
    return (name.removeprefix("model."), "") if name.startswith("model.") else None


def _of_optimizer(name: str) -> tuple[str, str] | None:
    inner = name.removeprefix("optimizer.")
    if not inner.startswith("state."):
        return None
    parameter, _, state = inner.removeprefix("state.").rpartition(".")
    return parameter, state


def _of_any(name: str) -> tuple[str, str] | None:
    for prefix in ("optimizer.state.", "optim.state."):
        if name.startswith(prefix):
            parameter, _, state = name.removeprefix(prefix).rpartition(".")
            return parameter, state
    return _of_model(name)


def _add_optimizer(
    found: Foreign, path: Path, groups: Sequence[Sequence[str]], *, trust: bool
) -> None:
    """An optimizer's own state dict, whose parameters have numbers in the order of its groups."""
    state = safe_unpickler.torch_file(path, trust=trust)
    try:
        sizes = [len(group["params"]) for group in state["param_groups"]]
        numbers = [one for group in state["param_groups"] for one in group["params"]]
        states: Mapping[int, Mapping[str, Any]] = state["state"]
        names = [name for group in groups for name in group]
        if not groups:
            found.notes.append(f"not taken: {path.name}, for want of an optimizer")
            return
        if sizes != [len(group) for group in groups]:
            message = (
                f"{path} is of an optimizer with groups of {sizes} parameters, and this one has"
                f" {[len(group) for group in groups]}; prepare the optimizer that was saved."
            )
            raise CheckpointError(message)
        for number, name in zip(numbers, names, strict=True):
            for which, value in states.get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    found.add_whole(f"optim.state.{name}.{which}", value)
                elif value is not None:
                    found.counts.setdefault(name, {})[which] = float(value)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"{path} is not what an optimizer's state dict is; take another checkpoint."
        raise CheckpointError(message) from error
