"""Recovery of the prepared models after an interrupted cell; runs on a rank.

Engines hold the process group, which may be broken, and after an interrupted backward pass
their gradient buckets are partly filled. The engines are therefore rebuilt as in a switch, with
the same options: weights, optimizer state, schedules, random generators and loaders are kept.
Objects that a cell created on an old group (`new_group`, a device mesh, its own DDP) must be
created again by a cell.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch
from IPython import get_ipython

from nbdist.errors import SwitchError
from nbdist.protocol.operations import RankRebuildReport
from nbdist.state import collectives, layouts
from nbdist.state.layouts.base import is_deepspeed_engine, unwrap_compiled
from nbdist.worker import process_group
from nbdist.worker.debugger import release_error
from nbdist.worker.engines import accelerator_patch, fsdp
from nbdist.worker.operations.switch import EngineSwitch
from nbdist.worker.training import prepared_models, release_models

if TYPE_CHECKING:
    from nbdist.protocol.operations import RebuildRequest
    from nbdist.worker.operations import RankContext

STALE_REASON = (
    "This object was prepared before a cell ended within a step, by an error or Stop. Models and"
    " optimizers were rebuilt, and the variables that held them have the new ones: use those."
)


def rebuild_models(request: RebuildRequest, context: RankContext) -> RankRebuildReport:
    """Rebuild the engines, after the process groups if requested; a collective.

    Raises:
        SwitchError: the process group works but the models could not be rebuilt.
        RuntimeError: the process group does not work; nothing was changed.
    """
    start_time, report = time.monotonic(), RankRebuildReport()
    on_gpu = accelerator_patch.current_config().hardware.kind == "cuda"
    old_groups: list[Any] = []
    if request.groups:
        context.on_phase("recreating the process group")
        if context.barrier is not None:
            context.barrier.reset()
        old_groups = process_group.recreate_default_group(request.era, on_gpu=on_gpu)
    else:
        process_group.verify_group(on_gpu=on_gpu)
    try:
        models = prepared_models.all_models() if _have_same_models() else []
        must_be_rebuilt = request.groups
        for prepared in models:
            # An interrupted forward leaves FSDP with gathered weights only, which can be resharded.
            is_deepspeed = is_deepspeed_engine(unwrap_compiled(prepared.model))
            for cut, deepspeed in collectives.all_gather_values(
                (prepared.interrupted_pass, is_deepspeed)
            ):
                must_be_rebuilt |= cut == "backward" or bool(cut and deepspeed)
        if models and must_be_rebuilt:
            report.bound = _rebuild_engines(context)
        else:
            for prepared in models:
                fsdp.reset_iteration_state(prepared.model)
                layouts.layout_for(prepared.model)  # reshards the parameters
                prepared.interrupted_pass = ""
    finally:
        report.stale = [
            name for name, value in context.variables.items() if is_bound_to(value, old_groups)
        ]
        process_group.destroy_groups(old_groups)
    report.seconds = time.monotonic() - start_time
    return report


def _have_same_models() -> bool:
    """Return whether all ranks still have all models; a collective.

    A failed cell's frames may keep a model that other ranks have released. They are released.
    """
    numbers = collectives.all_gather_values(len(prepared_models.all_models()))
    if len(set(numbers)) > 1:
        release_error(get_ipython())
        release_models.release_unused_models()
        numbers = collectives.all_gather_values(len(prepared_models.all_models()))
    return len(set(numbers)) == 1


def _rebuild_engines(context: RankContext) -> list[str]:
    """Rebuild the engines; return the variables that were rebound."""
    release_models.release_unused_models()
    trained = prepared_models.all_models()
    steps = collectives.all_gather_values([prepared.num_steps for prepared in trained])
    if any(counts != steps[0] for counts in steps):
        described = ", ".join(
            f"rank {number}: {max(counts)}" for number, counts in enumerate(steps) if counts
        )
        raise SwitchError(
            f"The ranks were interrupted at different optimizer steps ({described}), so their"
            " weights are inconsistent. Load the last checkpoint."
        )
    was_cut = process_group.was_step_cut()
    for prepared in trained:
        prepared.has_cut_step |= was_cut
    if any(collectives.all_gather_values(any(prepared.has_cut_step for prepared in trained))):
        raise SwitchError(
            "The process groups were aborted while a GPU ran an optimizer step, so the weights may"
            " be wrong. Load the last checkpoint."
        )
    for prepared in trained:
        # Drop the gradients of the interrupted step.
        for parameter in prepared.model.parameters():
            parameter.grad = None
        prepared.num_pending_micro_batches = 0
    if not trained:
        return []
    options = accelerator_patch.current_config().options
    return EngineSwitch(options, context, reason=STALE_REASON).run().bound


def is_bound_to(value: object, groups: list[Any]) -> bool:
    """Return whether a value is one of these process groups or was created on one."""
    with contextlib.suppress(Exception):  # attribute access on an invalidated object raises
        group = value if isinstance(value, torch.distributed.ProcessGroup) else None
        group = group or getattr(value, "process_group", None)
        return group is not None and any(group is other for other in groups)
    return False
