"""Breakdown of a window into the parts of a step, computed from time spans.

Spans are in Unix nanoseconds. The whole window is divided, and the results are averaged over its
steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.profiler.measurements import STEP_PARTS, CollectiveStats, StepPart
from nbdist.worker.profiling.intervals import (
    Span,
    difference,
    intersection,
    overlapping,
    total_ns,
    union,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MIN_GAP_NS = 100_000
"""Shorter gaps between operators are dispatch overhead and count as computation."""
SECONDS_PER_NS = 1e-9


@dataclass(slots=True, kw_only=True)
class CollectiveSpans:
    """One collective on this rank."""

    name: str
    """Name in torch.distributed."""
    group: str
    begin_ns: int
    """Time at which this rank called it."""
    transfer: Span
    """Span in which the backend executed it."""
    size_bytes: int = 0
    barrier: Span | None = None
    """Span of the collective check before it; None if it was called from C++."""

    @property
    def all_spans(self) -> list[Span]:
        """Spans of the collective, including the collective check."""
        return union([self.transfer, self.barrier] if self.barrier else [self.transfer])


@dataclass(slots=True, kw_only=True)
class WindowTrace:
    """Events of a window as time spans."""

    window: Span
    num_steps: int
    marks: Mapping[str, Sequence[Span]]
    """Spans of the main thread by phase: data, copies, forward, backward, optimizer, offload."""
    operators: Sequence[Span]
    """Spans of computing torch operators on the main thread."""
    collectives: Sequence[CollectiveSpans]
    wait_spans: Sequence[Span] = ()
    """Spans in which Python waited for a collective that it had called."""
    idle_s: float = 0.0
    """Time outside of all phases in which the main thread slept or was preempted."""
    has_whole_forwards: bool = True
    """Whether the forward spans are complete. False if torch.compile compiled parts of a model."""
    kernels: Mapping[str, Sequence[Span]] | None = None
    """On a GPU: kernel spans by the phase that launched them, and "copies" and "offload"."""


@dataclass(slots=True, kw_only=True)
class StepBreakdown:
    """Breakdown of a step, in seconds per step."""

    parts: dict[str, float]
    traffic: list[CollectiveStats]
    overlapped_s: float
    collective_begins: dict[str, list[list[float]]] = field(default_factory=dict)


def break_down_step(trace: WindowTrace) -> StepBreakdown:
    """Break down a window into the parts of a step."""
    computing = _computing(trace)
    waits = union(trace.wait_spans)
    exposed = [_exposed(collective, computing, waits, trace) for collective in trace.collectives]
    all_exposed = union(span for spans in exposed for span in spans)
    parts = (_on_device if trace.kernels is not None else _on_cpu)(trace, all_exposed, computing)
    everything = intersection(
        [trace.window], (collective.transfer for collective in trace.collectives)
    )
    return StepBreakdown(
        parts={part: parts.get(part, 0.0) / trace.num_steps for part in STEP_PARTS},
        traffic=_traffic(trace, exposed),
        overlapped_s=total_ns(difference(everything, all_exposed))
        * SECONDS_PER_NS
        / trace.num_steps,
        collective_begins=_begins(trace, exposed),
    )


def _computing(trace: WindowTrace) -> list[Span]:
    if trace.kernels is None:
        return union(trace.operators, gap=MIN_GAP_NS)
    return union(
        span for phase in ("forward", "backward", "optimizer") for span in trace.kernels[phase]
    )


def _exposed(
    collective: CollectiveSpans,
    computing: Sequence[Span],
    waits: Sequence[Span],
    trace: WindowTrace,
) -> list[Span]:
    """Return the spans of a collective without overlapping computation."""
    if trace.kernels is not None or collective.barrier is None:
        spans = difference([collective.transfer], overlapping(computing, collective.transfer))
    else:
        spans = [
            collective.barrier,
            *intersection([collective.transfer], overlapping(waits, collective.transfer)),
        ]
    return intersection([trace.window], spans)


class _TimePartition:
    """Assigns each moment of a window to the first part that claims it."""

    def __init__(self, window: Span) -> None:
        self.left: list[Span] = [window]
        self.parts: dict[str, float] = defaultdict(float)

    def give(self, part: StepPart, spans: Iterable[Span]) -> None:
        taken = intersection(self.left, spans)
        self.left = difference(self.left, taken)
        self.parts[part] += total_ns(taken) * SECONDS_PER_NS

    def give_seconds(self, part: StepPart, others: StepPart, seconds: float) -> None:
        """Assign the rest: `seconds` of it to `part`, the remainder to `others`."""
        rest = total_ns(self.left) * SECONDS_PER_NS
        self.parts[part] += min(rest, seconds)
        self.parts[others] += max(0.0, rest - seconds)
        self.left = []


def _on_cpu(trace: WindowTrace, exposed: list[Span], computing: list[Span]) -> dict[str, float]:
    """Break down a window by the activity of the main thread."""
    marks = defaultdict(list, trace.marks)
    divided = _TimePartition(trace.window)
    divided.give("data", marks["data"])
    divided.give("offload", marks["offload"])
    divided.give("communication", exposed)
    divided.give("copies", marks["copies"])
    divided.give("optimizer", marks["optimizer"])
    divided.give("backward", marks["backward"])
    divided.give("forward", marks["forward"])
    divided.give("forward", intersection(computing, _losses(trace)))
    divided.give_seconds("idle", "python", trace.idle_s)
    return divided.parts


def _on_device(trace: WindowTrace, exposed: list[Span], computing: list[Span]) -> dict[str, float]:  # noqa: ARG001
    """Break down a window by the activity of the device; idle time by that of the main thread."""
    kernels, marks = defaultdict(list, trace.kernels or {}), defaultdict(list, trace.marks)
    divided = _TimePartition(trace.window)
    divided.give("optimizer", kernels["optimizer"])
    divided.give("backward", kernels["backward"])
    divided.give("forward", kernels["forward"])
    divided.give("communication", exposed)
    divided.give("offload", [*kernels["offload"], *marks["offload"]])
    divided.give("copies", kernels["copies"])
    divided.give("data", marks["data"])
    divided.give("idle", (span for phase in _PHASES for span in marks[phase]))
    divided.give_seconds("python", "python", 0.0)
    return divided.parts


_PHASES = ("forward", "backward", "optimizer", "copies")


def _losses(trace: WindowTrace) -> list[Span]:
    """Return the spans of the loss: from the end of the forward to the backward.

    Without a recorded forward they start at the end of the last other phase.
    """
    forwards, backwards = _ends(trace, "forward"), _ends(trace, "backward")
    others = _ends(trace, "data", "copies", "optimizer", "backward")
    losses = []
    for begin, _ in sorted(trace.marks.get("backward", ())):
        start = _last(forwards, begin)
        if not trace.has_whole_forwards or start <= _last(backwards, begin):
            start = max(_last(others, begin), trace.window[0])
        losses.append((start, begin))
    return losses


def _ends(trace: WindowTrace, *marks: str) -> list[int]:
    return sorted(end for mark in marks for _, end in trace.marks.get(mark, ()))


def _last(ends: Sequence[int], moment: int) -> int:
    """Return the last of the sorted times that is not after `moment`; 0 if there is none."""
    count = bisect_right(ends, moment)
    return ends[count - 1] if count else 0


def _traffic(trace: WindowTrace, exposed: Sequence[Sequence[Span]]) -> list[CollectiveStats]:
    """Return the statistics per kind of collective, longest first."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for index, collective in enumerate(trace.collectives):
        by_name[collective.name].append(index)
    stats = []
    for name, indices in by_name.items():
        same = [trace.collectives[index] for index in indices]
        stats.append(
            CollectiveStats(
                name=name,
                count=len(same) / trace.num_steps,
                bytes=round(sum(item.size_bytes for item in same) / trace.num_steps),
                seconds=total_ns(union(s for item in same for s in item.all_spans))
                * SECONDS_PER_NS
                / trace.num_steps,
                exposed_s=total_ns(union(s for index in indices for s in exposed[index]))
                * SECONDS_PER_NS
                / trace.num_steps,
            )
        )
    return sorted(stats, key=lambda kind: -kind.seconds)


def _begins(trace: WindowTrace, exposed: Sequence[Sequence[Span]]) -> dict[str, list[list[float]]]:
    by_group: dict[str, list[list[float]]] = defaultdict(list)
    for call, spans in sorted(
        zip(trace.collectives, exposed, strict=True), key=lambda pair: pair[0].begin_ns
    ):
        seconds = [round(total_ns(some) * SECONDS_PER_NS, 6) for some in (spans, call.all_spans)]
        by_group[call.group].append(
            [round(call.begin_ns * SECONDS_PER_NS, 6), *seconds, *_apart(call, spans)]
        )
    return dict(by_group)


_MOST_SPANS = 8


def _apart(collective: CollectiveSpans, spans: Sequence[Span]) -> list[float]:
    """Return start and end of the longest exposed spans, relative to the collective's start."""
    longest = sorted(spans, key=lambda span: span[0] - span[1])[:_MOST_SPANS]
    return [
        round((moment - collective.begin_ns) * SECONDS_PER_NS, 6)
        for span in sorted(longest)
        for moment in span
    ]
