"""Loading of checkpoints from other tools into a prepared model; runs on a rank.

    checking     match the checkpoint's tensors and shapes with the model's
    keeping      copy this rank's shards to host memory
    loading      each rank reads its own shards in place
    taking over  the engine updates what it derives from them

If loading fails, the state is restored from the copy.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint.names import printable
from nbdist.errors import CheckpointError
from nbdist.state import hf_export_plan, importers, shards
from nbdist.state.shards import Shard
from nbdist.worker.operations.transaction import CHECKING_PHASE, Transaction
from nbdist.worker.training import prepared_models
from nbdist.worker.training.model_state import ModelState, ModelTensors, select_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.state.importers import ForeignCheckpoint, RenamedTensors
    from nbdist.worker.training.prepared_models import PreparedModel

_LISTED = 10


@dataclass(slots=True, kw_only=True)
class RankImportReport:
    """Result of an import on this rank."""

    kind: str = ""
    tensors: int = 0
    read_bytes: int = 0
    """Bytes that this rank read."""
    steps: float | None = None
    """Optimizer steps taken; None if the optimizer state was not loaded."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


def load(
    path: str,
    *,
    names: Mapping[str, Any],
    on_phase: Callable[[str], None],
    trust: bool = False,
    model: str | None = None,
) -> RankImportReport:
    """Load a checkpoint that another tool wrote; a collective.

    Args:
        path: absolute path of a folder or a file.
        names: the user's variables.
        on_phase: called with the name of each phase.
        trust: allow code in the checkpoint to run.
        model: name of the variable with the model; None selects the only prepared model.

    Raises:
        CheckpointError: the load failed; raised on all ranks, and the state is unchanged.
    """
    began, report = time.perf_counter(), RankImportReport()
    phase = Transaction("Load", on_phase, CheckpointError)
    with phase(CHECKING_PHASE):
        prepared = select_model(model, names)
        groups = [
            group for owned in prepared.live_optimizers for group in owned.recipe.param_group_names
        ]
        saved = importers.open_checkpoint(
            Path(path), trust=trust, names=_names(prepared), groups=groups
        )
        number = prepared_models.all_models().index(prepared)
        carried = ModelState(number, prepared)
        stem = str(number + 1) if number else ""
        _rename(saved, prepared.meta.aliases)
        keys = _matched(saved, carried, stem, prepared.meta.aliases, report)
        states = _states(saved, stem)
    with phase("keeping"):
        counts, live = carried.scalar_state(), carried.owned_shards()
        copies = shards.copy_to_host(live)
        buffers = {key: value.detach().clone() for key, value in carried.buffers().items()}
    try:
        with phase("loading"):
            carried.allocate_optimizer_state(states)
        with phase("loading"):
            report.read_bytes = _fill(saved, carried, keys, states)
        with phase("taking over"):
            carried.finalize_state(saved.scalar_state if states else counts)
    except CheckpointError:
        carried.load_from(copies, counts)
        for key, value in carried.buffers().items():
            value.copy_(buffers[key])
        raise
    finally:
        copies.clear()
        shards.give_back()
    steps = [value.get("step", 0.0) for value in saved.scalar_state.values()]
    report.steps = max(steps, default=0.0) if states else None
    report.kind, report.tensors = saved.kind, len(keys) + len(states)
    report.notes += saved.notes
    if not states and prepared.live_optimizers:
        report.notes.append("weights only: the optimizer state is unchanged")
    report.seconds = time.perf_counter() - began
    return report


def _rename(found: ForeignCheckpoint, aliases: Mapping[str, str]) -> None:
    """Rename the optimizer state of tied parameters to their first name."""
    for key in [key for key in found.keys if key.startswith("optim.state.")]:
        parameter, _, state = key.removeprefix("optim.state.").rpartition(".")
        renamed = f"optim.state.{aliases.get(parameter, parameter)}.{state}"
        if renamed not in found.keys:
            found.keys[renamed] = found.keys.pop(key)
            found.parts[renamed] = found.parts.pop(key)
    for parameter in [alias for alias in found.scalar_state if alias in aliases]:
        counts = found.scalar_state.pop(parameter)
        found.scalar_state.setdefault(aliases[parameter], counts)


def _names(prepared: PreparedModel) -> RenamedTensors:
    """Map tensor names in the model's files to keys, except for computed tensors."""
    living = ModelTensors(prepared)
    model = living.to_meta()
    try:
        outline = hf_export_plan.plan_export(model, living.parameter_keys(), None)
    except CheckpointError:
        return {}
    whole = {key: living.owned_shards[key].shape for key in living.dtypes}
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
    found: ForeignCheckpoint,
    model_state: ModelState,
    stem: str,
    aliases: Mapping[str, str],
    report: RankImportReport,
) -> dict[str, str]:
    """Match each tensor of the model with its key in the checkpoint.

    Raises:
        CheckpointError: tensors are missing or have another shape. The message lists them.
    """
    weights = model_state.target_shards(optimizers=False)
    buffers = model_state.target_buffers()
    aliases_of: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        aliases_of.setdefault(first, []).append(alias)
    keys: dict[str, str] = {}
    missing = []
    for key in [*weights, *buffers]:
        expected = "model." + key.removeprefix(f"model{stem}.")
        options = [
            expected,
            *(f"model.{name}" for name in aliases_of.get(expected.removeprefix("model."), ())),
        ]
        stored = next((option for option in options if option in found.keys), None)
        if stored is not None:
            keys[key] = stored
        elif key in weights:
            missing.append(expected)
        else:
            report.notes.append(
                f"unchanged, not in the checkpoint: buffer {expected.removeprefix('model.')}"
            )
    if missing:
        message = (
            f"The checkpoint ({found.kind}) lacks {len(missing)} of {len(weights)} tensors:"
            f" {_list(missing)}. Load it into the model that it was saved from."
        )
        raise CheckpointError(message)
    _check_shapes(found, {**weights, **buffers}, keys)
    _check_states(found)
    expected_keys = {
        *keys.values(),
        *(f"model.{name}" for tied in aliases_of.values() for name in tied),
    }
    extra = [key for key in found.keys if key.startswith("model.") and key not in expected_keys]
    if extra:
        report.notes.append(
            f"{len(extra)} tensors of the checkpoint are not in the model: {_list(extra)}"
        )
    return keys


def _check_shapes(
    found: ForeignCheckpoint, wanted: Mapping[str, Shard], keys: Mapping[str, str]
) -> None:
    wrong = [
        f"{printable(stored)} {tuple(wanted[key].shape)} (saved {found.keys[stored].shape})"
        for key, stored in keys.items()
        if tuple(wanted[key].shape) != tuple(found.keys[stored].shape)
    ]
    if wrong:
        more = ", ..." if len(wrong) > _LISTED else ""
        message = (
            f"{len(wrong)} of {len(keys)} tensors have a different shape:"
            f" {', '.join(wrong[:_LISTED])}{more}. Load it into the model that it was saved from."
        )
        raise CheckpointError(message)


def _check_states(found: ForeignCheckpoint) -> None:
    """Raise if optimizer state is not element-wise."""
    for key, entry in found.keys.items():
        if key.startswith("optim.state."):
            weight_key = "model." + key.removeprefix("optim.state.").rpartition(".")[0]
            if weight_key in found.keys and math.prod(found.keys[weight_key].shape) != math.prod(
                entry.shape
            ):
                message = (
                    f"{printable(key)} has shape {entry.shape} and is not element-wise. Only"
                    " the state of element-wise optimizers such as AdamW and SGD can be loaded."
                )
                raise CheckpointError(message)


def _states(found: ForeignCheckpoint, stem: str) -> dict[str, Shard]:
    """Describe the checkpoint's optimizer state by nbdist's keys: shapes and dtypes, no pieces."""
    return {
        f"optim{stem}." + key.removeprefix("optim."): Shard(shape=entry.shape, dtype=entry.dtype)
        for key, entry in found.keys.items()
        if key.startswith("optim.")
    }


def _fill(
    found: ForeignCheckpoint,
    model_state: ModelState,
    keys: Mapping[str, str],
    states: Mapping[str, Shard],
) -> int:
    """Read into the engine's tensors; optimizer state that was not saved is set to zero."""
    everything = model_state.target_shards(optimizers=bool(states)) | model_state.target_buffers()
    done = found.read_into({stored: everything[key] for key, stored in keys.items()})
    states_wanted = {
        "optim." + key.partition(".")[2]: shard
        for key, shard in everything.items()
        if key.startswith("optim")
    }
    for key, shard in states_wanted.items():
        if key not in found.keys:
            for piece in shard.pieces:
                piece.view.zero_()
    return done + found.read_into(
        {key: shard for key, shard in states_wanted.items() if key in found.keys}
    )


def _list(names: list[str]) -> str:
    more = ", ..." if len(names) > _LISTED else ""
    return ", ".join(printable(name) for name in names[:_LISTED]) + more
