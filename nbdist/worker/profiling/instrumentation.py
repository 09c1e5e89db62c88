"""Instrumentation of the training loop while a profile is recorded.

``instrument`` patches data loading, copies to the device, forward and backward of the prepared
models, the optimizer and collectives, to record time spans of the main thread. Closing the result
removes all patches. ``LineSampler`` attributes the time outside of these phases to lines of the
cell.
"""

from __future__ import annotations

import functools
import linecache
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import accelerate.data_loader
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d
from torch.utils.data import dataloader

from nbdist.profiler.measurements import DataLoaderStats, LineProfile
from nbdist.worker import collective_check, stacks
from nbdist.worker.engines import deepspeed
from nbdist.worker.memory import memory_probe
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from nbdist.worker.profiling.step_breakdown import Span

SAMPLE_INTERVAL_S = 0.01
MAX_LINES = 12
SOURCE_CHARS = 120
_PASSES = frozenset({"forward", "backward", "optimizer", "data", "offload"})
"""Phases that are not attributed to a line."""

CellLine = tuple[str, str, int]
"""Cell, file, line."""


@dataclass(slots=True)
class CollectiveCall:
    """A collective called from Python, with the span of the collective check before it."""

    group: str
    span: Span
    size_bytes: int


class PhaseSpans:
    """Time spans of the main thread by phase, in Unix nanoseconds."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = defaultdict(list)
        self.collective_calls: list[CollectiveCall] = []
        self.wait_spans: list[Span] = []
        self.loader_stats: dict[int, DataLoaderStats] = {}
        """id() of an iterator -> totals of its batches. Holds no reference to the iterator."""
        self.forward_counts: Counter[torch.nn.Module] = Counter()
        """Number of forwards with gradients of each prepared model."""
        self.has_model_hooks = False
        """Whether hooks on the prepared models are installed, rather than only patches of modules
        returned by torch.compile."""
        self.idle_times: list[tuple[int, int]] = []
        """For each gap between phases: its end, and the nanoseconds in it in which the main thread
        did not run, because it slept or was preempted."""
        self._open: list[tuple[str, int]] = []
        self._exited_at: tuple[int, int] | None = None
        """End of the last span, and the CPU time of the main thread at that time."""

    @property
    def current_phase(self) -> str:
        """Innermost open phase; "" in code of the cell. May be read from other threads."""
        try:
            return self._open[-1][0]
        except IndexError:
            return ""

    def begin(self, name: str) -> None:
        """Start a phase."""
        now = time.time_ns()
        if self._exited_at is not None:
            since, ran = self._exited_at
            self.idle_times.append((now, max(0, now - since - (time.thread_time_ns() - ran))))
            self._exited_at = None
        self._open.append((name, now))

    def end(self, name: str) -> None:
        """End a phase if it is the innermost one."""
        if self._open and self._open[-1][0] == name:
            now = time.time_ns()
            self.spans[name].append((self._open.pop()[1], now))
            if not self._open:
                self._exited_at = now, time.thread_time_ns()

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Record the block as a phase. Does nothing on threads other than the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def on_forward(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Start the forward of a prepared model or of a module wrapped in it."""
        if torch.is_grad_enabled() and not any(name == "forward" for name, _ in self._open):
            self.forward_counts[model] += 1
            memory_probe.record_forward(model, args, kwargs)
        self.begin("forward")

    def close_open_spans(self) -> None:
        """End all open phases, which an interrupted forward or backward leaves open."""
        while self._open:
            self.end(self._open[-1][0])


class TemporaryPatches(ExitStack):
    """Temporarily replaced attributes and hooks; `close` undoes them in reverse order."""

    def around(self, owner: Any, name: str, body: Callable[..., Any]) -> None:
        """Replace a function by `body(original, ...)`. An inherited one is restored as such."""
        own, original = vars(owner).get(name), getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return body(original, *args, **kwargs)

        setattr(owner, name, replacement)
        if own is None:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, own)


def instrument(marks: PhaseSpans) -> TemporaryPatches:
    """Install the instrumentation, which records into `marks`."""
    patches = TemporaryPatches()

    def marked(phase: str) -> Callable[..., Any]:
        def body(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with marks.mark(phase):
                return original(*args, **kwargs)

        return body

    try:
        patches.around(torch.autograd, "backward", marked("backward"))
        patches.around(Accelerator, "backward", marked("backward"))
        patches.around(Accelerator, "clip_grad_norm_", marked("optimizer"))
        patches.around(torch.nn.utils, "clip_grad_norm_", marked("optimizer"))
        for cls in (AcceleratedOptimizer, deepspeed.SteppingOptimizerWrapper):
            patches.around(cls, "zero_grad", marked("optimizer"))
        patches.around(accelerate.data_loader, "send_to_device", marked("copies"))
        _mark_loaders(marks, patches)
        _mark_collectives(marks, patches)
        _mark_forwards(marks, patches)
        for name, classes in _OFFLOAD_METHODS.items() if is_offloading() else ():
            module = sys.modules.get(name)  # a module that is not imported is not in use
            for owner, methods in classes.items():
                cls = getattr(module, owner, None)
                for method in methods:
                    if cls is not None and method in vars(cls):
                        patches.around(cls, method, marked("offload"))
    except BaseException:
        patches.close()
        raise
    return patches


def _mark_loaders(marks: PhaseSpans, patches: TemporaryPatches) -> None:
    def take(original: Callable[[Any], Any], iterator: Any) -> Any:
        start_time, computed = time.perf_counter(), time.thread_time()
        with marks.mark("data"):
            batch = original(iterator)
        stats = marks.loader_stats.get(id(iterator))
        if stats is None:
            stats = marks.loader_stats[id(iterator)] = _describe_loader(iterator)
        stats.batches += 1
        stats.fetch_s += time.perf_counter() - start_time
        stats.fetch_cpu_s += time.thread_time() - computed
        return batch

    patches.around(dataloader._BaseDataLoaderIter, "__next__", take)  # noqa: SLF001


def _describe_loader(iterator: Any) -> DataLoaderStats:
    sampler = iterator._index_sampler  # noqa: SLF001
    base = getattr(sampler, "sampler", None)
    kinds = (sampler, base, getattr(base, "sampler", None), iterator._dataset)  # noqa: SLF001
    return DataLoaderStats(
        num_workers=iterator._num_workers,  # noqa: SLF001
        pin_memory=bool(iterator._pin_memory),  # noqa: SLF001
        batch_size=getattr(sampler, "batch_size", None),
        # Accelerate's BatchSamplerShard and IterableDatasetShard, torch's DistributedSampler
        sharded=any(
            part in type(item).__name__ for item in kinds for part in ("Shard", "Distributed")
        ),
        batches=0,
        fetch_s=0.0,
    )


def _mark_collectives(marks: PhaseSpans, patches: TemporaryPatches) -> None:
    def meet(
        original: Callable[..., Any], barrier: Any, group: Any, call: Any, *, wait: bool
    ) -> None:
        start_time = time.time_ns()
        with marks.mark("collective"):
            original(barrier, group, call, wait=wait)
        if threading.current_thread() is threading.main_thread():
            name = distributed_c10d._world.pg_names.get(group, str(group.group_name))  # noqa: SLF001
            span = (start_time, time.time_ns())
            marks.collective_calls.append(CollectiveCall(name, span, call.size_bytes))

    def wait(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start_time = time.time_ns()
        try:
            with marks.mark("collective"):
                return original(*args, **kwargs)
        finally:
            marks.wait_spans.append((start_time, time.time_ns()))

    patches.around(collective_check.CollectiveBarrier, "__call__", meet)
    patches.around(Work, "wait", wait)


def _mark_forwards(marks: PhaseSpans, patches: TemporaryPatches) -> None:
    """Record forwards of the prepared models, and of modules returned by torch.compile."""
    models = [prepared.model for prepared in prepared_models.all_models()]
    model_of = {id(module): model for model in models for module in _wrapped_modules(model)}

    def call(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(wrapper, *args, **kwargs)
        model = model_of.get(id(wrapper._orig_mod))  # noqa: SLF001
        if model is not None:
            marks.on_forward(model, args, kwargs)
        else:
            marks.begin("forward")
        try:
            return original(wrapper, *args, **kwargs)
        finally:
            marks.end("forward")

    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        patches.around(dynamo.OptimizedModule, "__call__", call)
    # Adding and removing hooks would cause torch.compile to recompile.
    marks.has_model_hooks = not memory_probe.is_compile_active()
    if marks.has_model_hooks:
        for model in models:
            for module in _wrapped_modules(model):
                _hook_forward(module, model, marks, patches)


def _wrapped_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a prepared model and the modules that engines and torch.compile wrap in it."""
    module: Any = model
    while isinstance(module, torch.nn.Module):
        yield module
        children = vars(module)["_modules"]
        module = children.get("_orig_mod", children.get("module"))


def _hook_forward(
    module: torch.nn.Module, model: torch.nn.Module, marks: PhaseSpans, patches: TemporaryPatches
) -> None:
    def begins(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            marks.on_forward(model, args, kwargs)

    def ends(*_: object) -> None:
        if not torch.compiler.is_compiling():
            marks.end("forward")

    # FSDP gathers in hooks, which our hooks enclose.
    before = module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
    after = module.register_forward_hook(ends, always_call=True)
    patches.callback(before.remove)
    patches.callback(after.remove)


# --------------------------------------------------------------------------- offload


def is_offloading() -> bool:
    """Return whether the backend of the measured model uses offloading."""
    probe = memory_probe.current_probe.probe
    options = probe.options if probe is not None else None
    return options is not None and options.offload_device != "none"


_OPTIMIZER_SWAPS = ("swap_in_optimizer_state", "swap_out_optimizer_state", "swap_out_gradients")
_OFFLOAD_METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper": {
        "PartitionedOptimizerSwapper": _OPTIMIZER_SWAPS
    },
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": {
        "PipelinedOptimizerSwapper": _OPTIMIZER_SWAPS
    },
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": {
        "AsyncPartitionedParameterSwapper": (
            "swap_in",
            "swap_out_and_release",
            "synchronize_reads",
            "synchronize_writes",
        ),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": ("copy_grads_in_partition",),
    },
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": (
            "_offload_grad_partition_at_boundary",
            "_optimizer_states_and_gradient_swap_in",
            "_optimizer_states_and_gradient_swap_out",
            "_swap_in_sub_group_to_flat_buffer",
            "_swap_out_offload_fp32_gradients",
        ),
    },
}
"""Module -> class -> methods of deepspeed 0.19.8 that read or write NVMe files or copy gradients to
the host. Updated parameters are copied back in the optimizer step itself."""


# --------------------------------------------------------------------------- lines


class LineSampler:
    """Samples the current line of the cell on the main thread every 10 ms, in a separate thread.

    Time outside of forward, backward and the other phases is attributed to the line, including the
    library code it calls.

    Args:
        marks: time spans, which tell the current phase.
    """

    def __init__(self, marks: PhaseSpans, cell_of: stacks.CellNamer) -> None:
        self._marks, self._cell_of = marks, cell_of
        self._seconds: dict[CellLine, float] = defaultdict(float)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="nbdist-profile", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def restart(self) -> None:
        """Clear the samples."""
        self._seconds.clear()

    def stop(self) -> None:
        """Stop sampling and join the thread."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def seconds_by_line(self) -> dict[CellLine, float]:
        """Seconds per line so far."""
        return dict(self._seconds)

    def _sample(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            now = time.perf_counter()
            if self._marks.current_phase not in _PASSES:
                place = cell_line_of(stacks.main_frame(), self._cell_of)
                if place is not None:
                    self._seconds[place] += now - last
            last = now


def slowest_lines(seconds: Mapping[CellLine, float], steps: int) -> list[LineProfile]:
    """Return the lines with the most time, in seconds per step."""
    longest = sorted(seconds.items(), key=lambda pair: -pair[1])[:MAX_LINES]
    return [
        LineProfile(
            cell=cell, line=line, source=source_text(file, line), seconds=spent / max(1, steps)
        )
        for (cell, file, line), spent in longest
    ]


def cell_line_of(frame: FrameType | None, cell_of: stacks.CellNamer) -> CellLine | None:
    """Return cell, file and line of the innermost frame in a cell, if there is one."""
    for outer in stacks.frames_outwards(frame):
        name = outer.f_code.co_filename
        if (cell := cell_of(name)) is not None:
            return cell[1], name, stacks.line_of(outer)
    return None


def source_text(file: str, line: int) -> str:
    """Return the text of a line of a cell, at most 120 characters."""
    return linecache.getline(file, line).strip()[:SOURCE_CHARS]
