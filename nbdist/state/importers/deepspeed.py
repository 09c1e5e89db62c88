"""Reader of DeepSpeed ZeRO checkpoints: flat partitions per rank, split by the stored shapes.

Source: deepspeed 0.9 to 0.19, `runtime/engine.py` (save_checkpoint) and `utils/zero_to_fp32.py`,
the public description of the layout. ZeRO-1 and 2: the parameters of a group are concatenated and
the result is partitioned over ranks. ZeRO-3: each parameter is partitioned separately, and a
rank's partitions of all groups are concatenated.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import CheckpointError
from nbdist.state.importers import safe_unpickler
from nbdist.state.layouts.base import bare_name
from nbdist.state.tensor_index import part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.state.tensor_index import ForeignCheckpoint, TensorPart

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,100}")

ParameterShapes = dict[str, tuple[int, ...]]


def find_folder(path: Path) -> Path | None:
    """Return the folder with DeepSpeed's files at or below a path; None if there is none."""
    latest = path / "latest"
    if latest.is_file() and latest.stat().st_size < 200:  # noqa: PLR2004 - a folder name
        tag = latest.read_text(errors="replace").strip()
        if _TAG.fullmatch(tag) and (path / tag).is_dir():
            return path / tag
    if any(_OPTIM.fullmatch(file.name) for file in path.iterdir()):
        return path
    return None


def add_tensors(found: ForeignCheckpoint, folder: Path, *, trust: bool) -> None:
    """Add the tensors of a folder to an index.

    Args:
        trust: allow code in the files to run.

    Raises:
        CheckpointError: the folder is damaged or contains code.
    """
    optim = _by_rank(folder, _OPTIM)
    models = _by_rank(folder, _MODEL)
    try:
        states = [safe_unpickler.load_torch_file(path, trust=trust) for path in optim]
        described = [safe_unpickler.load_torch_file(path, trust=trust) for path in models]
        first = described[0]
        ranks = [state["optimizer_state_dict"] for state in states]
        groups = [
            {bare_name(name): tuple(map(int, shape)) for name, shape in group.items()}
            for group in first["param_shapes"]
        ]
        if "fp32_flat_groups" in ranks[0]:
            found.kind = "DeepSpeed ZeRO-3"
            _add_stage_3(found, groups, ranks)
        else:
            found.kind = "DeepSpeed ZeRO-1 or 2"
            _add_stage_2(found, groups, ranks)
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            fragments = [of_rank["frozen_param_fragments"][name] for of_rank in described]
            # Whole on all ranks under ZeRO-1 and 2; the last part of ZeRO-3 is padded.
            parts = _parts(fragments, 0, math.prod(shape))
            key = f"model.{bare_name(name)}"
            found.add_tensor(key, tuple(shape), fragments[0].dtype, *parts)
        for name in first.get("buffer_names") or ():
            if name in first["module"]:
                found.add_whole_tensor(f"model.{bare_name(name)}", first["module"][name])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} was not written by DeepSpeed or is corrupt ({type(error).__name__}:"
            f" {str(error)[:80]}). Load another checkpoint."
        ) from error


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of all ranks in rank order.

    Raises:
        CheckpointError: files are missing, or tensor or pipeline parallelism was used.
    """
    files = {
        int(match[1] or 0): path
        for path in folder.iterdir()
        if (match := pattern.fullmatch(path.name))
    }
    if not files or sorted(files) != list(range(len(files))):
        raise CheckpointError(
            f"{folder} lacks the files of some ranks (found: {sorted(files)}). DeepSpeed writes"
            " one per rank; tensor and pipeline parallelism are not supported."
        )
    return [files[rank] for rank in range(len(files))]


def _add_stage_2(
    found: ForeignCheckpoint, groups: Sequence[ParameterShapes], ranks: Sequence[Mapping[str, Any]]
) -> None:
    states = [rank["base_optimizer_state"]["state"] for rank in ranks]
    if any(of_rank.keys() != states[0].keys() for of_rank in states):
        raise CheckpointError(
            "The ranks of this DeepSpeed checkpoint have different optimizer states. Load another"
            " checkpoint."
        )
    for number, shapes in enumerate(groups):
        tensors = {"": [rank["single_partition_of_fp32_groups"][number] for rank in ranks]}
        for state in states[0].get(number, {}):
            tensors[state] = [of_rank[number][state] for of_rank in states]
        for state, partitions in tensors.items():
            if _is_count(partitions[0]):
                _add_count(found, shapes, state, partitions[0])
                continue
            offset = 0
            for name, shape in shapes.items():
                size = math.prod(shape)
                parts = list(_parts(partitions, offset, size))
                found.add_tensor(_key(name, state), shape, partitions[0].dtype, *parts)
                offset += size


def _add_stage_3(
    found: ForeignCheckpoint, groups: Sequence[ParameterShapes], ranks: Sequence[Mapping[str, Any]]
) -> None:
    shapes = {name: shape for group in groups for name, shape in group.items()}
    states = [rank["optimizer_state_dict"]["state"] for rank in ranks]
    numbers = sorted(states[0])
    tensors = {"": [rank["fp32_flat_groups"] for rank in ranks]}
    for state, first in (states[0][numbers[0]] if numbers else {}).items():
        if not _is_count(first):
            tensors[state] = [[of_rank[number][state] for number in numbers] for of_rank in states]
        elif len(numbers) == len(groups):
            for number, group in zip(numbers, groups, strict=True):
                _add_count(found, group, state, states[0][number][state])
        else:
            _add_count(found, shapes, state, first)
    for state, of_ranks in tensors.items():
        offset = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            partition_size = -(-size // len(of_ranks))
            parts: list[TensorPart] = []
            for rank, flats in enumerate(of_ranks):
                low, high = min(rank * partition_size, size), min((rank + 1) * partition_size, size)
                parts += _parts(flats, offset, high - low, first=low)
            found.add_tensor(_key(name, state), shape, of_ranks[0][0].dtype, *parts)
            offset += partition_size


def _parts(
    flats: Sequence[torch.Tensor], start: int, size: int, *, first: int = 0
) -> Iterator[TensorPart]:
    """Yield the parts of an interval of concatenated tensors.

    Args:
        start: first element of the interval in the concatenated tensors.
        size: number of elements.
        first: index of the first element in the parameter.
    """
    begin = 0
    for flat in flats:
        low, high = max(start, begin), min(start + size, begin + flat.numel())
        if low < high:
            position = first + low - start
            load = partial(torch.Tensor.detach, flat)
            yield part_of(load, position, position + high - low, offset=low - begin)
        begin += flat.numel()


def _key(name: str, state: str) -> str:
    return f"optim.state.{name}.{state}" if state else f"model.{name}"


def _is_count(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _add_count(found: ForeignCheckpoint, names: Iterable[str], state: str, value: Any) -> None:
    for name in names:
        found.scalar_state.setdefault(name, {})[state] = float(value)
