"""A training step under FSDP: its micro-batches as FSDP1 or FSDP2 run them, then the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.plan.engines import fsdp1, fsdp2
from nbdist.plan.spec import steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.plan.engines.units import Micro
    from nbdist.plan.memory import Moment, Setup
    from nbdist.plan.spec import ModelSpec, Workload

_VERSIONS = {1: fsdp1, 2: fsdp2}


def moments(model: ModelSpec, workload: Workload, setup: Setup) -> Iterator[Moment]:
    """The moments of one optimizer step, from the third step on."""
    version = _VERSIONS[setup.options.strategy.level]
    run = model.micro_batch(workload)
    ground = version.ground(model, setup)
    for micro in micro_batches(setup.options.accumulate):
        for step in steps(model, run):
            yield from version.during(ground, run, step, micro)
    yield ground.optimizer_step(run.outputs)


def micro_batches(accumulate: int) -> tuple[Micro, ...]:
    """The kinds of micro-batches that an optimizer step has."""
    if accumulate == 1:
        return ("only",)
    return ("first", "last") if accumulate == 2 else ("first", "middle", "last")  # noqa: PLR2004
