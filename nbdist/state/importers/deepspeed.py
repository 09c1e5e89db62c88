"""Reader of DeepSpeed ZeRO checkpoints: flat partitions per rank, split by the stored shapes.

Source: deepspeed 0.9 to 0.19, `runtime/engine.py` (save_checkpoint) and `utils/zero_to_fp32.py`,
the public description of the layout. ZeRO-1 and 2: the parameters of a group are concatenated and
the result is partitioned over ranks. ZeRO-3: each parameter is partitioned separately, and a
rank's partitions of all groups are concatenated.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import CheckpointError
from nbdist.state.importers import safe_unpickler
from nbdist.state.importers.tensor_index import TensorPart
from nbdist.state.layouts.base import bare_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.state.importers.tensor_index import FetchElements, ForeignCheckpoint

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,100}")
_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_STATES = ("base_optimizer_state", "optimizer_state_dict")

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
        found: index to add to.
        folder: folder with DeepSpeed's files.
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
        found.aliases |= {
            bare_name(a): bare_name(b) for a, b in (first.get("shared_params") or {}).items()
        }
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
        _add_frozen(found, described)
        for name in first.get("buffer_names") or ():
            if name in first["module"]:
                found.add_whole_tensor(f"model.{bare_name(name)}", first["module"][name])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        message = (
            f"{folder} was not written by DeepSpeed or is corrupt ({type(error).__name__}:"
            f" {str(error)[:80]}). Load another checkpoint."
        )
        raise CheckpointError(message) from error


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
        message = (
            f"{folder} lacks files of ranks (found {len(files)}: {sorted(files)}). DeepSpeed"
            " writes one per rank; tensor and pipeline parallelism are not supported."
        )
        raise CheckpointError(message)
    return [files[rank] for rank in range(len(files))]


# -- ZeRO-1 and ZeRO-2


def _add_stage_2(
    found: ForeignCheckpoint, groups: Sequence[ParameterShapes], ranks: Sequence[Mapping[str, Any]]
) -> None:
    masters = [rank["single_partition_of_fp32_groups"] for rank in ranks]
    states = [rank["base_optimizer_state"]["state"] for rank in ranks]
    if any(rank_states.keys() != states[0].keys() for rank_states in states):
        message = (
            "The ranks of this DeepSpeed checkpoint have different optimizer states. Load another"
            " checkpoint."
        )
        raise CheckpointError(message)
    for number, shapes in enumerate(groups):
        _add_flat(found, shapes, [partitions[number] for partitions in masters], "")
        for state in states[0].get(number, {}):
            of_ranks = [rank_states[number][state] for rank_states in states]
            if _is_count(of_ranks[0]):
                _count(found, shapes, state, of_ranks[0])
            else:
                _add_flat(found, shapes, of_ranks, state)


def _add_flat(
    found: ForeignCheckpoint, shapes: ParameterShapes, of_ranks: Sequence[torch.Tensor], state: str
) -> None:
    """Add parameters that are concatenated in a flat tensor partitioned over the ranks."""
    flats = [partition.detach().reshape(-1) for partition in of_ranks]
    offset = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        parts, begin = [], 0
        for flat in flats:
            end = begin + flat.numel()
            low, high = max(offset, begin), min(offset + size, end)
            if low < high:
                parts.append(
                    TensorPart(
                        low - offset,
                        high - offset,
                        _view(flat[low - begin : high - begin], low - offset),
                    )
                )
            begin = end
        found.add_tensor(_key(name, state), shape, flats[0].dtype, *parts)
        offset += size


# -- ZeRO-3


def _add_stage_3(
    found: ForeignCheckpoint, groups: Sequence[ParameterShapes], ranks: Sequence[Mapping[str, Any]]
) -> None:
    shapes = {name: shape for group in groups for name, shape in group.items()}
    _add_cut(found, shapes, [_joined(rank["fp32_flat_groups"]) for rank in ranks], "")
    states = [rank["optimizer_state_dict"]["state"] for rank in ranks]
    numbers = sorted(states[0])
    for state in states[0][numbers[0]] if numbers else ():
        first = states[0][numbers[0]][state]
        if not _is_count(first):
            flats = [
                _joined([rank_states[number][state] for number in numbers])
                for rank_states in states
            ]
            _add_cut(found, shapes, flats, state)
        elif len(numbers) == len(groups):
            for number, group in zip(numbers, groups, strict=True):
                _count(found, group, state, states[0][number][state])
        else:
            _count(found, shapes, state, first)


def _joined(flats: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [flat.detach().reshape(-1) for flat in flats]


def _add_cut(
    found: ForeignCheckpoint,
    shapes: ParameterShapes,
    of_ranks: Sequence[list[torch.Tensor]],
    state: str,
) -> None:
    """Add parameters that are partitioned evenly one by one; a rank's parts are concatenated."""
    offset = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        partition_size = -(-size // len(of_ranks))
        parts = []
        for rank, flats in enumerate(of_ranks):
            low, high = min(rank * partition_size, size), min((rank + 1) * partition_size, size)
            parts += [
                TensorPart(low + begin, low + end, _view(view, low + begin))
                for begin, end, view in _within(flats, offset, high - low)
            ]
        found.add_tensor(_key(name, state), shape, of_ranks[0][0].dtype, *parts)
        offset += partition_size


def _within(
    flats: Sequence[torch.Tensor], at: int, size: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the parts of an interval of concatenated tensors: start, stop and view."""
    begin = 0
    for flat in flats:
        low, high = max(at, begin), min(at + size, begin + flat.numel())
        if low < high:
            yield low - at, high - at, flat[low - begin : high - begin]
        begin += flat.numel()


# -- all stages


def _add_frozen(found: ForeignCheckpoint, described: Sequence[Mapping[str, Any]]) -> None:
    """Add frozen parameters: whole, or with ZeRO-3 a part per rank."""
    for name, shape in (described[0].get("frozen_param_shapes") or {}).items():
        fragments = [
            rank_file["frozen_param_fragments"][name].reshape(-1) for rank_file in described
        ]
        size, low, parts = math.prod(shape), 0, []
        for fragment in fragments:
            high = min(low + fragment.numel(), size)
            if low < high:
                parts.append(TensorPart(low, high, _view(fragment[: high - low], low)))
            low = high
        found.add_tensor(f"model.{bare_name(name)}", tuple(shape), fragments[0].dtype, *parts)


def _view(view: torch.Tensor, first: int) -> FetchElements:
    return lambda start, stop: view[start - first : stop - first]


def _key(name: str, state: str) -> str:
    return f"optim.state.{name}.{state}" if state else f"model.{name}"


def _is_count(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _count(found: ForeignCheckpoint, names: Iterable[str], state: str, value: Any) -> None:
    for name in names:
        found.scalar_state.setdefault(name, {})[state] = float(value)
