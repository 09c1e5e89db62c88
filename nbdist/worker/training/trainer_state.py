"""State of a transformers Trainer in a checkpoint: its step, its logs, its schedule and callbacks.

A Trainer does not give its scheduler to `accelerator.prepare()`, and counts steps by itself.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from typing import TYPE_CHECKING, Any

from nbdist.worker.training import training_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelerate import Accelerator

    from nbdist.checkpoint import Manifest

_trainers: weakref.WeakKeyDictionary[Accelerator, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def register_trainer(trainer: Any) -> None:
    """Register a Trainer whose `train()` is called, by its Accelerator."""
    _trainers[trainer.accelerator] = weakref.ref(trainer)


def state_of(accelerator: Accelerator | None, left_out: list[str]) -> dict[str, Any] | None:
    """Return the state of the Trainer that uses an Accelerator; None if it has made no step.

    Args:
        left_out: receives the names of values that cannot be saved.
    """
    reference = None if accelerator is None else _trainers.get(accelerator)
    trainer = None if reference is None else reference()
    if trainer is None or not trainer.state.global_step:
        return None
    from transformers.trainer_callback import ExportableState

    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    exported = [each for each in callbacks if isinstance(each, ExportableState)]
    state = dataclasses.replace(trainer.state, stateful_callbacks=exported)
    return {
        # A loss may be NaN, which a manifest does not hold.
        "state": json.dumps(dataclasses.asdict(state)),
        "scheduler": training_metadata.to_json_mapping(
            trainer.lr_scheduler.state_dict(), "lr_scheduler", left_out
        ),
    }


def from_manifest(manifest: Manifest) -> dict[int, dict[str, Any]]:
    """Return the states of the Trainers in a checkpoint, by the number of the model."""
    models = manifest.extra.get("models")
    entries = models if isinstance(models, list) else []
    states = [entry.get("trainer") if isinstance(entry, dict) else None for entry in entries]
    return {number: state for number, state in enumerate(states) if isinstance(state, dict)}


def set_scheduler(trainer: Any, state: Mapping[str, Any]) -> None:
    """Set the Trainer's learning rate schedule to a saved state."""
    training_metadata.set_scheduler(trainer.lr_scheduler, state["scheduler"])
