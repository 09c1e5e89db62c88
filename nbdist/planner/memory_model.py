"""Memory of one training step: its timeline under an engine, and the peak.

The timelines (`memory.ddp`, `memory.fsdp`, `memory.zero12`, `memory.zero3`) yield a `MemoryUsage`
per moment: the bytes of each part on the fullest rank's device, and on host and NVMe for that
rank. The peak is the moment with the largest sum. The step is the third optimizer step or later,
when optimizer state exists and ZeRO-3 has recorded its trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner.memory import ddp, fsdp, zero12

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nbdist.planner.memory.timeline import MemoryUsage, StepTimeline
    from nbdist.planner.memory.training_setup import TrainingSetup
    from nbdist.planner.model_spec import ModelSpec, Workload


def build_timeline(model: ModelSpec, setup: TrainingSetup) -> StepTimeline:
    """Return the timeline of the setup's engine; its `peak_memory` accepts any micro-batch."""
    engines: Mapping[str, Callable[[ModelSpec, TrainingSetup], StepTimeline]] = {
        "ddp": ddp.DdpTimeline,
        "fsdp": fsdp.FsdpTimeline,
        "deepspeed": zero12.build_timeline,
    }
    return engines[setup.options.strategy.engine](model, setup)


def step_memory_usage(
    model: ModelSpec, workload: Workload, setup: TrainingSetup
) -> Iterator[MemoryUsage]:
    """Yield the memory usage of a training step under the setup's engine."""
    return build_timeline(model, setup).memory_usage(model.micro_batch_activations(workload))


def peak_memory(model: ModelSpec, workload: Workload, setup: TrainingSetup) -> MemoryUsage:
    """Return the peak device memory usage, with the peak of host memory over all moments."""
    return build_timeline(model, setup).peak_memory(model.micro_batch_activations(workload))
