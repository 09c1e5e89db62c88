"""Curves: means over ranks by step as they arrive, and a thinned history of each.

The reader thread hands over rows; the panel's thread folds them into means. What a step's mean
is made of is kept for the newest steps only, so memory stays flat however long a run is;
`Session.metrics` has everything.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

from nbdist.panel.protocol import MAX_POINTS, SeriesPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.session.metrics import Column, Metrics, Row

    Points = tuple[array[float], array[float], array[float]]
    """Steps, unix seconds, values."""

PATIENCE_S = 0.4
"""A step is shown without the ranks that have not reported it after this time."""
RECENT = 1024
"""Steps of a series that a late rank can still change."""
KEPT = 2 * MAX_POINTS
"""Points of a series at most; then it is thinned to half."""
LONG_RUN = 100_000
"""Values of one scalar; of more, a panel that is opened late looks at the extremes alone."""
MAX_NAMES = 200
MAX_TOTAL = 60_000
"""Points of all series in one reset."""


class Curve:
    """One scalar."""

    def __init__(self) -> None:
        """Begin empty."""
        self.steps, self.times, self.values = array("d"), array("d"), array("d")
        self._recent: dict[int, dict[int, tuple[float, float]]] = {}
        """Step -> rank -> (time, value)."""
        self._open: dict[int, float] = {}
        """Steps that are not shown yet, and since when they wait."""
        self._changed: dict[int, None] = {}

    def seed(self, ranks: Mapping[int, Column]) -> None:
        """Take the rows of before."""
        totals: dict[int, tuple[float, float, int]] = {}
        for rank, (steps, times, values) in _bounded(ranks).items():
            newest = max(0, len(steps) - RECENT)
            for place, (step, at, value) in enumerate(zip(steps, times, values, strict=True)):
                last, total, count = totals.get(step, (0.0, 0.0, 0))
                totals[step] = (max(last, at), total + value, count + 1)
                if place >= newest:
                    self._recent.setdefault(step, {})[rank] = (at, value)
        for step in sorted(totals):
            at, total, count = totals[step]
            self._place(step, at, total / count)
        self._recent = dict(sorted(self._recent.items())[-RECENT:])

    def add(self, rank: int, step: int, at: float, value: float, *, now: float) -> None:
        """Take one value of one rank."""
        known = self._recent.setdefault(step, {})
        fresh = not known
        known[rank] = (at, value)
        if fresh:
            self._open[step] = now
        elif step not in self._open:
            self._changed[step] = None  # a late rank, or a step that is reported again

    def settle(self, world_size: int, *, now: float) -> Points:
        """Place what is complete or has waited long enough; returns the new points."""
        ripe = [
            step
            for step, since in self._open.items()
            if len(self._recent[step]) >= world_size or now - since >= PATIENCE_S
        ]
        for step in ripe:
            del self._open[step]
        found: Points = (array("d"), array("d"), array("d"))
        for step in (*ripe, *self._changed):
            of_ranks = self._recent[step].values()
            at = max(one[0] for one in of_ranks)
            value = sum(one[1] for one in of_ranks) / len(of_ranks)
            self._place(step, at, value)
            for column, number in zip(found, (step, at, value), strict=True):
                column.append(number)
        self._changed.clear()
        self._forget()
        return found

    def thinned(self, most: int) -> Points:
        """At most so many points that look the same."""
        return thinned((self.steps, self.times, self.values), most)

    def _place(self, step: int, at: float, value: float) -> None:
        """Put a point where it belongs: nearly always at the end."""
        place = len(self.steps)
        if place and step <= self.steps[-1]:
            place = bisect_left(self.steps, step)
        if place < len(self.steps) and self.steps[place] == step:
            self.times[place], self.values[place] = at, value
            return
        self.steps.insert(place, step)
        self.times.insert(place, at)
        self.values.insert(place, value)
        if len(self.steps) > KEPT:
            self.steps, self.times, self.values = self.thinned(MAX_POINTS)

    def _forget(self) -> None:
        while len(self._recent) > RECENT + len(self._open):
            oldest = next((step for step in self._recent if step not in self._open), None)
            if oldest is None:
                return
            del self._recent[oldest]


def _bounded(ranks: Mapping[int, Column]) -> Mapping[int, Column]:
    """The columns, of a long run those steps alone that a thinned curve would show."""
    if sum(len(column[0]) for column in ranks.values()) <= LONG_RUN:
        return ranks
    shown: set[float] = set()
    for steps, times, values in ranks.values():
        shown.update(thinned((array("d", steps), times, values), MAX_POINTS)[0])
        shown.update(steps[-RECENT:])
    bounded: dict[int, Column] = {}
    for rank, (steps, times, values) in ranks.items():
        places = [place for place, step in enumerate(steps) if step in shown]
        bounded[rank] = (
            array("q", (steps[i] for i in places)),
            array("d", (times[i] for i in places)),
            array("d", (values[i] for i in places)),
        )
    return bounded


class Series:
    """All curves of a session."""

    def __init__(self) -> None:
        """Follow nothing yet."""
        self.curves: dict[str, Curve] = {}
        self.refused: dict[str, None] = {}
        """Names beyond MAX_NAMES, some of them."""
        self._inbox: deque[tuple[int, list[Row]]] = deque()
        self._metrics: Metrics | None = None

    def follow(self, metrics: Metrics) -> None:
        """Take everything of `metrics`, and what comes."""
        self.unfollow()
        self._metrics = metrics
        self.curves.clear()
        self._inbox.clear()
        for name, ranks in metrics.follow(self._take).items():
            curve = self._curve(name)
            if curve is not None:
                curve.seed(ranks)

    def unfollow(self) -> None:
        """Take nothing any more."""
        if self._metrics is not None:
            self._metrics.unfollow(self._take)
            self._metrics = None

    def follows(self, metrics: Metrics) -> bool:
        """Whether it is these metrics; a restart makes new ones."""
        return self._metrics is metrics

    def _take(self, rank: int, rows: list[Row]) -> None:
        """Take rows on the reader thread."""
        self._inbox.append((rank, rows))

    def fold(self, *, now: float | None = None) -> dict[str, Points]:
        """Fold what has arrived into the curves; returns new points by name."""
        now = time.monotonic() if now is None else now
        while self._inbox:
            rank, rows = self._inbox.popleft()
            for step, at, scalars in rows:
                for name, value in scalars.items():
                    curve = self._curve(name)
                    if curve is not None:
                        curve.add(rank, step, at, value, now=now)
        world_size = self._metrics.world_size if self._metrics is not None else 1
        settled = {name: curve.settle(world_size, now=now) for name, curve in self.curves.items()}
        return {name: points for name, points in settled.items() if points[0]}

    def history(self) -> dict[str, Points]:
        """All curves, thinned for a reset."""
        most = max(2, min(MAX_POINTS, MAX_TOTAL // max(1, len(self.curves))))
        return {name: curve.thinned(most) for name, curve in self.curves.items()}

    def _curve(self, name: str) -> Curve | None:
        found = self.curves.get(name)
        if found is None and len(self.curves) < MAX_NAMES:
            found = self.curves[name] = Curve()
        elif found is None and len(self.refused) < MAX_NAMES:
            self.refused[name] = None
        return found


def packed(series: Mapping[str, Points]) -> tuple[list[SeriesPart], bytes]:
    """Say whose points there are, and the points as the buffer has them."""
    parts = [SeriesPart(name=name, points=len(points[0])) for name, points in series.items()]
    buffer = array("d")
    for steps, times, values in series.values():
        triples = array("d", bytes(24 * len(steps)))
        triples[0::3], triples[1::3], triples[2::3] = steps, times, values
        buffer.extend(triples)
    return parts, _little_endian(buffer)


def thinned(points: Points, most: int) -> Points:
    """Keep first and last and, of each stretch between, its lowest and its highest point.

    A point that is no number is kept instead of its stretch's lowest: it must be seen.
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
    """Places of the lowest and the highest value, in order."""
    places = range(begin, end)
    if not places:
        return ()
    odd = next((i for i in places if math.isnan(values[i])), None)
    numbers = [i for i in places if not math.isnan(values[i])]
    if not numbers:
        return (begin,)
    low = min(numbers, key=values.__getitem__) if odd is None else odd
    return sorted({low, max(numbers, key=values.__getitem__)})


def _little_endian(numbers: array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
