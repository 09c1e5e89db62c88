"""A checkpoint that something else wrote, into a prepared model; runs on a rank.

checking    what is there, which of the model's tensors it has, of which shapes
loading     each rank reads what it holds, in place; a failure brings the old state back
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint.names import shown
from nbdist.errors import CheckpointError
from nbdist.state import hf_format, importers, shards
from nbdist.state.shards import Shard
from nbdist.worker.operations.transaction import CHECKING, Phases
from nbdist.worker.training import prepared_models
from nbdist.worker.training.model_state import Carried
from nbdist.worker.training.prepared_model_view import Living, chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.state.importers import Foreign, Names
    from nbdist.worker.training.prepared_models import Trained

_LISTED = 10


@dataclass(slots=True, kw_only=True)
class Report:
    """What was loaded."""

    kind: str = ""
    tensors: int = 0
    read_bytes: int = 0
    """By this rank."""
    steps: float | None = None
    """Of the optimizer; None where its state was not loaded."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


def load(
    path: str,
    *,
    names: Mapping[str, Any],
    tell: Callable[[str], None],
    trust: bool = False,
    model: str | None = None,
) -> Report:
    """Load it; a collective.

    Args:
        path: absolute, of a folder or a file.
        names: the user's variables.
        tell: told of each phase.
        trust: whether code in it may run.
        model: the variable that holds the model; None: the only prepared one.

    Raises:
        CheckpointError: on all ranks alike; all is as it was.
    """
    began, report = time.perf_counter(), Report()
    phase = Phases("the load", tell, CheckpointError)
    with phase(CHECKING):
        one = chosen(model, names)
        groups = [group for owned in one.living for group in owned.recipe.groups]
        found = importers.opened(Path(path), trust=trust, names=_names(one), groups=groups)
        number = prepared_models.everything().index(one)
        carried = Carried(number, one)
        stem = str(number + 1) if number else ""
        _rename(found, one.kept.aliases)
        keys = _matched(found, carried, stem, one.kept.aliases, report)
        states = _states(found, stem)
    with phase("keeping"):
        counts, live = carried.counts(), carried.share()
        kept = shards.snapshot(live)
        buffers = {key: value.detach().clone() for key, value in carried.buffers().items()}
    try:
        with phase("loading"):
            carried.allocate(states)
        with phase("loading"):
            report.read_bytes = _fill(found, carried, keys, states)
        with phase("taking over"):
            carried.settle(found.counts if states else counts)
    except CheckpointError:
        carried.take(kept, counts)
        for key, value in carried.buffers().items():
            value.copy_(buffers[key])
        raise
    finally:
        kept.clear()
        shards.give_back()
    steps = [value.get("step", 0.0) for value in found.counts.values()]
    report.steps = max(steps, default=0.0) if states else None
    report.kind, report.tensors = found.kind, len(keys) + len(states)
    report.notes += found.notes
    if not states and one.living:
        report.notes.append("weights only: the optimizer's state is as it was")
    report.seconds = time.perf_counter() - began
    return report


def _rename(found: Foreign, aliases: Mapping[str, str]) -> None:
    """Let the optimizer's state of a tied parameter bear its first name."""
    for key in [key for key in found.keys if key.startswith("optim.state.")]:
        parameter, _, state = key.removeprefix("optim.state.").rpartition(".")
        renamed = f"optim.state.{aliases.get(parameter, parameter)}.{state}"
        if renamed not in found.keys:
            found.keys[renamed] = found.keys.pop(key)
            found.parts[renamed] = found.parts.pop(key)
    for parameter in [one for one in found.counts if one in aliases]:
        counts = found.counts.pop(parameter)
        found.counts.setdefault(aliases[parameter], counts)


def _names(one: Trained) -> Names:
    """How the class of the model names tensors in files, those that are not computed."""
    living = Living(one)
    model = living.bare()
    try:
        outline = hf_format.outline(model, living.keys(), None)
    except CheckpointError:
        return {}
    whole = {key: living.share[key].shape for key in living.dtypes}
    prefix = next(iter(whole)).partition(".")[0]
    return {
        target.name: (
            "model." + target.key.removeprefix(prefix + "."),
            target.start,
            whole[target.key],
        )
        for target in outline.targets
        if target.key
    }


def _matched(
    found: Foreign, carried: Carried, stem: str, aliases: Mapping[str, str], report: Report
) -> dict[str, str]:
    """Each of the model's tensors -> its key in the checkpoint.

    Raises:
        CheckpointError: some are missing, or have another shape; says which.
    """
    weights = carried.wanted(optimizers=False)
    buffers = carried.wanted_buffers()
    others: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        others.setdefault(first, []).append(alias)
    keys: dict[str, str] = {}
    missing = []
    for key in [*weights, *buffers]:
        own = "model." + key.removeprefix(f"model{stem}.")
        options = [own, *(f"model.{name}" for name in others.get(own.removeprefix("model."), ()))]
        there = next((one for one in options if one in found.keys), None)
        if there is not None:
            keys[key] = there
        elif key in weights:
            missing.append(own)
        else:
            report.notes.append(f"left as it was: {own.removeprefix('model.')}, a buffer")
    if missing:
        message = (
            f"the checkpoint ({found.kind}) lacks {len(missing)} of {len(weights)} tensors:"
            f" {_list(missing)}; load it into the model that it is of."
        )
        raise CheckpointError(message)
    _check_shapes(found, {**weights, **buffers}, keys)
    _check_states(found)
    known = {*keys.values(), *(f"model.{name}" for some in others.values() for name in some)}
    extra = [key for key in found.keys if key.startswith("model.") and key not in known]
    if extra:
        report.notes.append(f"no place for {len(extra)} tensors of it: {_list(extra)}")
    return keys


def _check_shapes(found: Foreign, wanted: Mapping[str, Shard], keys: Mapping[str, str]) -> None:
    wrong = [
        f"{shown(there)} {tuple(wanted[key].shape)} (saved {found.keys[there].shape})"
        for key, there in keys.items()
        if tuple(wanted[key].shape) != tuple(found.keys[there].shape)
    ]
    if wrong:
        more = ", ..." if len(wrong) > _LISTED else ""
        message = (
            f"{len(wrong)} of {len(keys)} tensors have another shape:"
            f" {', '.join(wrong[:_LISTED])}{more}; load it into the model that it is of."
        )
        raise CheckpointError(message)


def _check_states(found: Foreign) -> None:
    """State of the optimizer is one number for each weight."""
    for key, entry in found.keys.items():
        if key.startswith("optim.state."):
            own = "model." + key.removeprefix("optim.state.").rpartition(".")[0]
            if own in found.keys and math.prod(found.keys[own].shape) != math.prod(entry.shape):
                message = (
                    f"{shown(key)} has the shape {entry.shape}, not one number for each weight;"
                    " only optimizers such as AdamW and SGD are loaded."
                )
                raise CheckpointError(message)


def _states(found: Foreign, stem: str) -> dict[str, Shard]:
    """State of the optimizer that the checkpoint has, by our keys, without elements."""
    return {
        f"optim{stem}." + key.removeprefix("optim."): Shard(shape=entry.shape, dtype=entry.dtype)
        for key, entry in found.keys.items()
        if key.startswith("optim.")
    }


def _fill(
    found: Foreign, carried: Carried, keys: Mapping[str, str], states: Mapping[str, Shard]
) -> int:
    """Read into what the engine holds; state of what was never stepped becomes zero."""
    everything = carried.wanted(optimizers=bool(states)) | carried.wanted_buffers()
    done = found.read({there: everything[key] for key, there in keys.items()})
    wanted = {
        "optim." + key.partition(".")[2]: shard
        for key, shard in everything.items()
        if key.startswith("optim")
    }
    for key, shard in wanted.items():
        if key not in found.keys:
            for piece in shard.pieces:
                piece.view.zero_()
    return done + found.read({key: one for key, one in wanted.items() if key in found.keys})


def _list(names: list[str]) -> str:
    more = ", ..." if len(names) > _LISTED else ""
    return ", ".join(shown(one) for one in names[:_LISTED]) + more
