"""Loading of checkpoints from other tools into a prepared model; runs on a rank.

    checking     match the checkpoint's tensors and shapes with the model's
    keeping      copy this rank's shards to host memory
    loading      each rank reads its own shards in place
    taking over  the engine updates what it derives from them

If loading fails, the state is restored from the copy.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint.name_validation import list_first, printable
from nbdist.errors import CheckpointError
from nbdist.protocol.operations import RankImportReport
from nbdist.state import hf_export_plan, importers, optimizer_properties, reshard, shards
from nbdist.state.tensor_index import check_shapes
from nbdist.worker.operations.collective_phases import CHECKING_PHASE, CollectivePhases
from nbdist.worker.training.model_recipe import ModelRecipe
from nbdist.worker.training.training_state import ModelAndOptimizerState, ModelTensors, select_model

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nbdist.protocol.operations import ImportCheckpointRequest
    from nbdist.state.importers import ForeignCheckpoint, RenamedTensors
    from nbdist.worker.operations import RankContext
    from nbdist.worker.training.prepared_models import PreparedModel


def import_checkpoint(request: ImportCheckpointRequest, context: RankContext) -> RankImportReport:
    """Load a checkpoint that another tool wrote; a collective.

    Raises:
        CheckpointError: the load failed; raised on all ranks, and the state is unchanged.
    """
    start_time, report = time.perf_counter(), RankImportReport()
    phase = CollectivePhases("Load", context.on_phase, CheckpointError)
    with phase(CHECKING_PHASE):
        prepared = select_model(request.model, context.variables)
        groups = [
            group for owned in prepared.live_optimizers for group in owned.recipe.param_group_names
        ]
        names = _file_names(prepared)
        saved = importers.open_checkpoint(
            Path(request.path), trust=request.trust, names=names, groups=groups
        )
        if request.weights_only:
            for key in [key for key in saved.keys if key.startswith("optim.")]:
                del saved.keys[key]
        state = ModelAndOptimizerState(prepared)
        _rename_tied(saved, prepared.meta.aliases)
        # The files of a PEFT model have its adapters only.
        is_adapter = hf_export_plan.is_adapter_only(prepared.meta.model)
        required = {stored for stored, *_ in names.values()} if is_adapter and names else None
        if is_adapter:
            _check_adapter(Path(request.path) / "adapter_config.json", prepared.meta.model)
        keys = _match_keys(saved, state, prepared.meta.aliases, report.notes, required)
        optimizer_state = {
            f"{state.optimizer_prefix}." + key.removeprefix("optim."): entry.dtype
            for key, entry in saved.keys.items()
            if key.startswith("optim.")
        }
        for owned in prepared.live_optimizers if optimizer_state else ():
            if reason := optimizer_properties.why_not_reshardable(owned.inner_optimizer):
                raise CheckpointError(f"{reason}. Load with --weights-only (weights_only=True).")
    with phase("keeping"):
        counts = state.layout.scalar_state()
        backup = ModelRecipe.back_up(state, state.owned_shards(), counts)
    try:
        with phase("loading"):
            state.allocate_optimizer_state(optimizer_state)
        with phase("loading"):
            report.read_bytes = _read_into_engine(
                saved, state, keys, optimizers=bool(optimizer_state)
            )
        with phase("taking over"):
            state.layout.finalize_state(saved.scalar_state if optimizer_state else counts)
    except CheckpointError:
        backup.restore(state, optimizers=True)
        raise
    finally:
        backup.tensors.clear()
        shards.empty_pinned_cache()
    steps = [value.get("step", 0.0) for value in saved.scalar_state.values()]
    report.steps = max(steps, default=0.0) if optimizer_state else None
    report.kind, report.tensors = saved.kind, len(keys) + len(optimizer_state)
    report.notes += saved.notes
    if not optimizer_state and prepared.live_optimizers:
        report.notes.append("weights only: the optimizer state is unchanged")
    report.seconds = time.perf_counter() - start_time
    return report


def _rename_tied(saved: ForeignCheckpoint, aliases: Mapping[str, str]) -> None:
    for key in [key for key in saved.keys if key.startswith("optim.state.")]:
        parameter, _, state = key.removeprefix("optim.state.").rpartition(".")
        renamed = f"optim.state.{aliases.get(parameter, parameter)}.{state}"
        if renamed not in saved.keys:
            saved.keys[renamed] = saved.keys.pop(key)
            saved.parts[renamed] = saved.parts.pop(key)
    for parameter in [alias for alias in saved.scalar_state if alias in aliases]:
        counts = saved.scalar_state.pop(parameter)
        saved.scalar_state.setdefault(aliases[parameter], counts)


def _check_adapter(file: Path, model: Any) -> None:
    """Raise CheckpointError if an adapter has other settings than that of the prepared model."""
    try:
        saved = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {file}: {error}. Load another checkpoint.") from error
    config = model.peft_config[model.active_adapter]
    differing = [
        f"{name}={saved[name]!r} instead of {getattr(config, name)!r}"
        for name in ("r", "lora_alpha", "use_rslora", "use_dora", "bias")
        if name in saved and hasattr(config, name) and saved[name] != getattr(config, name)
    ]
    if differing:
        raise CheckpointError(
            f"The adapter in {file.parent} has {', '.join(differing)}. Create the model with"
            " PeftModel.from_pretrained(base, folder, is_trainable=True), or with these settings."
        )


def _file_names(prepared: PreparedModel) -> RenamedTensors:
    """Map tensor names in the model's files to keys, except for computed tensors."""
    model_tensors = ModelTensors(prepared)
    model = model_tensors.to_meta()
    try:
        outline = hf_export_plan.plan_export(model, model_tensors.parameter_keys(), None)
    except CheckpointError:
        return {}
    whole = {key: model_tensors.owned_shards[key].shape for key in model_tensors.dtypes}
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


def _match_keys(
    saved: ForeignCheckpoint,
    state: ModelAndOptimizerState,
    aliases: Mapping[str, str],
    notes: list[str],
    required: Collection[str] | None,
) -> dict[str, str]:
    """Match each tensor of the model with its key in the checkpoint.

    Args:
        required: keys that the checkpoint must have; None for all weights.

    Raises:
        CheckpointError: tensors are missing or have another shape, or optimizer state is not
            element-wise. The message lists them.
    """
    weights, buffers = state.target_shards(optimizers=False), state.buffers(owned=False)
    aliases_of: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        aliases_of.setdefault(first, []).append(alias)
    keys: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    unchanged = []
    for key, shard in {**weights, **buffers}.items():
        name = key.removeprefix(state.model_prefix)
        options = [f"model.{option}" for option in (name, *aliases_of.get(name, ()))]
        stored = next((option for option in options if option in saved.keys), None)
        if stored is not None:
            keys[key] = stored
            shapes[stored] = shard.shape
        elif key in weights and (required is None or f"model.{name}" in required):
            shapes[f"model.{name}"] = shard.shape
        else:
            unchanged.append(f"buffer {name}" if key in buffers else name)
    check_shapes(shapes, {key: entry.shape for key, entry in saved.keys.items()})
    if unchanged:
        notes.append(
            f"{len(unchanged)} tensors are unchanged, not in the checkpoint:"
            f" {list_first(map(printable, unchanged))}"
        )
    _check_optimizer_shapes(saved)
    tied = {f"model.{name}" for names in aliases_of.values() for name in names}
    used = {*keys.values(), *tied}
    extra = [key for key in saved.keys if key.startswith("model.") and key not in used]
    if extra:
        notes.append(
            f"{len(extra)} tensors of the checkpoint are not in the model:"
            f" {list_first(map(printable, extra))}"
        )
    return keys


def _check_optimizer_shapes(saved: ForeignCheckpoint) -> None:
    for key, entry in saved.keys.items():
        if not key.startswith("optim.state."):
            continue
        weight = saved.keys.get("model." + key.removeprefix("optim.state.").rpartition(".")[0])
        if weight is not None and math.prod(weight.shape) != math.prod(entry.shape):
            raise CheckpointError(
                f"{printable(key)} has shape {entry.shape} and is not element-wise. Only"
                " the state of element-wise optimizers such as AdamW and SGD can be loaded."
            )


def _read_into_engine(
    saved: ForeignCheckpoint,
    state: ModelAndOptimizerState,
    keys: Mapping[str, str],
    *,
    optimizers: bool,
) -> int:
    """Read into the engine's tensors; optimizer state that was not saved is set to zero."""
    targets = state.target_shards(optimizers=optimizers) | state.buffers(owned=False)
    target_shards = {stored: targets[key] for key, stored in keys.items()}
    read_bytes = saved.read_into(target_shards)
    optimizer_state = {
        "optim." + key.partition(".")[2]: shard
        for key, shard in targets.items()
        if key.startswith("optim")
    }
    reshard.zero_unsaved(optimizer_state, saved.keys)
    return read_bytes + saved.read_into(optimizer_state)
