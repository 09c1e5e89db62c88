"""What PyTorch's profiler (Kineto) saw in a window, as plain spans; runs on a rank.

Reads Kineto's raw events: torch's own tree of them takes seconds for a few steps. Shapes are
recorded only for a trace that leaves, for they cost as much again as all the rest.
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nbdist.profile.figures import Operator
from nbdist.rank.profiling.intervals import Span, union
from nbdist.rank.profiling.partition import NS, Collective

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.rank.profiling.marks import Met

MOST_OPERATORS = 15
_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""Operators of c10d in torch 2.13 -> what torch.distributed calls them. Names of gloo's own
events do not tell: it does a reduce_scatter as an all_reduce."""
_KERNELS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send",
}
"""Part of the name of NCCL's kernels."""
_C10D = "c10d::"
_GLOO = "gloo:"
_COPY = "aten::copy_"
_NOT_COMPUTING = (_C10D, "_c10d_functional::", "autograd::engine", "torch::autograd")
WORLD = "0"
"""torch's name of the first process group."""


@dataclass(slots=True)
class Seen:
    """Events of one window."""

    operators: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    """Of these, copies from one tensor into another."""
    called: list[tuple[int, int, str]] = field(default_factory=list)
    """Begin, end and name of operators that begin a collective."""
    moved: list[Span] = field(default_factory=list)
    """gloo was at a collective."""
    table: list[Operator] = field(default_factory=list)
    device: list[Kernel] = field(default_factory=list)


@dataclass(slots=True)
class Kernel:
    """Something that a device did."""

    name: str
    kind: str
    """As Kineto calls it: kernel, gpu_memcpy, gpu_memset."""
    span: Span
    launched: int
    """When the main thread asked for it."""
    meta: dict[str, Any]


class Recorder:
    """PyTorch's profiler for the length of a window."""

    def __init__(self, device: torch.device, *, shapes: bool) -> None:
        """Prepare to record the CPU, and the device where it is a GPU."""
        self._on_gpu = device.type == "cuda"
        self._device = device
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=shapes)
        self._running = False

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: another profiler runs already.
        """
        with _quietly():
            self._profile.start()
        self._running = True
        self.synchronize()

    def stop(self) -> None:
        """End; a second time nothing."""
        if self._running:
            self._running = False
            with _quietly():
                self._profile.stop()

    def synchronize(self) -> None:
        """Wait for the device, so that what was asked for lies before this moment."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def save(self, path: Path) -> None:
        """Write the trace as Chrome, Perfetto and HTA read it."""
        with _quietly():
            self._profile.export_chrome_trace(str(path))

    def seen(self, window: Span, main_thread: int, steps: int) -> Seen:
        """Read the events.

        Args:
            window: those that touch it count.
            main_thread: its native number.
            steps: in the window.
        """
        found, table = Seen(), _Table(steps)
        launches: dict[int, int] = {}
        on_device: list[Any] = []
        raw: Any = self._profile.profiler
        for event in raw.kineto_results.events():
            begin = event.start_ns()
            end = begin + event.duration_ns()
            if end <= window[0] or begin >= window[1]:
                continue
            if event.device_type() == DeviceType.CUDA:
                on_device.append(event)
                continue
            kind, name = event.activity_type(), event.name()
            if kind in {"cuda_runtime", "cuda_driver"}:
                launches[event.correlation_id()] = begin
            elif name.startswith(_GLOO):
                found.moved.append((begin, end))
            elif kind == "cpu_op":
                thread = event.device_resource_id()
                table.add(thread, begin, end, name)
                if name.startswith(_C10D) and name.removeprefix(_C10D) in _COLLECTIVES:
                    found.called.append((begin, end, name.removeprefix(_C10D)))
                elif thread == main_thread and _computes(name):
                    found.operators.append((begin, end))
                    if name == _COPY:
                        found.copies.append((begin, end))
        found.device = [_kernel(event, launches) for event in on_device]
        found.table = table.longest(found.device)
        return found


def _computes(name: str) -> bool:
    """Whether an operator computes by itself; nodes of autograd may wait inside."""
    return "::" in name and not name.startswith(_NOT_COMPUTING)


def _kernel(event: Any, launches: Mapping[int, int]) -> Kernel:
    begin = event.start_ns()
    name = event.name()
    meta = json.loads(f"{{{event.metadata_json()}}}") if "nccl" in name else {}
    return Kernel(
        name=name,
        kind=event.activity_type(),
        span=(begin, begin + event.duration_ns()),
        launched=launches.get(event.correlation_id(), begin),
        meta=meta,
    )


class _Table:
    """Self time by operator, as torch.profiler's own table has it."""

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._events: dict[int, list[tuple[int, int, str]]] = defaultdict(list)

    def add(self, thread: int, begin: int, end: int, name: str) -> None:
        self._events[thread].append((begin, -end, name))

    def longest(self, device: Sequence[Kernel]) -> list[Operator]:
        seconds: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for events in self._events.values():
            inside: list[tuple[int, str]] = []
            for begin, negative_end, name in sorted(events):
                end = -negative_end
                while inside and inside[-1][0] <= begin:
                    inside.pop()
                if inside:
                    seconds[inside[-1][1]] -= (end - begin) * NS
                inside.append((end, name))
                seconds[name] += (end - begin) * NS
                counts[name] += 1
        if device:
            seconds.clear()
            counts.clear()
            for one in device:
                seconds[one.name] += (one.span[1] - one.span[0]) * NS
                counts[one.name] += 1
        found = [
            Operator(name=name, count=counts[name] / self._steps, seconds=spent / self._steps)
            for name, spent in seconds.items()
        ]
        return sorted(found, key=lambda one: -one.seconds)[:MOST_OPERATORS]


def collectives(seen: Seen, met: Iterable[Met]) -> list[Collective]:
    """Put together what c10d, gloo and our own meeting saw of each collective.

    gloo works them off in the order in which they were called.
    """
    moved, meetings = iter(sorted(seen.moved)), sorted(met, key=lambda one: one.span)
    moving, k = next(moved, None), 0
    found = []
    for begin, end, name in sorted(seen.called):
        while moving is not None and moving[0] < begin:
            moving = next(moved, None)  # it was called before the window
        span, moving = (moving, next(moved, None)) if moving is not None else ((begin, end), None)
        ours = None
        while k < len(meetings) and meetings[k].span[1] <= begin:
            ours, k = meetings[k], k + 1
        found.append(
            Collective(
                name=_COLLECTIVES[name],
                group=ours.group if ours else WORLD,
                begin=ours.span[0] if ours else begin,
                moving=span,
                bytes=ours.bytes if ours else 0,
                meeting=ours.span if ours else None,
            )
        )
    return found


def of_device(
    seen: Seen, marks: Mapping[str, Sequence[Span]], *, offloads: bool
) -> tuple[list[Collective], dict[str, list[Span]]]:
    """Tell a GPU's collectives, computing by phase, and copies apart."""
    phases = {name: union(marks.get(name, ())) for name in ("optimizer", "backward", "forward")}
    kernels: dict[str, list[Span]] = {name: [] for name in (*phases, "copies", "offload")}
    moved = []
    for one in seen.device:
        if "nccl" in one.name:
            moved.append(_of_nccl(one))
            continue
        phase = next((name for name, spans in phases.items() if _within(one.launched, spans)), "")
        host = one.kind == "gpu_memcpy" and ("HtoD" in one.name or "DtoH" in one.name)
        if host:
            kernels["offload" if phase and offloads else "copies"].append(one.span)
        else:
            kernels[phase or "forward"].append(one.span)
    return moved, kernels


def _of_nccl(one: Kernel) -> Collective:
    name = next((ours for theirs, ours in _KERNELS.items() if theirs in one.name), "other")
    elements = max(int(one.meta.get(f"{way} msg nelems", 0)) for way in ("In", "Out"))
    return Collective(
        name=name,
        group=str(one.meta.get("Process Group Name", WORLD)),
        begin=one.span[0],
        moving=one.span,
        bytes=elements * _BYTES.get(str(one.meta.get("dtype", "")), 4),
    )


_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}
"""Of an element, by the name that NCCL's events have for its type."""


def _within(moment: int, spans: Sequence[Span]) -> bool:
    place = bisect_right(spans, (moment, 1 << 63)) - 1
    return place >= 0 and spans[place][1] >= moment


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what Kineto writes to stderr out of the cell: a line at each start and stop."""
    with tempfile.TemporaryFile() as drain:
        kept = os.dup(2)
        os.dup2(drain.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
