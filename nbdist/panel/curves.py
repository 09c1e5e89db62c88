"""Curves of scalars: downsampled histories, and their binary form. Values: `Session.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbdist.panel.protocol import MAX_CURVES, MAX_POINTS, CurveSlice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from nbdist.session.metrics import Metrics

    Points = NDArray[np.float64]
    """Of shape (points, 3): step, Unix time in seconds, value."""

MAX_TOTAL_POINTS = 60_000
"""Maximum number of points of all curves in one reset."""


def curve_history(metrics: Metrics) -> dict[str, Points]:
    """Return all curves, downsampled."""
    names = metrics.names[:MAX_CURVES]
    max_points = max(2, min(MAX_POINTS, MAX_TOTAL_POINTS // max(1, len(names))))
    return {name: downsample(metrics.mean_over_ranks(name).points(), max_points) for name in names}


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
