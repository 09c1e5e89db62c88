"""Everything that records a window of steps: put in place together, removed together; on a rank."""

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

from nbdist.profiler.measurements import RankFigures
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
from nbdist.worker.profiling.intervals import common
from nbdist.worker.profiling.step_breakdown import Recorded, told_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Module

    from nbdist.profiler.measurements import Ended
    from nbdist.worker.profiling.sampler import Place
    from nbdist.worker.profiling.step_breakdown import Collective

log = logging.getLogger(__name__)
NS = 1e-9
MOST_COMPILED = 5
"""Steps that are left out because something was compiled in them."""
COMPILES = (
    "torch.compile compiles in many of this loop's steps, and their times have that in them;"
    " TORCH_LOGS=recompiles says why."
)


@dataclass(slots=True, kw_only=True)
class Counted:
    """What is counted and not timed: up to the end of a step."""

    lines: Mapping[Place, float] = field(default_factory=dict)
    loaders: Sequence[instrumentation.Taken] = ()
    updates: int = 0
    passes: Mapping[Module, int] = field(default_factory=dict)


class Recording:
    """Records from its making until `stop`."""

    def __init__(
        self,
        cell_of: Callable[[str], tuple[str, str] | None],
        *,
        rank: int,
        trace: str,
        give_way: Callable[[], object],
    ) -> None:
        """Put everything in place and begin; `give_way` ends it for a profiler of the cell."""
        self._rank, self._trace = rank, trace
        self._marks = instrumentation.Marks()
        self._sampler = sampler.Sampler(self._marks, cell_of)
        self._recorder = kineto.Recorder(memory_probe.state.device, shapes=bool(trace))
        self._recorder.start()
        self._patches: instrumentation.Patches | None = None
        try:
            self._patches = instrumentation.install(self._marks)
            self._patches.later(compile_detection.hear(self._compiles))
            self._recorder.give_way(self._patches, give_way)
            offload.mark(self._marks, self._patches)
            self._sampler.start()
        except BaseException:
            self.stop()
            raise
        self.ends: list[int] = []
        """Moments at which steps ended. The step that is under way here is left out: some rank
        puts its recording in place during it."""
        self._compiled = False
        """Something was compiled since the last step ended."""
        self._compiled_steps = 0
        self._updates = 0
        """Of all prepared optimizers."""
        self._passes_before = 0
        self._counted = Counted()

    @property
    def steps(self) -> int:
        """Whole steps so far."""
        return max(0, len(self.ends) - 1)

    @property
    def seconds(self) -> list[float]:
        """Of each step."""
        pairs = zip(self.ends, self.ends[1:], strict=False)
        return [(then - now) * NS for now, then in pairs]

    def step_begins(self) -> None:
        """A prepared optimizer steps."""
        self._marks.begin("optimizer")

    def optimizer_ended(self) -> None:
        """A prepared optimizer has stepped, perhaps not the one by which steps are counted."""
        self._marks.end("optimizer")
        self._updates += 1

    def step_ended(self) -> None:
        """A step is whole; the first one opens the window, and one that compiled opens it anew."""
        compiled, self._compiled = self._compiled, False
        self._compiled_steps += compiled
        if not self.ends or (compiled and self._compiled_steps <= MOST_COMPILED):
            self.ends.clear()
            self._recorder.synchronize()  # the device is behind: the step before ends there too
            self._marks.loaders.clear()
            self._marks.passes.clear()
            self._passes_before = _passes()
            self._updates = 0
            self._sampler.restart()
        self.ends.append(time.time_ns())
        self._counted = self._count()

    def _compiles(self) -> None:
        """Something of the step is compiled, which is no part of those to come."""
        self._compiled = True

    def stop(self) -> None:
        """Remove everything; a second time nothing."""
        try:
            if self._patches is not None:
                self._patches.undo()
        finally:
            try:
                self._sampler.stop()
            finally:
                self._recorder.stop()
                self._marks.closed()

    def close(self) -> None:
        """Stop, and free what was recorded: 10 MB for each step of a small model."""
        try:
            self.stop()
        finally:
            self._recorder.forget()
            memory_probe.trim()

    def wait_for_device(self) -> None:
        """Let the last step end on the device too."""
        self._recorder.synchronize()
        self.ends[-1] = time.time_ns()

    def figures(self, ended: Ended) -> RankFigures:
        """Make sense of what was recorded; after `stop`."""
        window, device = (self.ends[0], self.ends[-1]), memory_probe.state.device
        main = threading.main_thread().native_id or 0
        seen = self._recorder.seen(window, main, self.steps)
        counted = self._counted
        kernels = None
        if device.type == "cuda":
            moved, kernels = collective_trace.of_device(
                seen, self._marks.spans, offloads=offload.configured()
            )
        else:
            moved = collective_trace.collectives(seen, self._marks.met)
            _size_those_of_ddp(moved, list(counted.passes), self.steps)
            if offload.configured():
                self._marks.spans["offload"] += common(seen.copies, self._marks.spans["optimizer"])
        told = told_apart(
            Recorded(
                window=window,
                steps=self.steps,
                marks=self._marks.spans,
                operators=seen.operators,
                collectives=moved,
                waits=self._marks.waits,
                idle_s=sum(ns for at, ns in self._marks.idle if window[0] < at <= window[1]) * NS,
                whole_forwards=self._marks.hooked,
                kernels=kernels,
            )
        )
        made = RankFigures(
            rank=self._rank,
            kind="cuda" if device.type == "cuda" else "cpu",
            device=_name(device),
            ends=[one * NS for one in self.ends],
            parts=told.parts,
            traffic=told.traffic,
            hidden_s=told.hidden_s,
            begins=told.begins,
            lines=sampler.lines(counted.lines, self.steps),
            loaders=model_facts.loaders(counted.loaders, self.steps),
            operators=seen.table,
            model=model_facts.model(
                memory_probe.state.watch,
                model_facts.Seen(
                    steps=self.steps,
                    updates=counted.updates,
                    passes=counted.passes,
                    backwards=len(common([window], self._marks.spans["backward"])),
                ),
            ),
            ended=ended,
        )
        made.notes += model_facts.notes(memory_probe.state.watch, made.model, counted.passes)
        if self._compiled_steps > MOST_COMPILED:
            made.notes.append(COMPILES)
        if self._trace:
            self._save(made)
        return made

    def _count(self) -> Counted:
        """What was counted up to the end of a step; a part of a step may follow."""
        watch, passes = memory_probe.state.watch, Counter(self._marks.passes)
        if watch is not None and (model := watch.prepared) is not None and not passes[model]:
            passes[model] = watch.passes - self._passes_before  # no hook of ours is in the model
        return Counted(
            lines=self._sampler.seconds,
            loaders=[replace(one) for one in self._marks.loaders.values()],
            updates=self._updates,
            passes=+passes,
        )

    def _save(self, made: RankFigures) -> None:
        """Write the trace into the folder that was asked for."""
        stamp = self.ends[0] // 1_000_000
        path = Path(self._trace) / f"rank{self._rank}.{stamp}.pt.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._recorder.save(path)
            made.trace = str(path)
        except (OSError, RuntimeError) as error:
            made.notes.append(f"the trace could not be written to {path}: {error}.")


def _passes() -> int:
    """Forwards of the model that is followed, as its own hook has counted them."""
    return memory_probe.state.watch.passes if memory_probe.state.watch is not None else 0


def _size_those_of_ddp(moved: list[Collective], passed: list[Any], steps: int) -> None:
    """Give what DDP sends from C++ its size: all gradients once a step, buffers at a forward.

    Args:
        moved: collectives of the window.
        passed: models that went forward in it.
        steps: of the window.
    """
    models = [one for one in map(inner, passed) if isinstance(one, DistributedDataParallel)]
    if not models:
        return
    by_name: dict[str, list[Collective]] = defaultdict(list)
    for one in moved:
        if one.meeting is None:
            by_name[one.name].append(one)
    parameters = [one for model in models for one in model.parameters()]
    gradients = memory_accounting.size([one for one in parameters if one.requires_grad])
    for one in by_name["all_reduce"]:
        one.bytes = round(gradients * steps / len(by_name["all_reduce"]))
    for one in by_name["broadcast"]:
        one.bytes = sum(memory_accounting.size(model.buffers()) for model in models) // len(models)


def inner(model: Any) -> Any:
    """The engine's module, also where torch.compile wraps it."""
    return getattr(model, "_orig_mod", model)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
