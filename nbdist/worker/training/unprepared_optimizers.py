"""Detects optimizers without `accelerator.prepare()` that do not do what the cell seems to do.

A cell of plain PyTorch trains a model of its own on each rank, without an error. Under FSDP2 an
optimizer that was built before `prepare(model)` steps parameters that the model no longer has.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nbdist.errors import OptionError
from nbdist.worker import process_group
from nbdist.worker.engines import fsdp
from nbdist.worker.optimizer_step_gate import optimizer_step_gate
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from collections.abc import Mapping

SEPARATE_TRAINING = (
    "nbdist: each rank trains a model of its own in this cell, because the gradients are not"
    " averaged. To train one model on all ranks, pass model, optimizer and dataloader to"
    " accelerator.prepare(), or wrap the model in DistributedDataParallel.\n"
)

_collectives_at_step: dict[int, int] = {}
"""Id of an optimizer -> number of collectives of this rank at its last step in this cell."""
_trains_separately = False
_is_noted = False


def watch_steps() -> None:
    """Watch the steps of all torch optimizers of this process; call it once."""
    register_optimizer_step_pre_hook(_before_step)


def begin_cell() -> None:
    """Reset the state at the start of a cell."""
    global _trains_separately  # noqa: PLW0603 - a rank runs one cell at a time
    _collectives_at_step.clear()
    _trains_separately = False


def note_separate_training() -> str:
    """Return a note if ranks have stepped in this cell without communication; once per rank."""
    global _is_noted  # noqa: PLW0603
    if _is_noted or not _trains_separately:
        return ""
    _is_noted = True
    return SEPARATE_TRAINING


def names_in(variables: Mapping[str, Any]) -> list[str]:
    """Return the names of variables with an unprepared optimizer of a prepared model."""
    models = prepared_models.all_models()
    trained = {id(parameter) for each in models for parameter in each.model.parameters()}
    known = {id(owned.user_optimizer()) for each in models for owned in each.live_optimizers}
    return [
        name
        for name, value in variables.items()
        # isinstance() would read `__class__`, which an object of the user may compute.
        if issubclass(type(value), Optimizer)
        and not issubclass(type(value), AcceleratedOptimizer)
        and id(value) not in known
        and any(id(each) in trained for group in value.param_groups for each in group["params"])
    ]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    global _trains_separately  # noqa: PLW0603
    if optimizer_step_gate.num_steps_begun:  # a prepared optimizer, which may skip averaging
        return
    earlier = _collectives_at_step.get(id(optimizer))
    if earlier is None:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        if any(each in fsdp.shard_of_original for each in parameters):
            raise OptionError(
                "The optimizer was built before accelerator.prepare(model), which replaces the"
                " parameters under fsdp2, so its steps would not train the model. Use model,"
                " optimizer = accelerator.prepare(model, optimizer)."
            )
    _collectives_at_step[id(optimizer)] = count = _count_collectives()
    _trains_separately |= earlier == count


def _count_collectives() -> int:
    """Return the number of collectives that this rank has called, including those of DDP."""
    count = 0
    for group in process_group.known_groups():
        for device in group._device_types:  # noqa: SLF001 - torch 2.13 has no public name
            with contextlib.suppress(RuntimeError):  # a backend without numbers
                backend: Any = group._get_backend(device)  # noqa: SLF001
                count += backend._get_sequence_number_for_group()  # noqa: SLF001
    return count
