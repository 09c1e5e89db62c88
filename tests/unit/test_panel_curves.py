from __future__ import annotations

import math
import struct

import numpy as np

from nbdist.panel import curves
from nbdist.panel.curves import curve_history, downsample, pack_points
from nbdist.panel.protocol import MAX_CURVES, MAX_POINTS
from nbdist.session.metrics import RANK_WAIT_TIMEOUT_S, Metrics, UnsentPoints

STEP_S = RANK_WAIT_TIMEOUT_S * 2


def rows(*values: float | str, first: int = 0, name: str = "loss") -> list[dict[str, float | str]]:
    return [{"step": first + i, "time": 100.0 + i, name: v} for i, v in enumerate(values)]


def new_values(new_points: UnsentPoints, now: float, name: str = "loss") -> list[float]:
    return new_points.pop_ready(now=now)[name][:, 2].tolist()


def history(metrics: Metrics, name: str = "loss") -> list[float]:
    return curve_history(metrics)[name][:, 2].tolist()


def test_a_step_is_the_mean_of_its_ranks() -> None:
    metrics = Metrics(2)
    new_points = UnsentPoints(metrics, max_names=MAX_CURVES)
    metrics.add_rows(0, rows(1.0, 2.0))
    assert new_points.pop_ready(now=0) == {}  # rank 1 may still come
    metrics.add_rows(1, rows(3.0, 4.0))
    assert new_values(new_points, now=0.1) == [2.0, 3.0] == metrics["loss"]
    assert new_points.pop_ready(now=STEP_S) == {}


def test_a_late_rank_corrects_its_step() -> None:
    metrics = Metrics(2)
    new_points = UnsentPoints(metrics, max_names=MAX_CURVES)
    metrics.add_rows(0, rows(1.0, 1.0))
    new_points.pop_ready(now=0)
    new_points.pop_ready(now=STEP_S)
    metrics.add_rows(1, rows(3.0))
    assert new_points.pop_ready(now=STEP_S)["loss"].tolist() == [[0.0, 100.0, 2.0]]
    assert history(metrics) == [2.0, 1.0] == metrics["loss"]


def test_a_panel_that_is_opened_late_has_the_history() -> None:
    metrics = Metrics(2)
    metrics.add_rows(0, rows(1.0, 2.0, 3.0))
    metrics.add_rows(1, rows(3.0, 4.0))
    new_points = UnsentPoints(metrics, max_names=MAX_CURVES)
    assert history(metrics) == [2.0, 3.0, 3.0]
    assert new_points.pop_ready(now=STEP_S) == {}
    metrics.add_rows(1, rows(5.0, first=2))
    assert new_values(new_points, now=2 * STEP_S) == [4.0]


def test_downsampling_keeps_ends_extremes_and_non_finite_values() -> None:
    many = np.sin(np.arange(5 * MAX_POINTS) / 50)
    many[777], many[4242], many[6000] = 9.0, -9.0, math.nan
    steps = np.arange(len(many), dtype=float)
    kept = downsample(np.column_stack([steps, steps, many]), 500)
    assert len(kept) <= 500
    assert kept[0, 0] == 0
    assert kept[-1, 0] == len(many) - 1
    assert {9.0, -9.0} <= set(kept[:, 2])
    assert np.isnan(kept[:, 2]).any()
    assert (np.diff(kept[:, 0]) > 0).all()


def test_a_stretch_without_numbers_keeps_one_point() -> None:
    nothing = np.full((100, 3), math.nan)
    nothing[:, 0] = range(100)
    assert downsample(nothing, 10)[:, 0].tolist() == [0, 1, 26, 51, 75, 99]


def test_a_history_has_at_most_the_points_of_a_reset() -> None:
    metrics = Metrics(2)
    for rank in range(2):
        metrics.add_rows(rank, rows(*(float(i % 7) for i in range(8000))))
    metrics.add_rows(0, rows(99.0, first=500))
    found = history(metrics)
    assert len(found) <= MAX_POINTS
    assert max(found) > 40  # the outlier of one rank, in the mean


def test_steps_that_are_counted_again_replace() -> None:
    metrics = Metrics(1)
    new_points = UnsentPoints(metrics, max_names=MAX_CURVES)
    metrics.add_rows(0, rows(1.0, 2.0, 3.0))
    new_points.pop_ready(now=0)
    metrics.add_rows(0, rows(7.0, first=1))
    assert new_values(new_points, now=1) == [7.0]
    assert history(metrics) == [1.0, 7.0, 3.0] == metrics["loss"]


def test_two_hundred_names_and_no_more() -> None:
    metrics = Metrics(1)
    new_points = UnsentPoints(metrics, max_names=MAX_CURVES)
    metrics.add_rows(0, [{"step": 0, "time": 1.0, **{f"n{i}": 1.0 for i in range(300)}}])
    metrics.add_rows(0, [{"step": i, "time": 1.0, "n0": 1.0} for i in range(3000)])
    assert len(new_points.pop_ready(now=0)) == MAX_CURVES
    shown = curve_history(metrics)
    assert len(shown) == MAX_CURVES
    assert sum(map(len, shown.values())) <= curves.MAX_TOTAL_POINTS


def test_the_buffer_is_triples_of_little_endian_doubles() -> None:
    metrics = Metrics(1)
    new_points = UnsentPoints(metrics, max_names=MAX_CURVES)
    metrics.add_rows(0, [{"step": 3, "time": 9.5, "loss": 0.25, "acc": 0.5}])
    parts, buffer = pack_points(new_points.pop_ready(now=0))
    assert parts == [{"name": "loss", "points": 1}, {"name": "acc", "points": 1}]
    assert struct.unpack("<6d", buffer) == (3.0, 9.5, 0.25, 3.0, 9.5, 0.5)
