"""Memory of a training step under DDP, FSDP and DeepSpeed ZeRO, moment by moment.

Each engine has a timeline (DDP in `timeline`, `fsdp`, `zero12`, `zero3`), which yields a
`MemoryUsage` per moment: the bytes of each part on the fullest rank's device, and on host and NVMe
for that rank. The peak is the moment with the largest sum. The step is the third optimizer step or
later, when optimizer state exists and ZeRO-3 has recorded its trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.memory import fsdp, timeline, zero3, zero12
from nbdist.planner.optimizers import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbdist.planner.memory.timeline import MemoryUsage, StepTimeline, TrainingSetup
    from nbdist.planner.model_spec import ModelSpec, Workload


def build_timeline(model: ModelSpec, setup: TrainingSetup) -> StepTimeline:
    """Return the timeline of the setup's engine; its `peak_memory` accepts any micro-batch.

    Raises:
        PlanError: the engine cannot train this model with this optimizer.
    """
    engines: Mapping[str, Callable[[ModelSpec, TrainingSetup], StepTimeline]] = {
        "ddp": timeline.DdpTimeline,
        "fsdp1": fsdp.Fsdp1Timeline,
        "fsdp2": fsdp.Fsdp2Timeline,
        "zero1": zero12.Zero12Timeline,
        "zero2": zero12.Zero12Timeline,
        "zero3": zero3.Zero3Timeline,
    }
    backend, optimizer = setup.options.strategy.name, setup.optimizer
    if reason := refusal(optimizer.cannot_step, optimizer.name, backend):
        raise PlanError(reason)
    return engines[backend](model, setup)


def step_memory_usage(
    model: ModelSpec, workload: Workload, setup: TrainingSetup
) -> Iterator[MemoryUsage]:
    """Yield the memory usage of a training step under the setup's engine."""
    return build_timeline(model, setup).memory_usage(model.micro_batch_activations(workload))
