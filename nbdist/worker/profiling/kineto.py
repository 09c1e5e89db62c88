"""What PyTorch's profiler (Kineto) saw in a window, as plain spans; runs on a rank.

Reads Kineto's raw events: torch's own tree of them takes seconds for a few steps. Shapes are
recorded only for a trace that leaves, for they cost as much again as all the rest.
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

from nbdist.profiler.measurements import Operator
from nbdist.worker.profiling.step_breakdown import NS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nbdist.worker.profiling.instrumentation import Patches
    from nbdist.worker.profiling.intervals import Span

MOST_OPERATORS = 15
_C10D = "c10d::"
_GLOO = "gloo:"
_COPY = "aten::copy_"
_COMMS = "record_param_comms"
"""An operator that ProcessGroupNCCL records around each call, with what it is called with."""
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Not the annotations, which Kineto repeats on the device."""
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_COMPILED = "Torch-Compiled Region"
_NOT_COMPUTING = (_C10D, "_c10d_functional::", "autograd::engine", "torch::autograd")


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
    comms: list[Comms] = field(default_factory=list)

    def add(self, name: str, span: Span, *, on_main: bool) -> None:
        """Take in an operator of the CPU."""
        if name.startswith(_C10D):
            self.called.append((*span, name.removeprefix(_C10D)))
        elif on_main and _computes(name):
            self.operators.append(span)
            if name == _COPY:
                self.copies.append(span)


@dataclass(slots=True)
class Kernel:
    """Something that a device did."""

    name: str
    kind: str
    """As Kineto calls it: kernel, gpu_memcpy, gpu_memset."""
    span: Span
    launched: int
    """When a thread asked for it."""


@dataclass(slots=True)
class Comms:
    """A call of ProcessGroupNCCL, inside which it launches its kernel."""

    span: Span
    group: str
    bytes: int
    """Of what goes in or comes out, whichever is more."""

    @classmethod
    def of(cls, event: Any) -> Comms:
        """Read the event of a call (torch 2.13: numbers as text, names in quotation marks)."""
        told: dict[str, str] = getattr(event, "extra_meta", dict)()  # not in every torch
        said = {key: value.strip('"') for key, value in told.items()}
        elements = max(int(said.get(f"{way} msg nelems", 0)) for way in ("In", "Out"))
        begin = event.start_ns()
        return cls(
            span=(begin, begin + event.duration_ns()),
            group=said.get("Process Group Name", WORLD),
            bytes=elements * _BYTES.get(said.get("dtype", ""), 4),
        )


WORLD = "0"
"""torch's name of the first process group."""
_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Short": 2} | (
    dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1)
)
"""Of an element, by torch's name of its type."""


def quiet() -> None:
    """Keep the line that Kineto writes to stderr at each start and stop out of the cells.

    It has its highest level (torch 2.13). Kineto reads this once, before the first profile of a
    process.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def is_running() -> bool:
    """Whether the cell has a profiler of its own: one that runs, or is prepared to by a schedule.

    Kineto has one session, and the process dies where another profiler has ended a prepared one.
    """
    if torch._C._autograd._profiler_enabled():  # noqa: SLF001
        return True
    cls = torch.autograd.profiler.profile
    found = (one for one in gc.get_objects() if type(one) is cls)
    return any(one.entered and one.kineto_results is None for one in found)


class Recorder:
    """PyTorch's profiler for the length of a window."""

    def __init__(self, device: torch.device, *, shapes: bool) -> None:
        """Prepare to record the CPU, and the device where it is a GPU."""
        self._on_gpu = device.type == "cuda"
        self._device = device
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
        # a quarter of what recording costs; only a viewer of traces has a use for it
        config = _ExperimentalConfig(disable_external_correlation=not shapes)
        self._profile = profile(
            activities=activities, record_shapes=shapes, experimental_config=config
        )
        self._running = False

    def start(self) -> None:
        """Begin, where no other profiler runs."""
        self._profile.start()
        self._running = True
        self.synchronize()

    def give_way(self, patches: Patches, yielded: Callable[[], object]) -> None:
        """Stop where the cell prepares a profiler of its own, for there can be one.

        Args:
            patches: until these are undone.
            yielded: called before the other one is prepared; stops this one.
        """

        def first(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
            def prepared(theirs: Any) -> None:
                yielded()
                prepare(theirs)

            return prepared

        patches.replace(torch.autograd.profiler.profile, "_prepare_trace", first)

    def stop(self) -> None:
        """End; a second time nothing."""
        if self._running:
            self._running = False
            self._profile.stop()

    def forget(self) -> None:
        """Free the events: torch's profiler (2.13) refers to itself, and they would stay."""
        self._profile.profiler = None

    def synchronize(self) -> None:
        """Wait for the device, so that what was asked for lies before this moment."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def save(self, path: Path) -> None:
        """Write the trace as Chrome, Perfetto and HTA read it."""
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
        for event in raw.kineto_results.events():  # 5,000 a step: training waits for this loop
            begin = event.start_ns()
            end = begin + event.duration_ns()
            kind = event.activity_type()
            if kind in _LAUNCHES:  # before the window too: the device is behind
                launches[event.correlation_id()] = begin
            elif kind == "cpu_op" and (name := event.name()) == _COMMS:
                found.comms.append(Comms.of(event))
            elif end <= window[0] or begin >= window[1]:
                continue
            elif kind == "cpu_op":
                thread = event.device_resource_id()
                if name.startswith(_GLOO):
                    found.moved.append((begin, end))
                else:
                    table.add(thread, begin, end, name)
                    found.add(name, (begin, end), on_main=thread == main_thread)
            elif event.device_type() == DeviceType.CUDA:
                if kind in _ON_DEVICE:
                    on_device.append(event)
            elif event.name().startswith(_GLOO):
                found.moved.append((begin, end))
        found.device = [_kernel(event, launches) for event in on_device]
        found.table = table.longest(found.device)
        return found


@functools.cache
def _computes(name: str) -> bool:
    """Whether an operator computes by itself; nodes of autograd may wait inside."""
    return ("::" in name and not name.startswith(_NOT_COMPUTING)) or name.startswith(_COMPILED)


def _kernel(event: Any, launches: Mapping[int, int]) -> Kernel:
    begin = event.start_ns()
    return Kernel(
        name=event.name(),
        kind=event.activity_type(),
        span=(begin, begin + event.duration_ns()),
        launched=launches.get(event.correlation_id(), begin),
    )


class _Table:
    """Self time by operator, as torch.profiler's own table has it."""

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._events: dict[int, list[tuple[int, int, str]]] = defaultdict(list)

    def add(self, thread: int, begin: int, end: int, name: str) -> None:
        self._events[thread].append((begin, -end, name))

    def longest(self, device: Sequence[Kernel]) -> list[Operator]:
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
            for one in device:
                spent[one.name] += one.span[1] - one.span[0]
                counts[one.name] += 1
        found = [
            Operator(name=name, count=counts[name] / self._steps, seconds=ns * NS / self._steps)
            for name, ns in spent.items()
        ]
        return sorted(found, key=lambda one: -one.seconds)[:MOST_OPERATORS]
