"""Records a window of steps: installs all instrumentation and removes it again."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.profiler.measurements import RankProfile
from nbdist.worker.engines import compile_detection
from nbdist.worker.memory import memory_accounting, memory_probe
from nbdist.worker.profiling import (
    collective_trace,
    instrumentation,
    kineto,
    model_facts,
    offload,
    sampler,
)
from nbdist.worker.profiling.intervals import intersection
from nbdist.worker.profiling.step_breakdown import WindowTrace, break_down_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Module

    from nbdist.profiler.measurements import WindowEndReason
    from nbdist.worker.profiling.sampler import CellLine
    from nbdist.worker.profiling.step_breakdown import CollectiveSpans

log = logging.getLogger(__name__)
SECONDS_PER_NS = 1e-9
MAX_COMPILED_STEPS = 5
"""Maximum number of steps that are discarded because torch.compile compiled during them."""
RECOMPILE_NOTE = (
    "torch.compile recompiles in many steps of this loop, which is included in the step times."
    " Set TORCH_LOGS=recompiles to see why."
)


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """Counters at the end of a step."""

    seconds_by_line: Mapping[CellLine, float] = field(default_factory=dict)
    loader_stats: Sequence[instrumentation.LoaderStats] = ()
    num_updates: int = 0
    forward_counts: Mapping[Module, int] = field(default_factory=dict)


class StepRecorder:
    """Recording of a window, from construction until `stop`."""

    def __init__(
        self,
        cell_of: Callable[[str], tuple[str, str] | None],
        *,
        rank: int,
        trace: str,
        give_way: Callable[[], object],
    ) -> None:
        """Install the instrumentation and start.

        Args:
            cell_of: IPython's `compile.format_code_name`.
            rank: this rank.
            trace: folder for the trace file, or "".
            give_way: called when the cell starts its own profiler; must end this recording.
        """
        self._rank, self._trace = rank, trace
        self._marks = instrumentation.PhaseSpans()
        self._sampler = sampler.LineSampler(self._marks, cell_of)
        self._recorder = kineto.KinetoRecorder(memory_probe.probe_state.device, shapes=bool(trace))
        self._recorder.start()
        self._patches: instrumentation.Patches | None = None
        try:
            self._patches = instrumentation.instrument(self._marks)
            self._patches.on_undo(compile_detection.on_compile(self._compiles))
            self._recorder.yield_to_user_profiler(self._patches, give_way)
            offload.mark_offload(self._marks, self._patches)
            self._sampler.start()
        except BaseException:
            self.stop()
            raise
        self.step_ends_ns: list[int] = []
        """Timestamps of the ends of steps. The current step is not recorded, because other ranks
        may install their instrumentation during it."""
        self._compiled = False
        """Whether torch.compile compiled something since the end of the last step."""
        self._compiled_steps = 0
        self._updates = 0
        """Steps of all prepared optimizers."""
        self._passes_before = 0
        self._counted = StepCounts()

    @property
    def num_steps(self) -> int:
        """Number of complete steps so far."""
        return max(0, len(self.step_ends_ns) - 1)

    @property
    def step_seconds(self) -> list[float]:
        """Duration of each step."""
        pairs = zip(self.step_ends_ns, self.step_ends_ns[1:], strict=False)
        return [(end - start) * SECONDS_PER_NS for start, end in pairs]

    def on_step_begin(self) -> None:
        """Record the start of an optimizer step."""
        self._marks.begin("optimizer")

    def on_optimizer_end(self) -> None:
        """Record the end of the step of any prepared optimizer."""
        self._marks.end("optimizer")
        self._updates += 1

    def on_step_end(self) -> None:
        """Record the end of a step.

        The first call opens the window. A step in which torch.compile compiled restarts it.
        """
        compiled, self._compiled = self._compiled, False
        self._compiled_steps += compiled
        if not self.step_ends_ns or (compiled and self._compiled_steps <= MAX_COMPILED_STEPS):
            self.step_ends_ns.clear()
            self._recorder.synchronize()  # so that the previous step ends on the device too
            self._marks.loader_stats.clear()
            self._marks.forward_counts.clear()
            self._passes_before = _passes()
            self._updates = 0
            self._sampler.restart()
        self.step_ends_ns.append(time.time_ns())
        self._counted = self._count()

    def _compiles(self) -> None:
        """Note that torch.compile compiles in this step."""
        self._compiled = True

    def stop(self) -> None:
        """Stop recording and remove the instrumentation. Does nothing if already stopped."""
        try:
            if self._patches is not None:
                self._patches.undo()
        finally:
            try:
                self._sampler.stop()
            finally:
                self._recorder.stop()
                self._marks.close_open_spans()

    def close(self) -> None:
        """Stop recording and free the events, which take 10 MB per step of a small model."""
        try:
            self.stop()
        finally:
            self._recorder.free_events()
            memory_probe.trim_malloc()

    def wait_for_device(self) -> None:
        """Wait until the device has finished the last step."""
        self._recorder.synchronize()
        self.step_ends_ns[-1] = time.time_ns()

    def measurements(self, ended: WindowEndReason) -> RankProfile:
        """Return the measurements of the recording. Call it after `stop`."""
        window, device = (
            (self.step_ends_ns[0], self.step_ends_ns[-1]),
            memory_probe.probe_state.device,
        )
        main = threading.main_thread().native_id or 0
        seen = self._recorder.read_events(window, main, self.num_steps)
        counted = self._counted
        kernels = None
        if device.type == "cuda":
            collectives, kernels = collective_trace.split_device_events(
                seen, self._marks.spans, offloads=offload.is_offloading()
            )
        else:
            collectives = collective_trace.merge_collectives(seen, self._marks.collective_calls)
            _set_ddp_sizes(collectives, list(counted.forward_counts), self.num_steps)
            if offload.is_offloading():
                self._marks.spans["offload"] += intersection(
                    seen.copies, self._marks.spans["optimizer"]
                )
        breakdown = break_down_step(
            WindowTrace(
                window=window,
                num_steps=self.num_steps,
                marks=self._marks.spans,
                operators=seen.operators,
                collectives=collectives,
                wait_spans=self._marks.wait_spans,
                idle_s=sum(ns for at, ns in self._marks.idle_times if window[0] < at <= window[1])
                * SECONDS_PER_NS,
                has_whole_forwards=self._marks.has_model_hooks,
                kernels=kernels,
            )
        )
        figures = RankProfile(
            rank=self._rank,
            kind="cuda" if device.type == "cuda" else "cpu",
            device=_name(device),
            ends=[end * SECONDS_PER_NS for end in self.step_ends_ns],
            parts=breakdown.parts,
            traffic=breakdown.traffic,
            hidden_s=breakdown.overlapped_s,
            begins=breakdown.collective_begins,
            lines=sampler.slowest_lines(counted.seconds_by_line, self.num_steps),
            loaders=model_facts.summarize_loaders(counted.loader_stats, self.num_steps),
            operators=seen.operator_table,
            model=model_facts.describe_model(
                memory_probe.probe_state.probe,
                model_facts.LoopCounts(
                    num_steps=self.num_steps,
                    num_updates=counted.num_updates,
                    forward_counts=counted.forward_counts,
                    num_backwards=len(intersection([window], self._marks.spans["backward"])),
                ),
            ),
            ended=ended,
        )
        figures.notes += model_facts.loop_notes(
            memory_probe.probe_state.probe, figures.model, counted.forward_counts
        )
        if self._compiled_steps > MAX_COMPILED_STEPS:
            figures.notes.append(RECOMPILE_NOTE)
        if self._trace:
            self._save(figures)
        return figures

    def _count(self) -> StepCounts:
        """Return the counters at the end of a step."""
        probe, passes = memory_probe.probe_state.probe, Counter(self._marks.forward_counts)
        if probe is not None and (model := probe.prepared_model) is not None and not passes[model]:
            # Without hooks on the model, use the counter of the memory probe.
            passes[model] = probe.num_forwards - self._passes_before
        return StepCounts(
            seconds_by_line=self._sampler.seconds_by_line,
            loader_stats=[replace(loader) for loader in self._marks.loader_stats.values()],
            num_updates=self._updates,
            forward_counts=+passes,
        )

    def _save(self, made: RankProfile) -> None:
        """Write the trace file. A failure is added to the notes."""
        stamp = self.step_ends_ns[0] // 1_000_000
        path = Path(self._trace) / f"rank{self._rank}.{stamp}.pt.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._recorder.save(path)
            made.trace = str(path)
        except (OSError, RuntimeError) as error:
            made.notes.append(f"Cannot write the trace to {path}: {error}.")


def _passes() -> int:
    """Return the forwards of the measured model, as counted by the hook of the memory probe."""
    return (
        memory_probe.probe_state.probe.num_forwards
        if memory_probe.probe_state.probe is not None
        else 0
    )


def _set_ddp_sizes(moved: list[CollectiveSpans], passed: list[Any], steps: int) -> None:
    """Set the sizes of collectives that DDP calls from C++, which cannot be observed.

    DDP reduces all gradients once per step and broadcasts buffers at a forward.

    Args:
        moved: collectives of the window.
        passed: models with a forward in the window.
        steps: number of steps in the window.
    """
    models = [
        model
        for model in map(unwrap_compiled, passed)
        if isinstance(model, DistributedDataParallel)
    ]
    if not models:
        return
    by_name: dict[str, list[CollectiveSpans]] = defaultdict(list)
    for collective in moved:
        if collective.barrier is None:
            by_name[collective.name].append(collective)
    parameters = [parameter for model in models for parameter in model.parameters()]
    gradients = memory_accounting.total_bytes([item for item in parameters if item.requires_grad])
    for collective in by_name["all_reduce"]:
        collective.size_bytes = round(gradients * steps / len(by_name["all_reduce"]))
    buffers = [memory_accounting.total_bytes(model.buffers()) for model in models]
    for collective in by_name["broadcast"]:
        collective.size_bytes = sum(buffers) // len(models)


def unwrap_compiled(model: Any) -> Any:
    """Return the engine's module without the wrapper of torch.compile."""
    return getattr(model, "_orig_mod", model)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
