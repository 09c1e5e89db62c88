"""Folders of DeepSpeed's ZeRO: flat partitions of each rank, cut up by the shapes beside them.

deepspeed 0.9 to 0.19, `runtime/engine.py` (save_checkpoint) and `utils/zero_to_fp32.py`, which
is the public description of the layout. ZeRO-1 and 2: the parameters of a group follow each
other and the whole is cut over ranks. ZeRO-3: each parameter is cut by itself, a rank's parts
follow each other, of all groups together.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import CheckpointError
from nbdist.state.importers import safe_unpickler
from nbdist.state.importers.tensor_index import Part
from nbdist.state.layouts.base import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.state.importers.tensor_index import Fetch, Foreign

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,100}")
_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_STATES = ("base_optimizer_state", "optimizer_state_dict")

Shapes = dict[str, tuple[int, ...]]


def folder_of(path: Path) -> Path | None:
    """The folder with DeepSpeed's files in or at a path; None where there is none."""
    latest = path / "latest"
    if latest.is_file() and latest.stat().st_size < 200:  # noqa: PLR2004 - one name
        tag = latest.read_text(errors="replace").strip()
        if _TAG.fullmatch(tag) and (path / tag).is_dir():
            return path / tag
    if any(_OPTIM.fullmatch(one.name) for one in path.iterdir()):
        return path
    return None


def add(found: Foreign, folder: Path, *, trust: bool) -> None:
    """Note the tensors of a folder.

    Raises:
        CheckpointError: it is damaged, or holds code.
    """
    optim = _by_rank(folder, _OPTIM)
    models = _by_rank(folder, _MODEL)
    try:
        states = [safe_unpickler.torch_file(path, trust=trust) for path in optim]
        described = [safe_unpickler.torch_file(path, trust=trust) for path in models]
        first = described[0]
        found.aliases |= {plain(a): plain(b) for a, b in (first.get("shared_params") or {}).items()}
        ranks = [one["optimizer_state_dict"] for one in states]
        groups = [
            {plain(name): tuple(map(int, shape)) for name, shape in group.items()}
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
                found.add_whole(f"model.{plain(name)}", first["module"][name])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        message = (
            f"{folder} is not what DeepSpeed writes ({type(error).__name__}:"
            f" {str(error)[:80]}); take another checkpoint."
        )
        raise CheckpointError(message) from error


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Files of all ranks, in their order.

    Raises:
        CheckpointError: some are missing, or the model was cut in other ways too.
    """
    found = {
        int(match[1] or 0): path
        for path in folder.iterdir()
        if (match := pattern.fullmatch(path.name))
    }
    if not found or sorted(found) != list(range(len(found))):
        message = (
            f"{folder} lacks files of ranks ({len(found)} are there: {sorted(found)}); DeepSpeed"
            " writes one for each; tensor and pipeline parallelism are not read."
        )
        raise CheckpointError(message)
    return [found[rank] for rank in range(len(found))]


# -- ZeRO-1 and ZeRO-2


def _add_stage_2(
    found: Foreign, groups: Sequence[Shapes], ranks: Sequence[Mapping[str, Any]]
) -> None:
    masters = [rank["single_partition_of_fp32_groups"] for rank in ranks]
    states = [rank["base_optimizer_state"]["state"] for rank in ranks]
    if any(one.keys() != states[0].keys() for one in states):
        message = "the ranks of this DeepSpeed checkpoint have different states; take another one."
        raise CheckpointError(message)
    for number, shapes in enumerate(groups):
        _add_flat(found, shapes, [one[number] for one in masters], "")
        for state in states[0].get(number, {}):
            of_ranks = [one[number][state] for one in states]
            if _is_count(of_ranks[0]):
                _count(found, shapes, state, of_ranks[0])
            else:
                _add_flat(found, shapes, of_ranks, state)


def _add_flat(found: Foreign, shapes: Shapes, of_ranks: Sequence[torch.Tensor], state: str) -> None:
    """Parameters follow each other in a flat tensor that is cut over the ranks."""
    flats = [one.detach().reshape(-1) for one in of_ranks]
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        parts, begin = [], 0
        for flat in flats:
            end = begin + flat.numel()
            low, high = max(at, begin), min(at + size, end)
            if low < high:
                parts.append(
                    Part(low - at, high - at, _view(flat[low - begin : high - begin], low - at))
                )
            begin = end
        found.add(_key(name, state), shape, flats[0].dtype, *parts)
        at += size


# -- ZeRO-3


def _add_stage_3(
    found: Foreign, groups: Sequence[Shapes], ranks: Sequence[Mapping[str, Any]]
) -> None:
    shapes = {name: shape for group in groups for name, shape in group.items()}
    _add_cut(found, shapes, [_joined(rank["fp32_flat_groups"]) for rank in ranks], "")
    states = [rank["optimizer_state_dict"]["state"] for rank in ranks]
    numbers = sorted(states[0])
    for state in states[0][numbers[0]] if numbers else ():
        first = states[0][numbers[0]][state]
        if not _is_count(first):
            flats = [_joined([one[number][state] for number in numbers]) for one in states]
            _add_cut(found, shapes, flats, state)
        elif len(numbers) == len(groups):
            for number, group in zip(numbers, groups, strict=True):
                _count(found, group, state, states[0][number][state])
        else:
            _count(found, shapes, state, first)


def _joined(flats: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [one.detach().reshape(-1) for one in flats]


def _add_cut(
    found: Foreign, shapes: Shapes, of_ranks: Sequence[list[torch.Tensor]], state: str
) -> None:
    """Each parameter is cut evenly; a rank's parts follow each other."""
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        each = -(-size // len(of_ranks))
        parts = []
        for rank, flats in enumerate(of_ranks):
            low, high = min(rank * each, size), min((rank + 1) * each, size)
            parts += [
                Part(low + begin, low + end, _view(view, low + begin))
                for begin, end, view in _within(flats, at, high - low)
            ]
        found.add(_key(name, state), shape, of_ranks[0][0].dtype, *parts)
        at += each


def _within(
    flats: Sequence[torch.Tensor], at: int, size: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The parts of an interval of tensors that follow each other."""
    begin = 0
    for flat in flats:
        low, high = max(at, begin), min(at + size, begin + flat.numel())
        if low < high:
            yield low - at, high - at, flat[low - begin : high - begin]
        begin += flat.numel()


# -- both


def _add_frozen(found: Foreign, described: Sequence[Mapping[str, Any]]) -> None:
    """Parameters that were not trained: whole, or under ZeRO-3 a part on each rank."""
    for name, shape in (described[0].get("frozen_param_shapes") or {}).items():
        fragments = [one["frozen_param_fragments"][name].reshape(-1) for one in described]
        size, at, parts = math.prod(shape), 0, []
        for fragment in fragments:
            high = min(at + fragment.numel(), size)
            if at < high:
                parts.append(Part(at, high, _view(fragment[: high - at], at)))
            at = high
        found.add(f"model.{plain(name)}", tuple(shape), fragments[0].dtype, *parts)


def _view(view: torch.Tensor, first: int) -> Fetch:
    return lambda start, stop: view[start - first : stop - first]


def _key(name: str, state: str) -> str:
    return f"optim.state.{name}.{state}" if state else f"model.{name}"


def _is_count(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _count(found: Foreign, names: Iterable[str], state: str, value: Any) -> None:
    for name in names:
        found.counts.setdefault(name, {})[state] = float(value)
