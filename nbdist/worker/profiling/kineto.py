"""Recording with the PyTorch profiler (Kineto), and conversion of its events to time spans.

Raw Kineto events are read, because building torch's event tree takes seconds for a few steps.
Shapes are recorded only if a trace is exported, because they double the overhead.
"""

from __future__ import annotations

import functools
import gc
import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from nbdist.profiler.measurements import OperatorStats
from nbdist.worker.profiling.step_breakdown import SECONDS_PER_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nbdist.worker.profiling.instrumentation import Patches
    from nbdist.worker.profiling.intervals import Span

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
    comms: list[Comms] = field(default_factory=list)

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
class Comms:
    """A call of ProcessGroupNCCL that launches a kernel."""

    span: Span
    group: str
    bytes: int
    """Size of the larger of input and output."""

    @classmethod
    def of(cls, event: Any) -> Comms:
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


WORLD = "0"
"""Name of the default process group in torch."""
_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Short": 2} | (
    dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1)
)
"""Dtype name in Kineto events -> bytes per element."""


def quiet() -> None:
    """Suppress the line that Kineto writes to stderr at each start and stop.

    Call it before the first profile of a process.
    """
    # In torch 2.13 the line has the highest log level. Kineto reads the variable only once.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


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
        """Prepare to record the CPU, and the device if it is a GPU.

        Args:
            device: device of the rank.
            shapes: whether to record input shapes, for an exported trace.
        """
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

    def yield_to_user_profiler(self, patches: Patches, yielded: Callable[[], object]) -> None:
        """Stop when the cell prepares its own profiler, because there can be only one.

        Args:
            patches: the detection is active until these are undone.
            yielded: called before the other profiler is prepared; must stop this one.
        """

        def first(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
            def prepared(theirs: Any) -> None:
                yielded()
                prepare(theirs)

            return prepared

        patches.replace(torch.autograd.profiler.profile, "_prepare_trace", first)

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
            steps: number of steps in the window.
        """
        result, table = TraceEvents(), _OperatorTable(steps)
        launches: dict[int, int] = {}
        on_device: list[Any] = []
        raw: Any = self._profile.profiler
        for event in raw.kineto_results.events():  # 5,000 per step; training waits for it
            begin = event.start_ns()
            end = begin + event.duration_ns()
            kind = event.activity_type()
            if kind in _LAUNCHES:  # also before the window, as the device lags
                launches[event.correlation_id()] = begin
            elif kind == "cpu_op" and (name := event.name()) == _COMMS:
                result.comms.append(Comms.of(event))
            elif end <= window[0] or begin >= window[1]:
                continue
            elif kind == "cpu_op":
                thread = event.device_resource_id()
                if name.startswith(_GLOO):
                    result.moved.append((begin, end))
                else:
                    table.add(thread, begin, end, name)
                    result.add_operator(name, (begin, end), on_main=thread == main_thread)
            elif event.device_type() == DeviceType.CUDA:
                if kind in _ON_DEVICE:
                    on_device.append(event)
            elif event.name().startswith(_GLOO):
                result.moved.append((begin, end))
        result.device_events = [_kernel(event, launches) for event in on_device]
        result.operator_table = table.longest(result.device_events)
        return result


@functools.cache
def _computes(name: str) -> bool:
    """Return whether an operator computes. Autograd nodes do not count, as they may wait."""
    return ("::" in name and not name.startswith(_NOT_COMPUTING)) or name.startswith(_COMPILED)


def _kernel(event: Any, launches: Mapping[int, int]) -> DeviceEvent:
    begin = event.start_ns()
    return DeviceEvent(
        name=event.name(),
        kind=event.activity_type(),
        span=(begin, begin + event.duration_ns()),
        launched=launches.get(event.correlation_id(), begin),
    )


class _OperatorTable:
    """Self time per operator, as in the table of torch.profiler."""

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._events: dict[int, list[tuple[int, int, str]]] = defaultdict(list)

    def add(self, thread: int, begin: int, end: int, name: str) -> None:
        self._events[thread].append((begin, -end, name))

    def longest(self, device: Sequence[DeviceEvent]) -> list[OperatorStats]:
        spent: dict[str, int] = defaultdict(int)
        counts: dict[str, int] = defaultdict(int)
        for events in self._events.values():
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
        if device:
            spent.clear()
            counts.clear()
            for event in device:
                spent[event.name] += event.span[1] - event.span[0]
                counts[event.name] += 1
        operators = [
            OperatorStats(
                name=name,
                count=counts[name] / self._steps,
                seconds=ns * SECONDS_PER_NS / self._steps,
            )
            for name, ns in spent.items()
        ]
        return sorted(operators, key=lambda operator: -operator.seconds)[:MAX_OPERATORS]
