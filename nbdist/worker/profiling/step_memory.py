"""Memory of one step by category and by the line that allocated it.

It is measured in the step after the timed window, because the measurement is slow. On CPU ranks
``planner.tracing.memory_tracker`` observes each operation. On a GPU the history of the caching
allocator is used, and a snapshot is written for the PyTorch memory visualizer.
"""

from __future__ import annotations

import pickle
import sys
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

    from nbdist.worker.stacks import CellNamer

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

    def __init__(self, cell_of: CellNamer, *, on_change: Callable[[], object]) -> None:
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

    def reset_peak(self) -> None:
        """Restart the peak from the current bytes."""
        super().reset_peak()
        self.lines_at_peak = Counter(self._by_line)


class CpuStepMemory:
    """Memory measurement of one step on a CPU rank."""

    def __init__(
        self, probe: memory_probe.MemoryProbe, model: nn.Module, cell_of: CellNamer
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
        cell_of: CellNamer,
        folder: str,
        rank: int,
    ) -> None:
        self._probe, self._model, self._cell_of = probe, model, cell_of
        self._folder, self._rank = folder, rank
        self._device = memory_probe.current_probe.device
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
            parts[_TOLD.get(part, "other")] += size
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
            device_bytes=total - free - memory_probe.current_probe.device_before_bytes,
            snapshot=path,
        )

    def _place(self, frames: Iterable[dict[str, Any]]) -> CellLine | None:
        for frame in frames:
            if (cell := self._cell_of(frame["filename"])) is not None:
                return cell[1], frame["filename"], frame["line"]
        return None
