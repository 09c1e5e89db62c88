"""State of a transformers Trainer in a checkpoint: its step, its logs, its schedule and callbacks.

A Trainer does not give its scheduler to `accelerator.prepare()`, and counts steps by itself.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from typing import TYPE_CHECKING, Any, TypeGuard

from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbdist.errors import CheckpointError
from nbdist.worker.training import prepared_models, training_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelerate import Accelerator

    from nbdist.checkpoint import Manifest
    from nbdist.worker.training.prepared_models import PreparedModel

_trainers: weakref.WeakKeyDictionary[Accelerator, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_uncounted: weakref.WeakKeyDictionary[Accelerator, int] = weakref.WeakKeyDictionary()
"""Steps of a Trainer's optimizer that its `global_step` does not contain, after its last step."""


def register_trainer(trainer: Any) -> None:
    """Register a Trainer whose `train()` is called, by its Accelerator."""
    _trainers[trainer.accelerator] = weakref.ref(trainer)


def compare_steps(optimizer: Any, global_step: int) -> None:
    """Compare the steps of a prepared optimizer with those of its Trainer, between two steps."""
    for prepared in prepared_models.all_models():
        accelerator = prepared.accelerator()
        if accelerator and any(each.wrapper() is optimizer for each in prepared.optimizers):
            _uncounted[accelerator] = prepared.num_steps - global_step


def state_of(prepared: PreparedModel, left_out: list[str]) -> dict[str, Any] | None:
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
        "scheduler": training_metadata.to_json_mapping(
            trainer.lr_scheduler.state_dict(), "lr_scheduler", left_out
        ),
        "scheduler_steps": behind,
    }


def from_manifest(manifest: Manifest) -> dict[int, dict[str, Any]]:
    """Return the states of the Trainers in a checkpoint, by the number of the model."""
    models = manifest.extra.get("models")
    entries = models if isinstance(models, list) else []
    states = [entry.get("trainer") if isinstance(entry, dict) else None for entry in entries]
    return {number: state for number, state in enumerate(states) if _is_valid(state)}


def _is_valid(state: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether an entry of a manifest, which anybody may have written, has the fields."""
    return (
        isinstance(state, dict)
        and isinstance(state.get("state"), str)
        and isinstance(state.get("scheduler"), dict)
        and state.get("scheduler_steps") in (0, 1)
    )


def choose_state(manifest: Manifest, trainer: Any, location: object) -> tuple[int, dict[str, Any]]:
    """Return the number of the model that a Trainer resumes, and the saved state.

    Raises:
        CheckpointError: the checkpoint has none, or several and none in the same variable.
    """
    states = from_manifest(manifest)
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


def set_scheduler(trainer: Any, state: Mapping[str, Any]) -> None:
    """Set the Trainer's learning rate schedule to a saved state."""
    scheduler = trainer.lr_scheduler
    training_metadata.set_scheduler(scheduler, state["scheduler"])
    for _ in range(0 if isinstance(scheduler, ReduceLROnPlateau) else state["scheduler_steps"]):
        scheduler.step()
