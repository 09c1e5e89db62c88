"""Memory of one step by category and by the line that allocated it.

It is measured in the step after the timed window, because the measurement is slow. On CPU ranks
``planner.tracing.memory_tracker`` observes each operation. On a GPU the history of the caching
allocator is used, and a snapshot is written for the PyTorch memory visualizer.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbdist.planner.tracing.memory_tracker import OTHER_PART, MemoryTracker
from nbdist.profiler.measurements import LineProfile, PeakMemory
from nbdist.worker.memory import memory_probe, tensor_categories
from nbdist.worker.profiling.instrumentation import CellLine, cell_line_of, source_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

MAX_LINES = 8
PREEXISTING = "outside"
"""Memory allocated before the step that does not belong to the model."""
_TOLD = {
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


class LineMemoryTracker(MemoryTracker):
    """Memory tracker that also counts allocated bytes per line of a cell."""

    def __init__(
        self,
        cell_of: Callable[[str], tuple[str, str] | None],
        *,
        on_change: Callable[[], object],
    ) -> None:
        self._cell_of = cell_of
        self._by_line: Counter[CellLine] = Counter()
        self._places: dict[int, tuple[CellLine, int]] = {}
        self.lines_at_peak: Counter[CellLine] = Counter()
        super().__init__(on_change=on_change)

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        place = None
        if part == OTHER_PART:
            place = cell_line_of(sys._getframe(1), self._cell_of)  # noqa: SLF001
        if place is not None:
            size = storage.nbytes()
            self._places[storage._cdata] = place, size  # noqa: SLF001
            self._by_line[place] += size
        super()._add(storage, part)

    def _remove(self, key: int, gone: object) -> None:
        if (known := self._places.pop(key, None)) is not None:
            self._by_line[known[0]] -= known[1]
        super()._remove(key, gone)

    def _set_peak(self) -> None:
        super()._set_peak()
        self.lines_at_peak = Counter(self._by_line)


class CpuStepMemory:
    """Memory measurement of one step on a CPU rank."""

    def __init__(
        self, probe: memory_probe.MemoryProbe, model: nn.Module, cell_of: Callable[[str], Any]
    ) -> None:
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
            counted[_TOLD.get(part, "other")] += max(0, size)
        if buckets := tensor_categories.ddp_bucket_bytes(self._model):
            counted["buffers"] += buckets
        return PeakMemory(
            parts=dict(counted),
            lines=_lines(self._tracker.lines_at_peak),
            device_bytes=memory_probe.peak_rss_bytes(),
        )


def _lines(counted: Counter[CellLine]) -> list[LineProfile]:
    return [
        LineProfile(cell=cell, line=line, source=source_text(file, line), bytes=size)
        for (cell, file, line), size in counted.most_common(MAX_LINES)
        if size > 0
    ]


class GpuStepMemory:
    """Memory measurement of one step on a GPU, with the history of the caching allocator."""

    def __init__(
        self,
        probe: memory_probe.MemoryProbe,
        model: nn.Module,
        cell_of: Callable[[str], Any],
        folder: str,
        rank: int,
    ) -> None:
        self._probe, self._model, self._cell_of = probe, model, cell_of
        self._folder, self._rank = folder, rank
        self._device = memory_probe.current_probe.device
        self._users = torch._C._cuda_isHistoryEnabled()  # noqa: SLF001
        if not self._users:
            torch.cuda.memory._record_memory_history("all", stacks="python")  # noqa: SLF001
        self._began_us = time.time_ns() // 1000
        self._before = torch.cuda.memory_allocated(self._device)
        self._gradients = 0

    def before_step(self) -> None:
        """Measure the gradients before the optimizer frees them."""
        gradients = tensor_categories.gradients(self._model)
        self._gradients = sum(
            item.untyped_storage().nbytes() for item in gradients if isinstance(item, torch.Tensor)
        )

    def stop(self) -> None:
        """Take a snapshot, then stop the recording, unless the cell had enabled it."""
        self._snapshot = torch.cuda.memory._snapshot(self._device)  # noqa: SLF001
        # torch 2.11: disabling the history deletes it.
        if not self._users:
            torch.cuda.memory._record_memory_history(None)  # noqa: SLF001

    def measurements(self) -> PeakMemory:
        """Return the memory at the peak. Writes a snapshot if a folder was given."""
        # torch's peak statistics are not used, since resetting them would affect the user's cells.
        more, lines = at_peak(self._snapshot, self._began_us, self._place)
        peak = self._before + more
        parts: Counter[str] = Counter()
        resting = memory_probe.resting_bytes(self._model, self._probe.inner_optimizer)
        for part, size in resting.items():
            parts[_TOLD.get(part, "other")] += size
        parts["gradients"] = max(parts["gradients"], self._gradients)
        parts["activations"] = max(0, peak - sum(parts.values()))
        path = ""
        if self._folder:  # next to the traces
            file = Path(self._folder) / f"rank{self._rank}.memory.pickle"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pickle.dumps(self._snapshot))
            path = str(file)
        free, total = torch.cuda.mem_get_info(self._device)
        return PeakMemory(
            parts=dict(parts),
            lines=_lines(lines),
            device_bytes=total - free - memory_probe.current_probe.device_before_bytes,
            snapshot=path,
        )

    def _place(self, frames: Iterable[dict[str, Any]]) -> CellLine | None:
        for frame in frames:
            if (cell := self._cell_of(frame["filename"])) is not None:
                return cell[1], frame["filename"], frame["line"]
        return None


def at_peak(
    snapshot: dict[str, Any],
    began_us: int,
    place_of_frames: Callable[[Iterable[dict[str, Any]]], CellLine | None],
) -> tuple[int, Counter[CellLine]]:
    """Compute the additional memory at the peak and the lines that allocated it.

    Args:
        snapshot: snapshot of `torch.cuda.memory`.
        began_us: earlier events are ignored. There may be some if the cell enabled the history.
        place_of_frames: returns the line of a cell for a stack.

    Returns:
        Bytes at the peak minus bytes at `began_us`, and bytes per line at the peak.
    """
    alive: dict[int, tuple[CellLine | None, int]] = {}
    counted: Counter[CellLine] = Counter()
    peak, total, lines_at_peak = 0, 0, Counter[CellLine]()
    for event in (event for trace in snapshot.get("device_traces", []) for event in trace):
        if event["time_us"] < began_us:
            continue
        if event["action"] == "alloc":
            place = place_of_frames(event.get("frames", ()))
            alive[event["addr"]] = place, event["size"]
            total += event["size"]
            if place is not None:
                counted[place] += event["size"]
            if total > peak:
                peak, lines_at_peak = total, Counter(counted)
        elif event["action"] == "free_completed":
            total -= event["size"]  # includes memory allocated before `began_us`
            place, size = alive.pop(event["addr"], (None, 0))
            if place is not None:
                counted[place] -= size
    return peak, lines_at_peak
