"""Records a window of steps: installs all instrumentation and removes it again.

The memory of a step by category and by the line that allocated it is measured in the step after the
window, because that is slow. On CPU ranks ``planner.tracing.memory_tracker`` observes each
operation. On a GPU the history of the caching allocator is used, and a snapshot is written for the
PyTorch memory visualizer.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.nn.parallel import DistributedDataParallel

from nbdist.planner.tracing.memory_tracker import OTHER_PART, MemoryTracker
from nbdist.profiler.measurements import (
    DataLoaderStats,
    LineProfile,
    PeakMemory,
    ProfiledModel,
    RankProfile,
)
from nbdist.state.layouts.base import fsdp2_param_groups, unwrap_compiled
from nbdist.worker.memory import memory_probe, tensor_categories
from nbdist.worker.memory.memory_probe import current_probe
from nbdist.worker.profiling import instrumentation, kineto
from nbdist.worker.profiling.step_breakdown import (
    SECONDS_PER_NS,
    WindowTrace,
    break_down_step,
    intersection,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from nbdist.profiler.measurements import WindowEndReason
    from nbdist.worker.memory.memory_probe import MemoryProbe
    from nbdist.worker.profiling.instrumentation import CellLine
    from nbdist.worker.profiling.step_breakdown import CollectiveSpans
    from nbdist.worker.stacks import CellNamer

MAX_COMPILED_STEPS = 5
"""Maximum number of steps that are discarded because torch.compile compiled during them."""
RECOMPILE_NOTE = (
    "torch.compile recompiles in many steps of this loop, which is included in the step times."
    " Set TORCH_LOGS=recompiles to see why."
)
MAX_MEMORY_LINES = 8
PREEXISTING = "outside"
"""Memory allocated before the step that does not belong to the model."""
_PART_NAMES = {
    "parameters": "parameters",
    "master": "optimizer",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gathered": "buffers",
    "buffers": "buffers",
    OTHER_PART: "activations",
    PREEXISTING: "other",
}
"""Part in ``worker.memory.tensor_categories`` -> part in ``PeakMemory``."""


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """Counters at the end of a step."""

    seconds_by_line: Mapping[CellLine, float] = field(default_factory=dict)
    loader_stats: Sequence[DataLoaderStats] = ()
    num_updates: int = 0
    """Steps of all prepared optimizers."""
    forward_counts: Mapping[nn.Module, int] = field(default_factory=dict)
    """Forwards with gradients per model."""


class StepRecorder:
    """Recording of a window, from construction until `stop`."""

    def __init__(
        self,
        cell_of: CellNamer,
        *,
        rank: int,
        trace: str,
        give_way: Callable[[], object],
    ) -> None:
        """Install the instrumentation and start.

        Args:
            trace: folder for the trace file, or "".
            give_way: called before the cell prepares its own profiler; must end this recording.
        """
        self._rank, self._trace = rank, trace
        self._marks = instrumentation.PhaseSpans()
        self._sampler = instrumentation.LineSampler(self._marks, cell_of)
        self._recorder = kineto.KinetoRecorder(current_probe.device, shapes=bool(trace))
        self._recorder.start()
        self._patches: instrumentation.TemporaryPatches | None = None

        def prepare(original: Callable[[Any], None], user_profile: Any) -> None:
            give_way()
            original(user_profile)

        try:
            self._patches = instrumentation.instrument(self._marks)
            self._patches.callback(memory_probe.on_compile(self._on_compile))
            # There can be only one profiler.
            self._patches.around(torch.autograd.profiler.profile, "_prepare_trace", prepare)
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
        self._forwards_before = 0
        """Forwards of the measured model before the window, counted by the memory probe."""
        self._counts = StepCounts()

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
        probe = current_probe.probe
        if not self.step_ends_ns or (compiled and self._compiled_steps <= MAX_COMPILED_STEPS):
            self.step_ends_ns.clear()
            self._recorder.synchronize()  # so that the previous step ends on the device too
            self._marks.loader_stats.clear()
            self._marks.forward_counts.clear()
            self._forwards_before = probe.num_forwards if probe is not None else 0
            self._updates = 0
            self._sampler.restart()
        self.step_ends_ns.append(time.time_ns())
        forwards = Counter(self._marks.forward_counts)
        if probe is not None and (model := probe.prepared_model) is not None:
            # Without hooks on the model, use the counter of the memory probe.
            forwards[model] = forwards[model] or probe.num_forwards - self._forwards_before
        self._counts = StepCounts(
            seconds_by_line=self._sampler.seconds_by_line,
            loader_stats=[replace(loader) for loader in self._marks.loader_stats.values()],
            num_updates=self._updates,
            forward_counts=+forwards,
        )

    def _on_compile(self) -> None:
        self._compiled = True

    def stop(self) -> None:
        """Stop recording and remove the instrumentation. Does nothing if already stopped."""
        try:
            if self._patches is not None:
                self._patches.close()
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
        window = (self.step_ends_ns[0], self.step_ends_ns[-1])
        device, spans, counts = current_probe.device, self._marks.spans, self._counts
        main_thread = threading.main_thread().native_id or 0
        events = self._recorder.read_events(window, main_thread, self.num_steps)
        offloads, kernels = instrumentation.is_offloading(), None
        if device.type == "cuda":
            collectives, kernels = kineto.split_device_events(events, spans, offloads=offloads)
        else:
            collectives = kineto.merge_collectives(events, self._marks.collective_calls)
            _set_ddp_sizes(collectives, list(counts.forward_counts), self.num_steps)
            if offloads:  # updated parameters are copied back in the optimizer step
                spans["offload"] += intersection(events.copies, spans["optimizer"])
        idle_ns = sum(ns for at, ns in self._marks.idle_times if window[0] < at <= window[1])
        breakdown = break_down_step(
            WindowTrace(
                window=window,
                num_steps=self.num_steps,
                marks=spans,
                operators=events.operators,
                collectives=collectives,
                wait_spans=self._marks.wait_spans,
                idle_s=idle_ns * SECONDS_PER_NS,
                has_whole_forwards=self._marks.has_model_hooks,
                kernels=kernels,
            )
        )
        profile = RankProfile(
            rank=self._rank,
            kind="cuda" if device.type == "cuda" else "cpu",
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            ends=[end * SECONDS_PER_NS for end in self.step_ends_ns],
            parts=breakdown.parts,
            traffic=breakdown.traffic,
            hidden_s=breakdown.overlapped_s,
            begins=breakdown.collective_begins,
            lines=instrumentation.slowest_lines(counts.seconds_by_line, self.num_steps),
            loaders=average_loaders(counts.loader_stats, self.num_steps),
            operators=events.operator_table,
            ended=ended,
        )
        probe = current_probe.probe
        if probe is not None and (model := probe.prepared_model) is not None:
            num_backwards = len(intersection([window], spans["backward"]))
            micro_batches = 0
            if num_backwards:
                # A loss may need two forwards, and one forward may have two losses: the minimum.
                backwards = num_backwards / max(1, counts.num_updates)
                forwards = counts.forward_counts.get(model, 0) / max(1, self.num_steps)
                micro_batches = max(1, round(min(backwards, forwards or backwards)))
            profile.model = _describe_model(probe, model, micro_batches)
            if profile.model.accumulate < probe.accumulate:
                profile.notes.append(
                    f"--accumulate {probe.accumulate} has no effect: this loop takes an optimizer"
                    " step for every batch. Run its body under:"
                    " with accelerator.accumulate(model):"
                )
        if len(counts.forward_counts) > 1:
            profile.notes.append(
                f"{len(counts.forward_counts)} models train in this loop. Memory, units and tokens"
                " are reported for the one that was prepared last."
            )
        if self._compiled_steps > MAX_COMPILED_STEPS:
            profile.notes.append(RECOMPILE_NOTE)
        if self._trace:
            self._write_trace(profile)
        return profile

    def _write_trace(self, profile: RankProfile) -> None:
        stamp = self.step_ends_ns[0] // 1_000_000
        path = Path(self._trace) / f"rank{self._rank}.{stamp}.pt.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._recorder.save(path)
            profile.trace = str(path)
        except (OSError, RuntimeError) as error:
            profile.notes.append(f"Cannot write the trace to {path}: {error}.")


def _set_ddp_sizes(collectives: list[CollectiveSpans], passed: list[Any], steps: int) -> None:
    """Set the sizes of collectives that DDP calls from C++, which cannot be observed.

    DDP reduces all gradients once per step and broadcasts buffers at a forward.
    """
    models = [
        model
        for model in map(unwrap_compiled, passed)
        if isinstance(model, DistributedDataParallel)
    ]
    if not models:
        return
    parameters = [parameter for model in models for parameter in model.parameters()]
    gradients = tensor_categories.total_bytes([item for item in parameters if item.requires_grad])
    buffers = sum(tensor_categories.total_bytes(model.buffers()) for model in models)
    unobserved = [collective for collective in collectives if collective.barrier is None]
    reductions = [collective for collective in unobserved if collective.name == "all_reduce"]
    for collective in reductions:
        collective.size_bytes = round(gradients * steps / len(reductions))
    for collective in unobserved:
        if collective.name == "broadcast":
            collective.size_bytes = buffers // len(models)


# ------------------------------------------------------------------ the model and its loaders


def _describe_model(probe: MemoryProbe, prepared: nn.Module, micro_batches: int) -> ProfiledModel:
    # Not `probe.meta_model or prepared`: len() of a compiled model raises.
    whole = probe.meta_model if probe.meta_model is not None else prepared
    options = probe.options
    sizes = fsdp_unit_numels(prepared)
    samples, tokens = probe.batch_shape or (0, 0)
    return ProfiledModel(
        backend=options.backend if options is not None else "",
        params=sum(parameter.numel() for parameter in whole.parameters()),
        units=len(sizes),
        largest_unit=max(sizes, default=0),
        training=prepared.training,
        precision=str(options.precision) if options is not None else "",
        optimizer=str(probe.optimizer_description.get("class", "")),
        samples=samples if micro_batches else 0,
        seq_len=tokens,
        accumulate=micro_batches or probe.accumulate,
    )


def fsdp_unit_numels(prepared: nn.Module) -> list[int]:
    """Return the number of parameters of each FSDP unit; [] for other engines."""
    sizes = []
    for module in prepared.modules():
        if isinstance(module, FSDPModule):
            params = [item for group in fsdp2_param_groups(module) for item in group.fsdp_params]
            shapes = [item._orig_size for item in params]  # noqa: SLF001
        elif isinstance(module, Fsdp1) and (handle := module._handle) is not None:  # noqa: SLF001
            shapes = [handle.flat_param._unpadded_unsharded_size]  # noqa: SLF001
        else:
            continue
        sizes.append(sum(int(shape.numel()) for shape in shapes))
    return [size for size in sizes if size]


def average_loaders(totals: Iterable[DataLoaderStats], steps: int) -> list[DataLoaderStats]:
    """Return batches per step and seconds per batch. Iterators with equal settings are merged."""
    merged: dict[tuple[object, ...], DataLoaderStats] = {}
    for loader in totals:
        kind = (loader.num_workers, loader.pin_memory, loader.batch_size, loader.sharded)
        empty = replace(loader, batches=0, fetch_s=0.0, fetch_cpu_s=0.0)
        total = merged.setdefault(kind, empty)
        total.batches += loader.batches
        total.fetch_s += loader.fetch_s
        total.fetch_cpu_s += loader.fetch_cpu_s
    for total in merged.values():
        each = 1 / total.batches if total.batches and not total.num_workers else 0.0
        total.fetch_s *= each
        total.fetch_cpu_s *= each
        total.batches /= max(1, steps)
    return list(merged.values())


# ------------------------------------------------------------------ the memory of a step


class LineMemoryTracker(MemoryTracker):
    """Memory tracker that also counts allocated bytes per line of a cell."""

    def __init__(self, cell_of: CellNamer, *, on_change: Callable[[], object]) -> None:
        self._cell_of = cell_of
        self._by_line: Counter[CellLine] = Counter()
        self._storage_lines: dict[int, tuple[CellLine, int]] = {}
        self.lines_at_peak: Counter[CellLine] = Counter()
        super().__init__(on_change=on_change)

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        place = None
        if part == OTHER_PART:
            place = instrumentation.cell_line_of(sys._getframe(1), self._cell_of)  # noqa: SLF001
        if place is not None:
            size = storage.nbytes()
            self._storage_lines[storage._cdata] = place, size  # noqa: SLF001
            self._by_line[place] += size
        super()._add(storage, part)

    def _remove(self, key: int, gone: object) -> None:
        if (known := self._storage_lines.pop(key, None)) is not None:
            self._by_line[known[0]] -= known[1]
        super()._remove(key, gone)

    def reset_peak(self) -> None:
        """Restart the peak from the current bytes."""
        super().reset_peak()
        self.lines_at_peak = Counter(self._by_line)


class CpuStepMemory:
    """Memory measurement of one step on a CPU rank."""

    def __init__(self, probe: MemoryProbe, model: nn.Module, cell_of: CellNamer) -> None:
        self._model = model
        self._tracker = tracker = LineMemoryTracker(
            cell_of,
            on_change=lambda: tracker.track_tensors(
                "buffers", tensor_categories.zero_buckets(model)
            ),
        )
        memory_probe.reset_peak_rss()
        optimizer = probe.inner_optimizer
        memory_probe.enter_memory_tracker(tracker, model, optimizer, preexisting=PREEXISTING)
        self._hook = model.register_forward_pre_hook(lambda *_: self.before_step())

    def before_step(self) -> None:
        """Register the gradients before the optimizer frees them."""
        self._tracker.track_tensors("gradients", tensor_categories.gradients(self._model))

    def stop(self) -> None:
        """Stop the measurement."""
        self._hook.remove()
        memory_probe.exit_memory_tracker(self._tracker)

    def measurements(self) -> PeakMemory:
        """Return the memory at the peak."""
        counted: Counter[str] = Counter()
        for part, size in self._tracker.at_peak.items():
            counted[_PART_NAMES.get(part, "other")] += max(0, size)
        if buckets := tensor_categories.ddp_bucket_bytes(self._model):
            counted["buffers"] += buckets
        return PeakMemory(
            parts=dict(counted),
            lines=_lines(self._tracker.lines_at_peak),
            device_bytes=memory_probe.peak_rss_bytes(),
        )


def _lines(counted: Counter[CellLine]) -> list[LineProfile]:
    return [
        LineProfile(
            cell=cell, line=line, source=instrumentation.source_text(file, line), bytes=size
        )
        for (cell, file, line), size in counted.most_common(MAX_MEMORY_LINES)
        if size > 0
    ]


class GpuStepMemory:
    """Memory measurement of one step on a GPU, with the history of the caching allocator."""

    def __init__(
        self,
        probe: MemoryProbe,
        model: nn.Module,
        cell_of: CellNamer,
        folder: str,
        rank: int,
    ) -> None:
        self._probe, self._model, self._cell_of = probe, model, cell_of
        self._folder, self._rank = folder, rank
        self._device = current_probe.device
        self._history = memory_probe.AllocatorHistory(self._device, stacks=True)
        self._gradients = 0

    def before_step(self) -> None:
        """Measure the gradients before the optimizer frees them."""
        gradients = tensor_categories.gradients(self._model)
        self._gradients = sum(
            item.untyped_storage().nbytes() for item in gradients if isinstance(item, torch.Tensor)
        )

    def stop(self) -> None:
        """Stop the recording, unless the cell had enabled it."""
        self._history.stop()

    def measurements(self) -> PeakMemory:
        """Return the memory at the peak. Writes a snapshot if a folder was given."""
        peak, places = self._history.peak(self._place)
        parts: Counter[str] = Counter()
        resting = memory_probe.resting_bytes(self._model, self._probe.inner_optimizer)
        for part, size in resting.items():
            parts[_PART_NAMES.get(part, "other")] += size
        parts["gradients"] = max(parts["gradients"], self._gradients)
        parts["activations"] = max(0, peak - sum(parts.values()))
        path = ""
        if self._folder:  # next to the traces
            file = Path(self._folder) / f"rank{self._rank}.memory.pickle"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pickle.dumps(self._history.snapshot))
            path = str(file)
        free, total = torch.cuda.mem_get_info(self._device)
        return PeakMemory(
            parts=dict(parts),
            lines=_lines(places),
            device_bytes=total - free - current_probe.device_before_bytes,
            snapshot=path,
        )

    def _place(self, frames: Iterable[dict[str, Any]]) -> CellLine | None:
        for frame in frames:
            if (cell := self._cell_of(frame["filename"])) is not None:
                return cell[1], frame["filename"], frame["line"]
        return None
