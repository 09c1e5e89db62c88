"""Checks whether a prepared model fits into memory under other options.

If weights and optimizer state exceed the device memory, a switch would fail, so it is rejected
before anything changes. The peak of a step is only an estimate: if it exceeds the device memory,
the switch proceeds with a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed

from nbdist.errors import PlanError, SwitchError
from nbdist.number_formatting import format_bytes
from nbdist.planner import measured_comparison
from nbdist.worker.engines import auto_strategy
from nbdist.worker.memory import memory_probe, model_description

if TYPE_CHECKING:
    from nbdist.planner.memory.timeline import MemoryUsage
    from nbdist.strategies import Hardware, Options
    from nbdist.worker.training.prepared_models import PreparedModel


_STATE = ("parameters", "master", "optimizer")
"""Parts that are always allocated; engines on a CPU never touch some of the buffers."""


def check_memory(
    prepared: PreparedModel, new_options: Options, hardware: Hardware, *, world_size: int
) -> list[str]:
    """Compare the planner's prediction for these options with this rank's device memory.

    Checks only models with an analytic spec or a cached trace, which takes milliseconds; a trace
    would take seconds, and a switch that runs out of memory is rolled back anyway.

    Args:
        prepared: the model.
        new_options: validated options after the switch.
        hardware: hardware of the ranks.
        world_size: number of ranks after the switch.

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
        message = (
            f"Not enough memory under {new_options.describe()}: a rank needs"
            f" {format_bytes(resting)} for weights and optimizer state, but its device has"
            f" {format_bytes(free)}. Run %nbdist plan to see what fits."
        )
        raise SwitchError(message)
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
        setup = measured_comparison.setup_from_measurement(
            new_options, world_size, micro_batch, nodes=hardware.nodes
        )
        return measured_comparison.predict_peak(spec, setup, micro_batch)
    except PlanError:  # the model needs a trace, or the optimizer is unknown to the planner
        return None
