"""Curves of scalars: the mean over the ranks of each step, and a downsampled history.

The reader thread queues rows; the panel's thread adds them to the means. The values per rank are
kept for the latest steps only, so that memory stays bounded in long runs; `Session.metrics` keeps
all of them.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

from nbdist.panel.protocol import MAX_POINTS, CurveSlice

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.session.metrics import Column, Metrics, Row

    Points = tuple[array[float], array[float], array[float]]
    """Steps, unix seconds, values."""

RANK_WAIT_TIMEOUT_S = 0.4
"""After this time a step is shown without the ranks that have not reported it."""
MAX_RECENT_STEPS = 1024
"""Number of latest steps per curve that a late rank can still change."""
MAX_STORED_POINTS = 2 * MAX_POINTS
"""Maximum number of points per curve; above it the curve is downsampled to half."""
LONG_RUN_STEPS = 100_000
"""Values of one scalar; above it, a panel that is opened late loads only the extremes."""
MAX_CURVES = 200
MAX_TOTAL_POINTS = 60_000
"""Maximum number of points of all curves in one reset."""


class ScalarCurve:
    """The curve of one scalar."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("d"), array("d"), array("d")
        self._recent: dict[int, dict[int, tuple[float, float]]] = {}
        """Step -> rank -> (time, value)."""
        self._open: dict[int, float] = {}
        """Step that is not shown yet -> time of its first value."""
        self._changed: dict[int, None] = {}

    def load_history(self, ranks: Mapping[int, Column]) -> None:
        """Load the earlier rows of all ranks."""
        totals: dict[int, tuple[float, float, int]] = {}
        for rank, (steps, times, values) in _bounded(ranks).items():
            newest = max(0, len(steps) - MAX_RECENT_STEPS)
            for place, (step, at, value) in enumerate(zip(steps, times, values, strict=True)):
                last, total, count = totals.get(step, (0.0, 0.0, 0))
                totals[step] = (max(last, at), total + value, count + 1)
                if place >= newest:
                    self._recent.setdefault(step, {})[rank] = (at, value)
        for step in sorted(totals):
            at, total, count = totals[step]
            self._place(step, at, total / count)
        self._recent = dict(sorted(self._recent.items())[-MAX_RECENT_STEPS:])

    def add_value(self, rank: int, step: int, at: float, value: float, *, now: float) -> None:
        """Add one value of one rank."""
        values = self._recent.setdefault(step, {})
        is_first = not values
        values[rank] = (at, value)
        if is_first:
            self._open[step] = now
        elif step not in self._open:
            self._changed[step] = None  # a late rank, or a step that is reported again

    def take_complete_points(self, world_size: int, *, now: float) -> Points:
        """Add the steps that are complete or timed out to the curve. Returns the new points."""
        complete = [
            step
            for step, since in self._open.items()
            if len(self._recent[step]) >= world_size or now - since >= RANK_WAIT_TIMEOUT_S
        ]
        for step in complete:
            del self._open[step]
        points: Points = (array("d"), array("d"), array("d"))
        for step in (*complete, *self._changed):
            rank_values = self._recent[step].values()
            at = max(time_s for time_s, _ in rank_values)
            value = sum(number for _, number in rank_values) / len(rank_values)
            self._place(step, at, value)
            for column, number in zip(points, (step, at, value), strict=True):
                column.append(number)
        self._changed.clear()
        self._forget()
        return points

    def downsample(self, most: int) -> Points:
        """Return at most `most` points that look the same."""
        return downsample_points((self.steps, self.times, self.values), most)

    def _place(self, step: int, at: float, value: float) -> None:
        """Insert or replace a point, nearly always at the end."""
        place = len(self.steps)
        if place and step <= self.steps[-1]:
            place = bisect_left(self.steps, step)
        if place < len(self.steps) and self.steps[place] == step:
            self.times[place], self.values[place] = at, value
            return
        self.steps.insert(place, step)
        self.times.insert(place, at)
        self.values.insert(place, value)
        if len(self.steps) > MAX_STORED_POINTS:
            self.steps, self.times, self.values = self.downsample(MAX_POINTS)

    def _forget(self) -> None:
        while len(self._recent) > MAX_RECENT_STEPS + len(self._open):
            oldest = next((step for step in self._recent if step not in self._open), None)
            if oldest is None:
                return
            del self._recent[oldest]


def _bounded(ranks: Mapping[int, Column]) -> Mapping[int, Column]:
    """The columns; for a long run only the steps that a downsampled curve shows."""
    if sum(len(column[0]) for column in ranks.values()) <= LONG_RUN_STEPS:
        return ranks
    shown: set[float] = set()
    for steps, times, values in ranks.values():
        shown.update(downsample_points((array("d", steps), times, values), MAX_POINTS)[0])
        shown.update(steps[-MAX_RECENT_STEPS:])
    bounded: dict[int, Column] = {}
    for rank, (steps, times, values) in ranks.items():
        places = [place for place, step in enumerate(steps) if step in shown]
        bounded[rank] = (
            array("q", (steps[place] for place in places)),
            array("d", (times[place] for place in places)),
            array("d", (values[place] for place in places)),
        )
    return bounded


class CurveSet:
    """All curves of a session."""

    def __init__(self) -> None:
        self.curves: dict[str, ScalarCurve] = {}
        self.refused: dict[str, None] = {}
        """Some of the names beyond ``MAX_CURVES``."""
        self._inbox: deque[tuple[int, list[Row]]] = deque()
        self._metrics: Metrics | None = None

    def subscribe(self, metrics: Metrics) -> None:
        """Load all values of `metrics`, and subscribe to new ones."""
        self.unsubscribe()
        self._metrics = metrics
        self.curves.clear()
        self._inbox.clear()
        for name, ranks in metrics.subscribe(self._take).items():
            curve = self._curve(name)
            if curve is not None:
                curve.load_history(ranks)

    def unsubscribe(self) -> None:
        """Cancel the subscription."""
        if self._metrics is not None:
            self._metrics.unsubscribe(self._take)
            self._metrics = None

    def is_subscribed_to(self, metrics: Metrics) -> bool:
        """Return whether it is subscribed to these metrics; a restart creates new ones."""
        return self._metrics is metrics

    def _take(self, rank: int, rows: list[Row]) -> None:
        """Queue rows; called on the reader thread."""
        self._inbox.append((rank, rows))

    def take_new_points(self, *, now: float | None = None) -> dict[str, Points]:
        """Add the queued rows to the curves. Returns the new points by name."""
        now = time.monotonic() if now is None else now
        while self._inbox:
            rank, rows = self._inbox.popleft()
            for step, at, scalars in rows:
                for name, value in scalars.items():
                    curve = self._curve(name)
                    if curve is not None:
                        curve.add_value(rank, step, at, value, now=now)
        world_size = self._metrics.world_size if self._metrics is not None else 1
        settled = {
            name: curve.take_complete_points(world_size, now=now)
            for name, curve in self.curves.items()
        }
        return {name: points for name, points in settled.items() if points[0]}

    def downsampled_curves(self) -> dict[str, Points]:
        """Return all curves, downsampled for a reset."""
        most = max(2, min(MAX_POINTS, MAX_TOTAL_POINTS // max(1, len(self.curves))))
        return {name: curve.downsample(most) for name, curve in self.curves.items()}

    def _curve(self, name: str) -> ScalarCurve | None:
        curve = self.curves.get(name)
        if curve is None and len(self.curves) < MAX_CURVES:
            curve = self.curves[name] = ScalarCurve()
        elif curve is None and len(self.refused) < MAX_CURVES:
            self.refused[name] = None
        return curve


def pack_points(series: Mapping[str, Points]) -> tuple[list[CurveSlice], bytes]:
    """Return the name and number of points of each curve, and the points as a buffer."""
    parts = [CurveSlice(name=name, points=len(points[0])) for name, points in series.items()]
    buffer = array("d")
    for steps, times, values in series.values():
        triples = array("d", bytes(24 * len(steps)))
        triples[0::3], triples[1::3], triples[2::3] = steps, times, values
        buffer.extend(triples)
    return parts, _little_endian(buffer)


def downsample_points(points: Points, most: int) -> Points:
    """Keep the first and last point, and the lowest and highest point of each stretch between.

    A NaN is kept instead of the lowest point of its stretch, so that it stays visible.
    """
    steps, times, values = points
    if len(steps) <= most:
        return steps[:], times[:], values[:]
    stretches = max(1, (most - 2) // 2)
    inner = len(steps) - 2
    chosen = [0]
    for stretch in range(stretches):
        begin = 1 + stretch * inner // stretches
        end = 1 + (stretch + 1) * inner // stretches
        chosen += _extremes(values, begin, end)
    chosen.append(len(steps) - 1)
    return tuple(array("d", (column[i] for i in chosen)) for column in (steps, times, values))  # type: ignore[return-value]


def _extremes(values: array[float], begin: int, end: int) -> Iterable[int]:
    """Indices of the lowest and the highest value, in order."""
    places = range(begin, end)
    if not places:
        return ()
    first_nan = next((index for index in places if math.isnan(values[index])), None)
    numbers = [index for index in places if not math.isnan(values[index])]
    if not numbers:
        return (begin,)
    low = min(numbers, key=values.__getitem__) if first_nan is None else first_nan
    return sorted({low, max(numbers, key=values.__getitem__)})


def _little_endian(numbers: array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
