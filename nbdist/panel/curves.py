"""Curves of scalars: the mean over the ranks of each step, and downsampled histories.

All values are in `Session.metrics`. What is kept here are the steps that wait for a rank.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from nbdist.panel.protocol import MAX_CURVES, MAX_POINTS, CurveSlice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from nbdist.session.metrics import Metrics, StepMeans

    Points = NDArray[np.float64]
    """Of shape (points, 3): step, Unix time in seconds, value."""

RANK_WAIT_TIMEOUT_S = 0.4
"""After this time a step is shown without the ranks that have not reported it."""
MAX_TOTAL_POINTS = 60_000
"""Maximum number of points of all curves in one reset."""


def curve_history(metrics: Metrics) -> dict[str, Points]:
    """Return all curves, downsampled."""
    names = metrics.names[:MAX_CURVES]
    max_points = max(2, min(MAX_POINTS, MAX_TOTAL_POINTS // max(1, len(names))))
    return {name: downsample(_points(metrics.mean_over_ranks(name)), max_points) for name in names}


def _points(means: StepMeans) -> Points:
    return np.column_stack([means.steps, means.times, means.values]).astype(float)


class UnsentCurvePoints:
    """Points that have not been sent to the page yet."""

    def __init__(self, metrics: Metrics) -> None:
        """Start with the rows that arrive from now on."""
        self.metrics = metrics
        self._position = metrics.num_rows
        """Number of rows of the metrics that were read."""
        self._waiting: dict[str, dict[float, tuple[float, list[float]]]] = {}
        """Name -> step that some ranks have not reported -> time of its first report, point."""

    def take(self, *, now: float | None = None) -> dict[str, Points]:
        """Return the new points of each curve: steps that are complete, changed or timed out.

        Args:
            now: monotonic time in seconds; infinity to wait for no rank.
        """
        now = time.monotonic() if now is None else now
        recent, self._position = self.metrics.recent(self._position)
        points: dict[str, list[list[float]]] = {}
        for name in self.metrics.names[:MAX_CURVES]:
            ready = points.setdefault(name, [])
            waiting = self._waiting.setdefault(name, {})
            if name in recent:
                means = recent[name].mean_over_ranks()
                for point, count in zip(_points(means).tolist(), means.num_ranks, strict=True):
                    since, _ = waiting.pop(point[0], (now, point))
                    if count >= self.metrics.world_size:
                        ready.append(point)
                    else:
                        waiting[point[0]] = since, point
            timed_out = [
                step for step, (since, _) in waiting.items() if now - since >= RANK_WAIT_TIMEOUT_S
            ]
            ready += [waiting.pop(step)[1] for step in timed_out]
        return {name: np.array(ready) for name, ready in points.items() if ready}


def pack_points(series: Mapping[str, Points]) -> tuple[list[CurveSlice], bytes]:
    """Return the name and number of points of each curve, and the points as a buffer."""
    parts = [CurveSlice(name=name, points=len(points)) for name, points in series.items()]
    return parts, b"".join(points.astype("<f8").tobytes() for points in series.values())


def downsample(points: Points, max_points: int) -> Points:
    """Keep the first and last point, and the lowest and highest point of each stretch between.

    A NaN is kept instead of the lowest point of its stretch, so that it stays visible.
    """
    if len(points) <= max_points:
        return points
    values = points[:, 2]
    highest = np.where(np.isnan(values), -np.inf, values)
    stretches = np.array_split(np.arange(1, len(points) - 1), max(1, (max_points - 2) // 2))
    indices = {0, len(points) - 1}
    for stretch in stretches:
        if len(stretch):
            # argmin returns the first NaN if there is one
            indices |= {stretch[np.argmin(values[stretch])], stretch[np.argmax(highest[stretch])]}
    return points[sorted(indices)]
