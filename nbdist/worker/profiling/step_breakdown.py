"""To which part of a step each moment belongs; pure, on plain spans of time.

A span is in unix nanoseconds. The window is told apart as a whole, and every figure is divided
by its number of steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.profiler.measurements import PARTS, Part, Traffic
from nbdist.worker.profiling.intervals import Span, common, length, minus, touching, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SMALLEST_GAP_NS = 100_000
"""Between operators that follow one another so soon the main thread dispatches: no waiting."""
NS = 1e-9


@dataclass(slots=True, kw_only=True)
class Collective:
    """One collective of this rank."""

    name: str
    """As torch.distributed calls it."""
    group: str
    begin: int
    """When this rank came to it."""
    moving: Span
    """The backend was at it."""
    bytes: int = 0
    meeting: Span | None = None
    """The main thread looked for the other ranks before it; None where it is called from C++."""

    @property
    def whole(self) -> list[Span]:
        """All of it, the meeting included."""
        return union([self.moving, self.meeting] if self.meeting else [self.moving])


@dataclass(slots=True, kw_only=True)
class Recorded:
    """What was seen in a window, in plain spans."""

    window: Span
    steps: int
    marks: Mapping[str, Sequence[Span]]
    """Where the main thread was: data, copies, forward, backward, optimizer, offload."""
    operators: Sequence[Span]
    """Operators of torch on the main thread that compute."""
    collectives: Sequence[Collective]
    waits: Sequence[Span] = ()
    """Python waited for a collective that it had called."""
    idle_s: float = 0.0
    """Outside of all marks, the main thread did not run: asleep, or another one had its core."""
    whole_forwards: bool = True
    """The marks of forwards hold all of them: not so where torch.compile has parts of a model."""
    kernels: Mapping[str, Sequence[Span]] | None = None
    """On a GPU: computing by the phase that launched it, and "copies" and "offload"."""


@dataclass(slots=True, kw_only=True)
class Told:
    """Seconds of a step."""

    parts: dict[str, float]
    traffic: list[Traffic]
    hidden_s: float
    begins: dict[str, list[list[float]]] = field(default_factory=dict)


def told_apart(seen: Recorded) -> Told:
    """Divide a window into the parts of a step."""
    computing = _computing(seen)
    waits = union(seen.waits)
    exposed = [_exposed(one, computing, waits, seen) for one in seen.collectives]
    shown = union(span for spans in exposed for span in spans)
    parts = (_on_device if seen.kernels is not None else _on_cpu)(seen, shown, computing)
    everything = common([seen.window], (one.moving for one in seen.collectives))
    return Told(
        parts={part: parts.get(part, 0.0) / seen.steps for part in PARTS},
        traffic=_traffic(seen, exposed),
        hidden_s=length(minus(everything, shown)) * NS / seen.steps,
        begins=_begins(seen, exposed),
    )


def _computing(seen: Recorded) -> list[Span]:
    if seen.kernels is None:
        return union(seen.operators, gap=SMALLEST_GAP_NS)
    return union(
        span for phase in ("forward", "backward", "optimizer") for span in seen.kernels[phase]
    )


def _exposed(
    one: Collective, computing: Sequence[Span], waits: Sequence[Span], seen: Recorded
) -> list[Span]:
    """When nothing was computed beside a collective."""
    if seen.kernels is not None or one.meeting is None:
        spans = minus([one.moving], touching(computing, one.moving))
    else:
        spans = [one.meeting, *common([one.moving], touching(waits, one.moving))]
    return common([seen.window], spans)


class _Division:
    """Gives each moment to the first part that claims it."""

    def __init__(self, window: Span) -> None:
        self.left: list[Span] = [window]
        self.parts: dict[str, float] = defaultdict(float)

    def give(self, part: Part, spans: Iterable[Span]) -> None:
        taken = common(self.left, spans)
        self.left = minus(self.left, taken)
        self.parts[part] += length(taken) * NS

    def give_seconds(self, part: Part, others: Part, seconds: float) -> None:
        """Divide what is left in two parts by an amount."""
        rest = length(self.left) * NS
        self.parts[part] += min(rest, seconds)
        self.parts[others] += max(0.0, rest - seconds)
        self.left = []


def _on_cpu(seen: Recorded, exposed: list[Span], computing: list[Span]) -> dict[str, float]:
    """By what the main thread did."""
    marks = defaultdict(list, seen.marks)
    divided = _Division(seen.window)
    divided.give("data", marks["data"])
    divided.give("offload", marks["offload"])
    divided.give("communication", exposed)
    divided.give("copies", marks["copies"])
    divided.give("optimizer", marks["optimizer"])
    divided.give("backward", marks["backward"])
    divided.give("forward", marks["forward"])
    divided.give("forward", common(computing, _losses(seen)))
    divided.give_seconds("idle", "python", seen.idle_s)
    return divided.parts


def _on_device(seen: Recorded, exposed: list[Span], computing: list[Span]) -> dict[str, float]:  # noqa: ARG001
    """By what the device did; where it did nothing, by why the main thread gave it nothing."""
    kernels, marks = defaultdict(list, seen.kernels or {}), defaultdict(list, seen.marks)
    divided = _Division(seen.window)
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


def _losses(seen: Recorded) -> list[Span]:
    """Before each backward: since the forward's end or, where none was marked, since all else's."""
    forwards, backwards = _ends(seen, "forward"), _ends(seen, "backward")
    others = _ends(seen, "data", "copies", "optimizer", "backward")
    found = []
    for begin, _ in sorted(seen.marks.get("backward", ())):
        since = _last(forwards, begin)
        if not seen.whole_forwards or since <= _last(backwards, begin):
            since = max(_last(others, begin), seen.window[0])
        found.append((since, begin))
    return found


def _ends(seen: Recorded, *marks: str) -> list[int]:
    return sorted(end for mark in marks for _, end in seen.marks.get(mark, ()))


def _last(ends: Sequence[int], moment: int) -> int:
    """The last of ascending moments that is no later than one; 0 where there is none."""
    place = bisect_right(ends, moment)
    return ends[place - 1] if place else 0


def _traffic(seen: Recorded, exposed: Sequence[Sequence[Span]]) -> list[Traffic]:
    """Collectives by kind, the longest first."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(seen.collectives):
        by_name[one.name].append(place)
    found = []
    for name, places in by_name.items():
        ours = [seen.collectives[place] for place in places]
        found.append(
            Traffic(
                name=name,
                count=len(ours) / seen.steps,
                bytes=round(sum(one.bytes for one in ours) / seen.steps),
                seconds=length(union(span for one in ours for span in one.whole)) * NS / seen.steps,
                exposed_s=length(union(s for place in places for s in exposed[place]))
                * NS
                / seen.steps,
            )
        )
    return sorted(found, key=lambda one: -one.seconds)


def _begins(seen: Recorded, exposed: Sequence[Sequence[Span]]) -> dict[str, list[list[float]]]:
    by_group: dict[str, list[list[float]]] = defaultdict(list)
    for one, spans in sorted(
        zip(seen.collectives, exposed, strict=True), key=lambda pair: pair[0].begin
    ):
        seconds = [round(length(some) * NS, 6) for some in (spans, one.whole)]
        by_group[one.group].append([round(one.begin * NS, 6), *seconds, *_apart(one, spans)])
    return dict(by_group)


_MOST_SPANS = 8


def _apart(one: Collective, spans: Sequence[Span]) -> list[float]:
    """Begin and end of each exposed span, the longest ones, from the collective's begin on."""
    longest = sorted(spans, key=lambda span: span[0] - span[1])[:_MOST_SPANS]
    return [round((moment - one.begin) * NS, 6) for span in sorted(longest) for moment in span]
