"""What a step's tensors are for, and which lines of the cells allocated them; runs on a rank.

One step is counted, after those whose time is told: counting takes time. On CPU ranks
`planner.tracing.memory_tracker` sees each operation; on a GPU the allocator does, and its snapshot
is written for PyTorch's memory viewer.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbdist.planner.tracing.memory_tracker import OTHER, Footprint
from nbdist.profiler.measurements import Line, Memory
from nbdist.worker.memory import memory_accounting, memory_probe
from nbdist.worker.profiling.sampler import Place, place_of, source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

MOST_LINES = 8
OUTSIDE = "outside"
"""What was there before the step and belongs to no model."""
_TOLD = {
    "parameters": "parameters",
    "master": "optimizer",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gathered": "buffers",
    "buffers": "buffers",
    OTHER: "activations",
    OUTSIDE: "other",
}
"""Part of `worker.memory.memory_accounting` -> as figures name it."""


class LineFootprint(Footprint):
    """Counts living bytes by the line of a cell that allocated them, too."""

    def __init__(
        self,
        cell_of: Callable[[str], tuple[str, str] | None],
        *,
        on_change: Callable[[], object],
    ) -> None:
        """Know nothing yet."""
        self._cell_of = cell_of
        self._by_line: Counter[Place] = Counter()
        self._places: dict[int, tuple[Place, int]] = {}
        self.lines_at_peak: Counter[Place] = Counter()
        super().__init__(on_change=on_change)

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        place = None
        if part == OTHER:
            place = place_of(sys._getframe(1), self._cell_of)  # noqa: SLF001
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


class Counting:
    """One step of a model that is counted on a CPU rank."""

    def __init__(
        self, watch: memory_probe.Watch, model: nn.Module, cell_of: Callable[[str], Any]
    ) -> None:
        """Begin to count."""
        self._watch, self._model = watch, model
        self._counting = LineFootprint(
            cell_of,
            on_change=lambda: self._counting.know("buffers", memory_accounting.buckets(model)),
        )
        self._counting.know(OUTSIDE, memory_accounting.everything())
        for part, tensors in memory_accounting.held(model, memory_probe.innermost(watch)):
            self._counting.know(part, tensors)
        self._counting.restart_peak()
        memory_probe.reset_rss_peak()
        self._counting.__enter__()
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: self._know_gradients()),
        ]

    def before_step(self) -> None:
        """Tell gradients from activations while they are there."""
        self._know_gradients()

    def _know_gradients(self) -> None:
        self._counting.know("gradients", memory_accounting.gradients(self._model))

    def stop(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        memory_probe.leave(self._counting)

    def figures(self) -> Memory:
        """What there was at the peak."""
        counted: Counter[str] = Counter()
        for part, size in self._counting.at_peak.items():
            counted[_TOLD.get(part, "other")] += max(0, size)
        buckets = memory_accounting.ddp_bucket_bytes(self._model)
        if buckets:
            counted["buffers"] += buckets
        return Memory(
            parts=dict(counted),
            lines=_lines(self._counting.lines_at_peak),
            device_bytes=memory_probe.rss_peak(),
        )


def _lines(counted: Counter[Place]) -> list[Line]:
    return [
        Line(cell=cell, line=line, source=source(file, line), bytes=size)
        for (cell, file, line), size in counted.most_common(MOST_LINES)
        if size > 0
    ]


class History:
    """One step that a GPU's allocator writes down."""

    def __init__(
        self,
        watch: memory_probe.Watch,
        model: nn.Module,
        cell_of: Callable[[str], Any],
        folder: str,
        rank: int,
    ) -> None:
        """Begin to write down."""
        self._watch, self._model, self._cell_of = watch, model, cell_of
        self._folder, self._rank = folder, rank
        self._device = memory_probe.state.device
        self._users = torch._C._cuda_isHistoryEnabled()  # noqa: SLF001
        if not self._users:
            torch.cuda.memory._record_memory_history("all", stacks="python")  # noqa: SLF001
        self._began_us = time.time_ns() // 1000
        self._before = torch.cuda.memory_allocated(self._device)
        self._gradients = 0

    def before_step(self) -> None:
        """Note the gradients while they are there."""
        found = memory_accounting.gradients(self._model)
        self._gradients = sum(
            one.untyped_storage().nbytes() for one in found if isinstance(one, torch.Tensor)
        )

    def stop(self) -> None:
        """Write down no more, unless the cell records for itself."""
        if not self._users:
            torch.cuda.memory._record_memory_history(None)  # noqa: SLF001

    def figures(self) -> Memory:
        """What there was at the peak; writes the snapshot where a folder is given."""
        snapshot = torch.cuda.memory._snapshot(self._device)  # noqa: SLF001
        # The allocator's own peak is the user's: resetting it would change what a cell reads.
        more, lines = at_peak(snapshot, self._began_us, self._place)
        peak = self._before + more
        parts: Counter[str] = Counter()
        resting = memory_probe.resting(self._model, memory_probe.innermost(self._watch))
        for part, size in resting.items():
            parts[_TOLD.get(part, "other")] += size
        parts["gradients"] = max(parts["gradients"], self._gradients)
        parts["activations"] = max(0, peak - sum(parts.values()))
        path = self._write() if self._folder else ""
        free, total = torch.cuda.mem_get_info(self._device)
        return Memory(
            parts=dict(parts),
            lines=_lines(lines),
            device_bytes=total - free - memory_probe.state.device_before,
            snapshot=path,
        )

    def _write(self) -> str:
        """Write the snapshot beside the traces."""
        path = Path(self._folder) / f"rank{self._rank}.memory.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # noqa: SLF001
        return str(path)

    def _place(self, frames: Iterable[dict[str, Any]]) -> Place | None:
        for frame in frames:
            if (cell := self._cell_of(frame["filename"])) is not None:
                return cell[1], frame["filename"], frame["line"]
        return None


def at_peak(
    snapshot: dict[str, Any],
    began_us: int,
    place_of_frames: Callable[[Iterable[dict[str, Any]]], Place | None],
) -> tuple[int, Counter[Place]]:
    """How much more was allocated at the peak than at the beginning, and by which lines.

    Args:
        snapshot: of `torch.cuda.memory`.
        began_us: what was recorded before it does not count: the cell may record for itself.
        place_of_frames: the line of a cell that a stack belongs to.
    """
    alive: dict[int, tuple[Place | None, int]] = {}
    counted: Counter[Place] = Counter()
    most, total, found = 0, 0, Counter[Place]()
    for event in (event for trace in snapshot.get("device_traces", []) for event in trace):
        if event["time_us"] < began_us:
            continue
        if event["action"] == "alloc":
            place = place_of_frames(event.get("frames", ()))
            alive[event["addr"]] = place, event["size"]
            total += event["size"]
            if place is not None:
                counted[place] += event["size"]
            if total > most:
                most, found = total, Counter(counted)
        elif event["action"] == "free_completed":
            total -= event["size"]  # also of what was there before
            place, size = alive.pop(event["addr"], (None, 0))
            if place is not None:
                counted[place] -= size
    return most, found
