"""A training step under FSDP: its micro-batches as FSDP1 or FSDP2 run them, then the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner.memory import fsdp1, fsdp2
from nbdist.planner.memory.timeline import Story

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.memory.fsdp_units import Micro
    from nbdist.planner.memory.timeline import Held
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import MicroBatch, ModelSpec, Step

_VERSIONS = {1: fsdp1, 2: fsdp2}


class Sharded(Story):
    """One optimizer step, from the third on."""

    def __init__(self, model: ModelSpec, setup: Setup) -> None:
        """Cut the model into units."""
        super().__init__(model)
        self._version = _VERSIONS[setup.options.strategy.level]
        self._ground = self._version.ground(model, setup)
        self._micros = micro_batches(setup.options.accumulate)
        self._update = self._ground.optimizer_step()

    def during(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, Held]]:
        """Each kind of micro-batch from its first step to its last."""
        for micro in self._micros:
            for at, step in enumerate(steps):
                for held in self._version.held_at(self._ground, micro, step):
                    yield at, held

    def between(self, run: MicroBatch) -> Iterator[tuple[str, Held, int]]:  # noqa: ARG002
        """The update."""
        yield "optimizer step", self._update, 0


def micro_batches(accumulate: int) -> tuple[Micro, ...]:
    """The kinds of micro-batches that an optimizer step has."""
    if accumulate == 1:
        return ("only",)
    return ("first", "last") if accumulate == 2 else ("first", "middle", "last")  # noqa: PLR2004
