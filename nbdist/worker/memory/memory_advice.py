"""Checks whether a model fits into memory under other options, and advises when memory has run out.

``check_memory`` is called before a switch. If weights and optimizer state exceed the device memory,
the switch would fail, so it is rejected before anything changes. The peak of a step is only an
estimate: if it exceeds the device memory, the switch proceeds with a note.

``advice_for`` measures while the frames of the failed cell still hold their tensors; the function
it returns runs the planner after they are released. Nothing here waits for other ranks: this may
be the only one that failed.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import TYPE_CHECKING

import psutil
import torch
from torch import distributed

from nbdist.errors import NbdistError, PlanError, SwitchError
from nbdist.number_formatting import GIB, format_bytes, format_gib
from nbdist.planner import measured_comparison, optimizers, search
from nbdist.planner.plan_types import PlanInput
from nbdist.protocol import messages
from nbdist.worker.engines import auto_strategy
from nbdist.worker.engines.accelerator_patch import current_config
from nbdist.worker.memory import memory_probe, model_description

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.planner.memory.timeline import MemoryUsage
    from nbdist.planner.plan_types import PlanRow
    from nbdist.planner.result import Plan
    from nbdist.strategies import Hardware, Options
    from nbdist.worker.memory.memory_probe import MemoryProbe
    from nbdist.worker.training.prepared_models import PreparedModel

log = logging.getLogger(__name__)

_STATE = ("parameters", "master", "optimizer")
"""Parts that are always allocated; engines on a CPU never touch some of the buffers."""
_COMPARED = ("backend", "offload", "offload_params", "activation_checkpointing", "replicate_across")
"""Options that distinguish the rows of a plan."""
MAX_SUGGESTIONS = 3
"""Number of suggested configurations."""
_SMALL = GIB // 200
"""Bytes; a smaller part would be shown as 0.00."""
_OOM_MESSAGES = (
    "can't allocate memory",  # torch 2.13, c10/core/impl/alloc_cpu.cpp
    "not enough memory",  # the same on Windows
    "Cannot allocate memory",  # errno ENOMEM
    "out of memory",  # CUDA's own errors, and NCCL's
)
_UNITS = {
    "bytes": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgtpe", start=1)},
}
_REQUESTED_SIZE = re.compile(rf"\ballocate (\d+\.?\d*) ?({'|'.join(_UNITS)})\b", re.IGNORECASE)
"""Matches the messages of torch 2.13 for a CPU and a GPU, and of NumPy 2."""


def check_memory(
    prepared: PreparedModel, new_options: Options, hardware: Hardware, *, world_size: int
) -> list[str]:
    """Compare the planner's prediction for these options with this rank's device memory.

    Checks only models with an analytic spec or a cached trace, which takes milliseconds; a trace
    would take seconds, and a switch that runs out of memory is rolled back anyway.

    Returns:
        A note that a step may not fit, or an empty list.

    Raises:
        SwitchError: weights and optimizer state do not fit.
    """
    peak = _peak(prepared, new_options, hardware, world_size)
    if peak is None:
        return []
    free = auto_strategy.available_bytes()
    if hardware.kind == "cpu":  # the ranks share the host's memory
        free = free * distributed.get_world_size() // world_size
    resting = sum(peak.parts.get(name, 0) for name in _STATE)
    if resting > free:
        raise SwitchError(
            f"Not enough memory under {new_options.describe()}: a rank needs"
            f" {format_bytes(resting)} for weights and optimizer state, but its device has"
            f" {format_bytes(free)}. Run %nbdist plan to see what fits."
        )
    if peak.device_bytes > free:
        note = (
            f"a step under {new_options.describe()} is predicted to take"
            f" {format_bytes(peak.device_bytes)} on a rank, but its device has"
            f" {format_bytes(free)}: it may run out of memory; run %nbdist plan to see what fits"
        )
        return [note]
    return []


def _peak(
    prepared: PreparedModel, new_options: Options, hardware: Hardware, world_size: int
) -> MemoryUsage | None:
    """Return the predicted peak of a step; None if that would need a trace."""
    probe = memory_probe.current_probe.probe
    if probe is None or probe.meta_model is None or probe.prepared_model is not prepared.model:
        return None
    model = probe.meta_model
    samples, tokens = probe.batch_shape or (1, model_description.default_seq_len(model))
    micro_batch = measured_comparison.MeasuredMemory(
        kind=hardware.kind,
        step=0,
        batch_size=samples,
        seq_len=tokens,
        accumulate=probe.accumulate,
        keep_outputs=probe.keep_outputs,
        optimizer=probe.optimizer_description,
    )
    try:
        spec = model_description.describe_model(
            model,
            batch_size=samples,
            seq_len=tokens,
            call=probe.forward_inputs,
            kind=hardware.kind,
            quick=True,
        )
        return measured_comparison.predict_peak(
            spec, new_options, world_size, micro_batch, nodes=hardware.nodes
        )[0]
    except PlanError:  # the model needs a trace, or the optimizer is unknown to the planner
        return None


# -- after an out-of-memory error


def advice_for(error: BaseException | None) -> Callable[[], messages.OomAdvice] | None:
    """Return a function that makes the advice; None if it is not an out-of-memory error."""
    if not is_out_of_memory(error):
        return None
    return functools.partial(_advice, _memory_by_part(), requested_bytes(error))


def _advice(held_bytes: dict[str, int], requested: int | None) -> messages.OomAdvice:
    probe = memory_probe.current_probe.probe
    total = sum(held_bytes.values())
    largest_first = sorted(held_bytes.items(), key=lambda item: -item[1])
    words = ", ".join(
        f"{name} {format_gib(part)}" for name, part in largest_first if part >= _SMALL
    )
    lines = [f"out of memory; this rank held {format_gib(total, unit=True)}: {words}"]
    if requested is not None:
        lines.append(f"The failed allocation requested {format_bytes(requested)}.")
    if probe is not None and probe.meta_model is not None:
        lines += _fitting_configurations(probe, requested or 0)
    return messages.OomAdvice(lines=lines, held_bytes=total)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is an out-of-memory error."""
    return any(
        isinstance(link, (MemoryError, torch.OutOfMemoryError))
        or (
            isinstance(link, (RuntimeError, OSError))
            and any(text in str(link) for text in _OOM_MESSAGES)
        )
        for link in _chain(error)
    )


def is_out_of_host_memory(error: BaseException | None) -> bool:
    """Return whether the host ran out of memory, so that Python itself is affected."""
    return is_out_of_memory(error) and not any(
        isinstance(link, torch.OutOfMemoryError) for link in _chain(error)
    )


def requested_bytes(error: BaseException | None) -> int | None:
    """Return the bytes of the failed allocation; None if the message does not contain them."""
    for link in _chain(error):
        if match := _REQUESTED_SIZE.search(str(link)):
            return int(float(match[1]) * _UNITS[match[2].lower()])
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _memory_by_part() -> dict[str, int]:
    """Return bytes by part: at the peak of the GPU, or of this process's current memory."""
    probe = memory_probe.current_probe.probe
    model = probe.prepared_model if probe else None
    parts = (
        memory_probe.resting_bytes(model, probe.inner_optimizer)
        if probe is not None and model is not None
        else {}
    )
    if torch.cuda.is_initialized():
        peak_bytes = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    else:
        peak_bytes = psutil.Process().memory_info().rss
    named = {
        name: part for name, part in parts.items() if name in measured_comparison.DISTINCT_PARTS
    }
    rest = max(0, peak_bytes - sum(named.values()))
    return {
        **named,
        measured_comparison.REMAINING_PART
        if torch.cuda.is_initialized()
        else "everything else": rest,
    }


def _fitting_configurations(probe: MemoryProbe, requested: int) -> list[str]:
    """Return suggested configurations, or the reason why there are none.

    Args:
        requested: bytes of the failed allocation; 0 if unknown.
    """
    try:
        plan = _plan(probe)
    except (NbdistError, MemoryError, OSError) as error:
        return [f"Cannot suggest a configuration that fits: {error}"]
    except Exception as error:
        log.exception("planning after an out-of-memory error failed")
        return [f"Cannot suggest a configuration that fits ({type(error).__name__})."]
    # the row with the session's options
    options = current_config().options
    present = next(
        (
            row
            for row in plan.rows
            if all(getattr(row.options, name) == getattr(options, name) for name in _COMPARED)
        ),
        None,
    )
    free_bytes = plan.question.cluster.smallest_device.free_bytes
    if present is not None and present.fits:
        return [_other_memory_advice(present, free_bytes, requested)]
    # the best row, then the fastest rows of other backends that fit
    fitting = sorted((row for row in plan.rows if row.fits), key=lambda row: -row.tokens_per_s)
    first_of_backend: dict[str, PlanRow] = {}
    for row in [plan.best, *fitting] if plan.best else fitting:
        first_of_backend.setdefault(row.backend, row)
    if rows := list(first_of_backend.values())[:MAX_SUGGESTIONS]:
        free = format_gib(free_bytes, unit=True)
        return ["These would fit (%nbdist plan shows all):"] + [
            f"  {row.command}   # predicted {format_gib(row.device_bytes)} of {free}"
            for row in rows
        ]
    return ["No strategy fits. These changes would:", *(f"  {line}" for line in plan.advice)]


def _other_memory_advice(present: PlanRow, free: int, requested: int) -> str:
    """Return the likely cause if the model and its batch are predicted to fit."""
    expected = f"{format_gib(present.device_bytes)} of {format_gib(free, unit=True)}"
    cause = (
        f"the requested {format_bytes(requested)} exceed the device memory. Allocate less at once."
        if requested > free
        else "something else uses the memory."
    )
    return f"The planner predicts {expected} for this model and batch: {cause}"


def _plan(probe: MemoryProbe) -> Plan:
    session = current_config()
    options, hardware = session.options, session.hardware
    assert probe.meta_model is not None  # noqa: S101 - checked by the caller
    samples, tokens = probe.batch_shape or (1, model_description.default_seq_len(probe.meta_model))
    spec = model_description.describe_model(
        probe.meta_model,
        batch_size=samples,
        seq_len=tokens,
        call=probe.forward_inputs,
        progress=log.info,
        kind=hardware.kind,
    )
    free = [auto_strategy.available_bytes()] * distributed.get_world_size()
    return search.search_plan(
        PlanInput(
            model=spec,
            cluster=auto_strategy.build_cluster_spec(free, hardware, session.nodes),
            batch_sizes=(samples,),
            seq_len=tokens,
            precision=options.precision or "no",
            optimizer=optimizers.optimizer_from_torch(probe.optimizer_description, hardware.kind),
            fixed_options={"accumulate": probe.accumulate},
            offload_candidates=("none", "cpu"),
            keep_outputs=probe.keep_outputs,
        )
    )
