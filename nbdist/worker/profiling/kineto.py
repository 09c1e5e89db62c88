"""Recording with the PyTorch profiler (Kineto), and conversion of its events to time spans.

Collectives are combined from events of c10d, gloo, NCCL and the collective check.

Raw Kineto events are read, because building torch's event tree takes seconds for a few steps.
Shapes are recorded only if a trace is exported, because they double the overhead.
"""

from __future__ import annotations

import functools
import gc
import os
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from nbdist.profiler.measurements import OperatorStats
from nbdist.worker.profiling.step_breakdown import SECONDS_PER_NS, CollectiveSpans, Span, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.worker.profiling.instrumentation import CollectiveCall

WORLD = "0"
"""Name of the default process group in torch."""
_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Short": 2} | (
    dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1)
)
"""Dtype name in Kineto events -> bytes per element."""
MAX_OPERATORS = 15
_C10D = "c10d::"
_GLOO = "gloo:"
_COPY = "aten::copy_"
_COMMS = "record_param_comms"
"""Operator that ProcessGroupNCCL records around each call, with its arguments."""
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Device activities, without the annotations that Kineto repeats on the device."""
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_COMPILED = "Torch-Compiled Region"
_NOT_COMPUTING = (_C10D, "_c10d_functional::", "autograd::engine", "torch::autograd")


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
"""c10d operators in torch 2.13 -> names in torch.distributed. The names of gloo's own events are
not used, since gloo runs a reduce_scatter as an all_reduce."""
_KERNELS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send",
}
"""Part of the name of an NCCL kernel -> name in torch.distributed."""


@dataclass(slots=True)
class TraceEvents:
    """Events of one window."""

    operators: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    """Spans in `operators` of copies from one tensor to another."""
    collective_calls: list[tuple[int, int, str]] = field(default_factory=list)
    """Start, end and name of operators that start a collective."""
    moved: list[Span] = field(default_factory=list)
    """Spans in which gloo ran a collective."""
    operator_table: list[OperatorStats] = field(default_factory=list)
    device_events: list[DeviceEvent] = field(default_factory=list)
    comms: list[NcclCall] = field(default_factory=list)

    def add_operator(self, name: str, span: Span, *, on_main: bool) -> None:
        """Add a CPU operator."""
        if name.startswith(_C10D):
            self.collective_calls.append((*span, name.removeprefix(_C10D)))
        elif on_main and _computes(name):
            self.operators.append(span)
            if name == _COPY:
                self.copies.append(span)


@dataclass(slots=True)
class DeviceEvent:
    """A kernel or memory operation on a device."""

    name: str
    kind: str
    """Kineto activity type: kernel, gpu_memcpy, gpu_memset."""
    span: Span
    launched: int
    """Time at which a thread launched it."""


@dataclass(slots=True)
class NcclCall:
    """A call of ProcessGroupNCCL that launches a kernel."""

    span: Span
    group: str
    bytes: int
    """Size of the larger of input and output."""

    @classmethod
    def of(cls, event: Any) -> NcclCall:
        """Create from the Kineto event of a call."""
        raw: dict[str, str] = getattr(event, "extra_meta", dict)()  # missing in some torch versions
        metadata = {key: value.strip('"') for key, value in raw.items()}  # torch 2.13 adds quotes
        elements = max(int(metadata.get(f"{way} msg nelems", 0)) for way in ("In", "Out"))
        begin = event.start_ns()
        return cls(
            span=(begin, begin + event.duration_ns()),
            group=metadata.get("Process Group Name", WORLD),
            bytes=elements * _BYTES.get(metadata.get("dtype", ""), 4),
        )


def quiet() -> None:
    """Suppress what Kineto and torch write to stderr at each start and stop.

    Call it before the first profile of a process.
    """
    # In torch 2.13 the line has the highest log level. Kineto reads the variable only once.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # torch 2.11 warns at each start; a window is one cycle.
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")


def has_user_profiler() -> bool:
    """Return whether the cell uses its own torch profiler, running or prepared by a schedule."""
    if torch._C._autograd._profiler_enabled():  # noqa: SLF001
        return True
    # Kineto has a single session. The process crashes if a profiler ends the session that another
    # one has prepared.
    cls = torch.autograd.profiler.profile
    profilers = (item for item in gc.get_objects() if type(item) is cls)
    return any(item.entered and item.kineto_results is None for item in profilers)


class KinetoRecorder:
    """Records one window with the PyTorch profiler."""

    def __init__(self, device: torch.device, *, shapes: bool) -> None:
        """Prepare to record the CPU, and the device if it is a GPU."""
        self._on_gpu = device.type == "cuda"
        self._device = device
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
        # External correlation is a quarter of the overhead and only used by trace viewers.
        config = _ExperimentalConfig(disable_external_correlation=not shapes)
        self._profile = profile(
            activities=activities, record_shapes=shapes, experimental_config=config
        )
        self._running = False

    def start(self) -> None:
        """Start recording. No other profiler may be running."""
        self._profile.start()
        self._running = True
        self.synchronize()

    def stop(self) -> None:
        """Stop recording. Does nothing if already stopped."""
        if self._running:
            self._running = False
            self._profile.stop()

    def free_events(self) -> None:
        """Free the recorded events."""
        # The profiler of torch 2.13 is in a reference cycle that would keep them alive.
        self._profile.profiler = None

    def synchronize(self) -> None:
        """Wait until the device has finished all launched work."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def save(self, path: Path) -> None:
        """Export the trace in Chrome format, which Perfetto and HTA can read too."""
        self._profile.export_chrome_trace(str(path))

    def read_events(self, window: Span, main_thread: int, steps: int) -> TraceEvents:
        """Convert the recorded events.

        Args:
            window: events outside of it are ignored.
            main_thread: native ID of the main thread.
        """
        result = TraceEvents()
        by_thread: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        launches: dict[int, int] = {}
        on_device: list[Any] = []
        raw: Any = self._profile.profiler
        for event in raw.kineto_results.events():  # 5,000 per step; training waits for it
            begin = event.start_ns()
            end = begin + event.duration_ns()
            kind = activity_type(event)
            if kind in _LAUNCHES:  # also before the window, as the device lags
                launches[event.correlation_id()] = begin
            elif kind == "cpu_op" and (name := event.name()) == _COMMS:
                result.comms.append(NcclCall.of(event))
            elif end <= window[0] or begin >= window[1]:
                continue
            elif event.name().startswith(_GLOO):
                result.moved.append((begin, end))
            elif kind == "cpu_op":
                thread = event.device_resource_id()
                by_thread[thread].append((begin, -end, name))
                result.add_operator(name, (begin, end), on_main=thread == main_thread)
            elif event.device_type() == DeviceType.CUDA and kind in _ON_DEVICE:
                on_device.append(event)
        for event in on_device:
            begin = event.start_ns()
            result.device_events.append(
                DeviceEvent(
                    name=event.name(),
                    kind=activity_type(event),
                    span=(begin, begin + event.duration_ns()),
                    launched=launches.get(event.correlation_id(), begin),
                )
            )
        result.operator_table = _operator_table(by_thread, result.device_events, steps)
        return result


def activity_type(event: Any) -> str:
    """Return Kineto's name for the type of an event, which torch 2.11 does not tell."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    if event.is_user_annotation() or event.name() == "[memory]":
        return "user_annotation"
    if event.device_type() == DeviceType.CUDA:
        return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(event.name()[:6], "kernel")
    is_launch = event.name().startswith(("cu", "hip"))
    return "cuda_runtime" if is_launch else "cpu_op"


@functools.cache
def _computes(name: str) -> bool:
    """Return whether an operator computes. Autograd nodes do not count, as they may wait."""
    return ("::" in name and not name.startswith(_NOT_COMPUTING)) or name.startswith(_COMPILED)


def _operator_table(
    by_thread: Mapping[int, list[tuple[int, int, str]]], device: Sequence[DeviceEvent], steps: int
) -> list[OperatorStats]:
    """Return the operators with the most self time, as in the table of torch.profiler.

    Args:
        by_thread: begin, negative end and name of the operators of each thread.
        device: kernels; if there are any, they are counted instead.
    """
    spent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in device:
        spent[event.name] += event.span[1] - event.span[0]
        counts[event.name] += 1
    for events in () if device else by_thread.values():
        inside: list[tuple[int, str]] = []
        for begin, negative_end, name in sorted(events):
            end = -negative_end
            while inside and inside[-1][0] <= begin:
                inside.pop()
            if inside:
                spent[inside[-1][1]] += begin - end
            inside.append((end, name))
            spent[name] += end - begin
            counts[name] += 1
    steps = max(1, steps)
    return [
        OperatorStats(name=name, count=counts[name] / steps, seconds=ns * SECONDS_PER_NS / steps)
        for name, ns in spent.most_common(MAX_OPERATORS)
    ]


def merge_collectives(
    events: TraceEvents, calls: Iterable[CollectiveCall]
) -> list[CollectiveSpans]:
    """Combine the events of c10d, gloo and the collective check for each collective."""
    # gloo executes collectives in the order of the calls.
    moved, meetings = iter(sorted(events.moved)), sorted(calls, key=lambda call: call.span)
    moving, k = next(moved, None), 0
    merged = []
    for begin, end, called in sorted(events.collective_calls):
        if (name := _COLLECTIVES.get(called)) is None:
            continue
        while moving is not None and moving[0] < begin:
            moving = next(moved, None)  # called before the window
        span, moving = (moving, next(moved, None)) if moving is not None else ((begin, end), None)
        ours = None
        while k < len(meetings) and meetings[k].span[1] <= begin:
            ours, k = meetings[k], k + 1
        merged.append(
            CollectiveSpans(
                name=name,
                group=ours.group if ours else WORLD,
                begin_ns=ours.span[0] if ours else begin,
                transfer=span,
                size_bytes=ours.size_bytes if ours else 0,
                barrier=ours.span if ours else None,
            )
        )
    return merged


def split_device_events(
    events: TraceEvents, marks: Mapping[str, Sequence[Span]], *, offloads: bool
) -> tuple[list[CollectiveSpans], dict[str, list[Span]]]:
    """Split the events of a GPU into collectives, computation by phase, and copies.

    Args:
        marks: spans of the main thread by phase.
        offloads: whether copies inside of a phase are offload traffic.
    """
    phases = {name: union(marks.get(name, ())) for name in ("optimizer", "backward", "forward")}
    kernels: dict[str, list[Span]] = {name: [] for name in (*phases, "copies", "offload")}
    for event in events.device_events:
        if "nccl" in event.name:
            continue
        phase = ""
        for name, spans in phases.items():
            index = bisect_right(spans, (event.launched, 1 << 63)) - 1
            if index >= 0 and spans[index][1] >= event.launched:
                phase = name
                break
        host = event.kind == "gpu_memcpy" and ("HtoD" in event.name or "DtoH" in event.name)
        if host:
            kernels["offload" if phase and offloads else "copies"].append(event.span)
        else:
            kernels[phase or "forward"].append(event.span)
    return list(_of_nccl(events)), kernels


def _of_nccl(events: TraceEvents) -> Iterator[CollectiveSpans]:
    """Find the call that launched each NCCL kernel: the innermost call around the launch."""
    kernels = sorted(
        (event for event in events.device_events if "nccl" in event.name), key=lambda k: k.launched
    )
    calls = deque(sorted((call for call in events.comms if call.bytes), key=lambda c: c.span))
    waiting: list[NcclCall] = []
    last: NcclCall | None = None
    for kernel in kernels:
        while calls and calls[0].span[0] <= kernel.launched:
            waiting.append(calls.popleft())
        around = [call for call in waiting if call.span[1] >= kernel.launched]
        # Coalesced calls launch one kernel after the last call, with the bytes of all of them.
        launched = around[-1:] or waiting
        waiting = around[:-1]
        if launched:
            last = launched[-1]
        elif last is not None and last.span[1] < kernel.launched:
            last = None  # otherwise it is another kernel of the same call
        yield CollectiveSpans(
            name=next(
                (ours for user_profile, ours in _KERNELS.items() if user_profile in kernel.name),
                "other",
            ),
            group=last.group if last is not None else WORLD,
            begin_ns=kernel.span[0],
            transfer=kernel.span,
            size_bytes=sum(call.bytes for call in launched),
        )
