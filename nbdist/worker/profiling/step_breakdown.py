"""Breakdown of a window into the parts of a step, computed from time spans.

Spans are in Unix nanoseconds. The whole window is divided, and the results are averaged over its
steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.profiler.measurements import STEP_PARTS, CollectiveStats, StepPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Span = tuple[int, int]
"""Start and end in nanoseconds."""


def union(spans: Iterable[Span], *, gap: int = 0) -> list[Span]:
    """Merge spans. Gaps of at most `gap` nanoseconds are filled."""
    merged: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1] + gap:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(spans: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Return the intersection."""
    left, right = union(spans), union(other)
    overlaps: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            overlaps.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def difference(spans: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Return the parts of the first that are not in the second."""
    removed = union(other)
    rest: list[Span] = []
    j = 0
    for begin, end in union(spans):
        while j < len(removed) and removed[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(removed) and removed[k][0] < end:
            if removed[k][0] > at:
                rest.append((at, removed[k][0]))
            at = max(at, removed[k][1])
            k += 1
        if at < end:
            rest.append((at, end))
    return rest


def overlapping(spans: Sequence[Span], span: Span) -> list[Span]:
    """Return the spans that overlap with `span`. They must be sorted and without overlaps."""
    index = max(0, bisect_left(spans, span) - 1)
    overlapping = []
    while index < len(spans) and spans[index][0] < span[1]:
        if spans[index][1] > span[0]:
            overlapping.append(spans[index])
        index += 1
    return overlapping


def total_ns(spans: Iterable[Span]) -> int:
    """Return the total duration in nanoseconds of spans without overlaps."""
    return sum(end - begin for begin, end in spans)


MIN_GAP_NS = 100_000
"""Shorter gaps between operators are dispatch overhead and count as computation."""
SECONDS_PER_NS = 1e-9
_MAX_SPANS = 8
"""Number of exposed spans of a collective that are reported."""


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
    if trace.kernels is None:
        computing = union(trace.operators, gap=MIN_GAP_NS)
    else:
        phases = ("forward", "backward", "optimizer")
        computing = union(span for phase in phases for span in trace.kernels[phase])
    waits = union(trace.wait_spans)
    exposed = [_exposed(collective, computing, waits, trace) for collective in trace.collectives]
    all_exposed = union(span for spans in exposed for span in spans)
    parts = _divide(trace, all_exposed, computing)
    everything = intersection(
        [trace.window], (collective.transfer for collective in trace.collectives)
    )
    return StepBreakdown(
        parts={part: parts.get(part, 0.0) / trace.num_steps for part in STEP_PARTS},
        traffic=_traffic(trace, exposed),
        overlapped_s=total_ns(difference(everything, all_exposed))
        * SECONDS_PER_NS
        / trace.num_steps,
        collective_begins=_collective_starts(trace, exposed),
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
        # gloo executes on its own thread: Python waits only in the barrier and in explicit waits
        spans = [
            collective.barrier,
            *intersection([collective.transfer], overlapping(waits, collective.transfer)),
        ]
    return intersection([trace.window], spans)


def _divide(trace: WindowTrace, exposed: list[Span], computing: list[Span]) -> dict[str, float]:
    """Assign each moment of the window to the first part that claims it; return the seconds.

    On a GPU the activity of the device comes first, and that of the main thread in its idle time.
    """
    marks = defaultdict(list, {phase: list(spans) for phase, spans in trace.marks.items()})
    claims: list[tuple[StepPart, Iterable[Span]]]
    if trace.kernels is None:
        claims = [
            ("data", marks["data"]),
            ("offload", marks["offload"]),
            ("communication", exposed),
            ("copies", marks["copies"]),
            ("optimizer", marks["optimizer"]),
            ("backward", marks["backward"]),
            ("forward", marks["forward"]),
            ("forward", intersection(computing, _losses(trace))),
        ]
    else:
        phases = ("forward", "backward", "optimizer", "copies")
        claims = [
            ("optimizer", trace.kernels["optimizer"]),
            ("backward", trace.kernels["backward"]),
            ("forward", trace.kernels["forward"]),
            ("communication", exposed),
            ("offload", [*trace.kernels.get("offload", ()), *marks["offload"]]),
            ("copies", trace.kernels.get("copies", ())),
            ("data", marks["data"]),
            ("idle", [span for phase in phases for span in marks[phase]]),
        ]
    left, parts = [trace.window], defaultdict[str, float](float)
    for part, spans in claims:
        claimed = intersection(left, spans)
        left = difference(left, claimed)
        parts[part] += total_ns(claimed) * SECONDS_PER_NS
    rest = total_ns(left) * SECONDS_PER_NS
    idle = min(rest, trace.idle_s) if trace.kernels is None else 0.0
    parts["idle"] += idle
    parts["python"] += rest - idle
    return parts


def _losses(trace: WindowTrace) -> list[Span]:
    """Return the spans of the loss: from the end of the forward to the backward.

    Without a recorded forward they start at the end of the last other phase.
    """

    def ends(*marks: str) -> list[int]:
        return sorted(end for mark in marks for _, end in trace.marks.get(mark, ()))

    forwards, backwards = ends("forward"), ends("backward")
    others = ends("data", "copies", "optimizer", "backward")
    losses = []
    for begin, _ in sorted(trace.marks.get("backward", ())):
        start = _last_before(forwards, begin)
        if not trace.has_whole_forwards or start <= _last_before(backwards, begin):
            start = max(_last_before(others, begin), trace.window[0])
        losses.append((start, begin))
    return losses


def _last_before(ends: Sequence[int], moment: int) -> int:
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


def _collective_starts(
    trace: WindowTrace, exposed: Sequence[Sequence[Span]]
) -> dict[str, list[list[float]]]:
    """Return for each group and call: its start, exposed and total seconds, and longest spans.

    Of the longest exposed spans, start and end are given relative to the call's start.
    """
    by_group: dict[str, list[list[float]]] = defaultdict(list)
    for call, spans in sorted(
        zip(trace.collectives, exposed, strict=True), key=lambda pair: pair[0].begin_ns
    ):
        longest = sorted(spans, key=lambda span: span[0] - span[1])[:_MAX_SPANS]
        moments_ns = [
            call.begin_ns,
            total_ns(spans),
            total_ns(call.all_spans),
            *(moment - call.begin_ns for span in sorted(longest) for moment in span),
        ]
        by_group[call.group].append([round(ns * SECONDS_PER_NS, 6) for ns in moments_ns])
    return dict(by_group)
