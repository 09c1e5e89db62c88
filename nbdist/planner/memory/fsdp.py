"""Memory timeline of FSDP: micro-batches under FSDP1 or FSDP2, then the optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner.memory import fsdp1, fsdp2
from nbdist.planner.memory.timeline import StepTimeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.memory.fsdp_units import MicroBatchPosition
    from nbdist.planner.memory.timeline import Allocation
    from nbdist.planner.memory.training_setup import TrainingSetup
    from nbdist.planner.model_spec import MicroBatchActivations, ModelSpec, WalkStep

_VERSIONS = {1: fsdp1, 2: fsdp2}


class FsdpTimeline(StepTimeline):
    """One optimizer step under FSDP, from the third on."""

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        """Split the model into units."""
        super().__init__(model)
        self._version = _VERSIONS[setup.options.strategy.level]
        self._ground = self._version.build_rank_memory(model, setup)
        self._micros = micro_batch_positions(setup.options.accumulate)
        self._update = self._ground.optimizer_step_allocation()

    def walk_allocations(self, steps: tuple[WalkStep, ...]) -> Iterator[tuple[int, Allocation]]:
        """Walk each kind of micro-batch from first to last step."""
        for micro in self._micros:
            for at, step in enumerate(steps):
                for held in self._version.allocations_at(self._ground, micro, step):
                    yield at, held

    def other_allocations(
        self,
        run: MicroBatchActivations,  # noqa: ARG002
    ) -> Iterator[tuple[str, Allocation, int]]:
        """The optimizer step."""
        yield "optimizer step", self._update, 0


def micro_batch_positions(accumulate: int) -> tuple[MicroBatchPosition, ...]:
    """Return the kinds of micro-batches in an optimizer step."""
    if accumulate == 1:
        return ("only",)
    return ("first", "last") if accumulate == 2 else ("first", "middle", "last")  # noqa: PLR2004
