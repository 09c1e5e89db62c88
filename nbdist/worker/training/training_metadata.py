"""Saves and restores training metadata in a manifest: optimizers, schedulers and Trainers.

Only JSON values are saved; the names of all other values are reported.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbdist.checkpoint import OptimizerMetadata, ParamGroup
from nbdist.checkpoint.manifest import to_json_value
from nbdist.checkpoint.name_validation import printable
from nbdist.errors import CheckpointError
from nbdist.state import optimizer_recipes
from nbdist.state.optimizer_state_dict import class_name
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accelerate import Accelerator

    from nbdist.checkpoint import Manifest
    from nbdist.state.layouts.base import ScalarState
    from nbdist.worker.training.prepared_models import PreparedModel, PreparedOptimizer

_STARTS_AT_ONE = frozenset({"mu", "mu_product"})
"""Scalar state that is 1 before the first step; all other scalars are 0."""
_OMITTED = object()
_trainers: weakref.WeakKeyDictionary[Accelerator, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_uncounted: weakref.WeakKeyDictionary[Accelerator, int] = weakref.WeakKeyDictionary()
"""Steps of a Trainer's optimizer that its `global_step` does not contain, after its last step."""


# -- optimizers


def optimizer_metadata(
    prefix: str, prepared: PreparedModel, counts: ScalarState, left_out: list[str]
) -> list[OptimizerMetadata]:
    """Return the metadata of a model's optimizers, without tensors.

    Args:
        left_out: receives the names of options that are not JSON values.
    """
    saved = []
    for owned in prepared.live_optimizers:
        cls = owned.recipe.optimizer_class
        names = [name for group in owned.recipe.param_group_names for name in group]
        saved.append(
            OptimizerMetadata(
                prefix=prefix,
                kind=class_name(cls),
                defaults=to_json_mapping(owned.recipe.constructor_kwargs, cls.__name__, []),
                groups=tuple(
                    ParamGroup(
                        options=to_json_mapping(options, cls.__name__, left_out), names=group
                    )
                    for options, group in zip(
                        optimizer_recipes.group_options(owned.inner_optimizer),
                        owned.recipe.param_group_names,
                        strict=True,
                    )
                ),
                counts={name: counts[name] for name in names if name in counts},
            )
        )
    return saved


def check_optimizers(saved: Sequence[OptimizerMetadata], prepared_model: PreparedModel) -> None:
    """Check that saved optimizer state can be loaded into a model's optimizers.

    Raises:
        CheckpointError: the classes or the parameter groups differ.
    """
    expected = [optimizer.kind for optimizer in saved]
    prepared = [
        class_name(owned.recipe.optimizer_class) for owned in prepared_model.live_optimizers
    ]
    if expected != prepared:
        raise CheckpointError(
            f"The checkpoint has the state of {_kinds(expected)}, but {_kinds(prepared)} is"
            " prepared. Prepare the same optimizers, or load with --reset-optimizer"
            " (reset_optimizer=True)."
        )
    for optimizer, owned in zip(saved, prepared_model.live_optimizers, strict=True):
        group_options(optimizer, owned)


def group_options(saved: OptimizerMetadata, owned: PreparedOptimizer) -> list[dict[str, Any]]:
    """Return the saved options of each parameter group, looked up by parameter names.

    Raises:
        CheckpointError: a parameter has no saved options, or options within a group differ.
    """
    options_of = {name: group.options for group in saved.groups for name in group.names}
    result = []
    for number, names in enumerate(owned.recipe.param_group_names):
        unknown = [name for name in names if name not in options_of]
        if unknown:
            raise CheckpointError(
                f"{printable(unknown[0])} is in group {number} of the"
                f" {owned.recipe.optimizer_class.__name__}, but not in a group of the"
                " checkpoint. Use the same parameter groups, or load with --reset-optimizer"
                " (reset_optimizer=True)."
            )
        options = [dict(options_of[name]) for name in names]
        if any(other != options[0] for other in options):
            raise CheckpointError(
                f"The parameters of group {number} of the"
                f" {owned.recipe.optimizer_class.__name__} had different options when they"
                " were saved. Use the same parameter groups, or load with --reset-optimizer"
                " (reset_optimizer=True)."
            )
        result.append(options[0] if options else {})
    return result


def set_options(owned: PreparedOptimizer, new_options: Sequence[Mapping[str, Any]]) -> None:
    """Set the options of an optimizer's groups, keeping the types of the current values."""
    for group, options in zip(owned.inner_optimizer.param_groups, new_options, strict=True):
        for name, value in options.items():
            before = group.get(name)
            if name == "params":
                continue
            if isinstance(before, torch.Tensor):
                before.fill_(value)
            else:
                group[name] = _merged(before, value)


def initial_scalar_state(names: Mapping[str, Mapping[str, float]]) -> ScalarState:
    """Return the scalar state before the first step."""
    return {
        name: {key: float(key in _STARTS_AT_ONE) for key in scalars}
        for name, scalars in names.items()
    }


def _kinds(names: Sequence[str], none: str = "no optimizer") -> str:
    return " and ".join(printable(name.rpartition(".")[2])[1:-1] for name in names) or none


# -- schedulers


def scheduler_states(prepared: PreparedModel, left_out: list[str]) -> list[dict[str, Any]]:
    """Return the state of a model's schedulers.

    Args:
        left_out: receives the names of values that are not JSON values, such as functions.
    """
    return [
        {
            "kind": class_name(type(wrapper.scheduler)),
            "state": to_json_mapping(
                wrapper.scheduler.state_dict(), type(wrapper.scheduler).__name__, left_out
            ),
        }
        for wrapper in prepared.live_schedulers
    ]


def check_schedulers(saved: Sequence[Any], prepared_model: PreparedModel) -> None:
    """Check that saved scheduler state can be loaded into a model's schedulers.

    Raises:
        CheckpointError: the classes differ.
    """
    valid = all(
        isinstance(item, dict)
        and isinstance(item.get("kind"), str)
        and isinstance(item.get("state"), dict)
        for item in saved
    )
    expected = [item["kind"] for item in saved] if valid else ["?"]
    prepared = [class_name(type(wrapper.scheduler)) for wrapper in prepared_model.live_schedulers]
    if expected != prepared:
        before, after = (_kinds(names, "no scheduler") for names in (expected, prepared))
        raise CheckpointError(
            f"The checkpoint has the state of {before}, but {after} is prepared. Prepare the same"
            " schedulers, or load with --weights-only (weights_only=True)."
        )


def set_scheduler(scheduler: Any, state: Mapping[str, Any], *, rates: bool = False) -> None:
    """Set a scheduler's state; values that were not saved are kept.

    Args:
        rates: set the learning rates of the optimizer's groups to the scheduler's last ones.
    """
    scheduler.load_state_dict(_merged(scheduler.state_dict(), state))
    if rates:
        last = getattr(scheduler, "_last_lr", ())
        for group, rate in zip(scheduler.optimizer.param_groups, last, strict=False):
            before = group["lr"]
            group["lr"] = before.fill_(rate) if isinstance(before, torch.Tensor) else rate


# -- Trainers, which do not prepare their scheduler and count steps by themselves


def register_trainer(trainer: Any) -> None:
    """Register a Trainer whose `train()` is called, by its Accelerator."""
    _trainers[trainer.accelerator] = weakref.ref(trainer)


def update_step_counts(optimizer: Any, global_step: int) -> None:
    """Compare a prepared optimizer's steps with its Trainer's, and count those before a resume."""
    for prepared in prepared_models.all_models():
        accelerator = prepared.accelerator()
        if accelerator and any(each.wrapper() is optimizer for each in prepared.optimizers):
            prepared.num_steps = max(prepared.num_steps, global_step)
            _uncounted[accelerator] = prepared.num_steps - global_step


def trainer_state_of(prepared: PreparedModel, left_out: list[str]) -> dict[str, Any] | None:
    """Return the state of the Trainer that trains a model; None if it has made no step.

    Args:
        left_out: receives the names of values that cannot be saved.
    """
    accelerator = prepared.accelerator()
    reference = None if accelerator is None else _trainers.get(accelerator)
    trainer = None if reference is None else reference()
    if trainer is None or not trainer.state.global_step:
        return None
    from transformers.trainer_callback import ExportableState

    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    exported = [each for each in callbacks if isinstance(each, ExportableState)]
    state = dataclasses.replace(trainer.state, stateful_callbacks=exported)
    before = _uncounted.get(trainer.accelerator, 0)
    # Stopped or saved between the optimizer's step and the Trainer's own count.
    behind = int(prepared.num_steps - before > state.global_step)
    return {
        "variable": prepared_models.variable_of(trainer),
        # A loss may be NaN, which a manifest does not hold.
        "state": json.dumps(
            dataclasses.asdict(state) | {"global_step": state.global_step + behind}
        ),
        "scheduler": to_json_mapping(trainer.lr_scheduler.state_dict(), "lr_scheduler", left_out),
        "scheduler_steps": behind,
    }


def trainer_states(manifest: Manifest) -> dict[int, dict[str, Any]]:
    """Return the states of the Trainers in a checkpoint, by the number of the model."""
    models = manifest.extra.get("models")
    entries = models if isinstance(models, list) else []
    states = [entry.get("trainer") if isinstance(entry, dict) else None for entry in entries]
    return {
        number: state
        for number, state in enumerate(states)
        if isinstance(state, dict)  # anybody may have written a manifest
        and isinstance(state.get("state"), str)
        and isinstance(state.get("scheduler"), dict)
        and state.get("scheduler_steps") in (0, 1)
    }


def choose_trainer_state(
    manifest: Manifest, trainer: Any, location: object
) -> tuple[int, dict[str, Any]]:
    """Return the number of the model that a Trainer resumes, and the saved state.

    Raises:
        CheckpointError: the checkpoint has none, or several and none in the same variable.
    """
    states = trainer_states(manifest)
    if not states:
        raise CheckpointError(
            f"{location} was saved without the step of a Trainer. Resume from a checkpoint that was"
            " saved after a step of trainer.train()."
        )
    variable = prepared_models.variable_of(trainer)
    same = {number: state for number, state in states.items() if state.get("variable") == variable}
    chosen = states if len(states) == 1 else same if variable else {}
    if len(chosen) != 1:
        names = ", ".join(str(state.get("variable")) for state in states.values())
        raise CheckpointError(
            f"{location} has the state of {len(states)} Trainers, of the variables {names}. Assign"
            " this Trainer to its variable before train()."
        )
    return next(iter(chosen.items()))


def set_trainer_scheduler(trainer: Any, state: Mapping[str, Any]) -> None:
    """Set the Trainer's learning rate schedule to a saved state."""
    scheduler = trainer.lr_scheduler
    set_scheduler(scheduler, state["scheduler"])
    for _ in range(0 if isinstance(scheduler, ReduceLROnPlateau) else state["scheduler_steps"]):
        scheduler.step()


# -- JSON values


def to_json_mapping(value: Mapping[str, Any], where: str, left_out: list[str]) -> dict[str, Any]:
    """Return the part of a mapping that can be saved in a manifest.

    Args:
        where: name of their owner, for `left_out`.
        left_out: receives the names of all other values.
    """
    converted = _to_json_value(value, where, left_out)
    return converted if isinstance(converted, dict) else {}


def _to_json_value(value: Any, where: str, left_out: list[str]) -> Any:
    """Convert a value to JSON types; return `_OMITTED` if that is not possible."""
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    if is_scalar or isinstance(value, np.generic):
        value = value.item()
    elif type(value) is not bool and isinstance(value, (float, int)):
        value = float(value) if isinstance(value, float) else int(value)
    if isinstance(value, dict) and all(type(name) is str for name in value):
        inner = {
            name: _to_json_value(item, f"{where}.{name}", left_out) for name, item in value.items()
        }
        return {name: item for name, item in inner.items() if item is not _OMITTED}
    if isinstance(value, (list, tuple)):
        items = [_to_json_value(item, where, left_out) for item in value]
        return items if all(item is not _OMITTED for item in items) else _OMITTED
    try:
        to_json_value(value, where)
    except ValueError:
        left_out.append(where)
        return _OMITTED
    return value


def _merged(own: Any, saved: Any) -> Any:
    """Return a saved value with the types of the current one; values not saved are kept."""
    if isinstance(own, dict) and isinstance(saved, dict):
        return {**own, **{name: _merged(own.get(name), item) for name, item in saved.items()}}
    if isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)):
        same = len(own) == len(saved)
        items = [_merged(own[index] if same else None, item) for index, item in enumerate(saved)]
        return tuple(items) if isinstance(own, tuple) else items
    return saved
