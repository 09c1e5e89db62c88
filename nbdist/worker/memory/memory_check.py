"""Whether a model that is trained has room under other options; runs on a rank.

Weights and optimizer state that are larger than the device can only fail, so such a switch is
refused before anything moves. A whole step is an estimate: where it is larger than the device,
the switch is made and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed

from nbdist.display.units import size
from nbdist.errors import PlanError, SwitchError
from nbdist.planner import validation
from nbdist.planner.models import traced
from nbdist.worker.engines import auto_strategy
from nbdist.worker.memory import memory_probe, model_description

if TYPE_CHECKING:
    from nbdist.planner.memory.timeline import Moment
    from nbdist.strategies import Hardware, Options
    from nbdist.worker.training.prepared_models import Trained


_STATE = ("parameters", "master", "optimizer")
"""Parts that rest on a device whatever a step does; a CPU's engines never touch some buffers."""


def check(one: Trained, then: Options, hardware: Hardware, *, world_size: int) -> list[str]:
    """Compare what the planner expects under these options with what this rank's device has.

    Only models with a closed form are looked at, which takes milliseconds; a trace takes
    seconds, and a switch that fails for lack of memory goes back by itself.

    Args:
        one: the model.
        then: checked options.
        hardware: of the ranks.
        world_size: number of ranks that there will be.

    Returns:
        A sentence about a step that may not fit, or nothing.

    Raises:
        SwitchError: not even weights and optimizer state fit.
    """
    peak = _peak(one, then, hardware, world_size)
    if peak is None:
        return []
    free = auto_strategy.free_bytes()
    if hardware.kind == "cpu":  # the ranks share the host's memory
        free = free * distributed.get_world_size() // world_size
    resting = sum(peak.parts.get(name, 0) for name in _STATE)
    if resting > free:
        message = (
            f"under {then.describe()} a rank keeps {size(resting)} of weights and optimizer state,"
            f" and its device has {size(free)}; %nbdist plan shows what fits."
        )
        raise SwitchError(message)
    if peak.total > free:
        note = (
            f"a step under {then.describe()} is expected to take {size(peak.total)} on a rank whose"
            f" device has {size(free)}: the next one may run out of memory, and %nbdist plan shows"
            " what fits"
        )
        return [note]
    return []


def _peak(one: Trained, then: Options, hardware: Hardware, world_size: int) -> Moment | None:
    """The fullest moment of a step; None where it is not known at once."""
    watch = memory_probe.state.watch
    if watch is None or watch.twin is None or watch.prepared is not one.model:
        return None
    spec = traced.closed_form(watch.twin)
    if spec is None:
        return None
    samples, tokens = watch.shape or (1, model_description.default_length(watch.twin))
    micro_batch = validation.Measured(
        kind=hardware.kind,
        step=0,
        batch_size=samples,
        seq_len=tokens,
        accumulate=watch.accumulate,
        optimizer=watch.described,
    )
    try:
        setup = validation.setup_of(then, world_size, micro_batch, nodes=hardware.nodes)
        return validation.predicted(spec, setup, micro_batch)
    except PlanError:  # an optimizer that the planner does not know
        return None
