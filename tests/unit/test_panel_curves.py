from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from nbdist.panel import curves
from nbdist.panel.curves import CurveSet, downsample_points, pack_points
from nbdist.panel.protocol import MAX_POINTS
from nbdist.session.metrics import Metrics

if TYPE_CHECKING:
    import pytest

STEP_S = curves.RANK_WAIT_TIMEOUT_S * 2


def rows(*values: float | str, first: int = 0, name: str = "loss") -> list[dict[str, float | str]]:
    return [{"step": first + i, "time": 100.0 + i, name: v} for i, v in enumerate(values)]


def followed(metrics: Metrics) -> CurveSet:
    made = CurveSet()
    made.subscribe(metrics)
    return made


def values(made: CurveSet, name: str = "loss") -> list[float]:
    return made.downsampled_curves()[name][2].tolist()


def test_a_step_is_the_mean_of_its_ranks() -> None:
    metrics = Metrics(2)
    made = followed(metrics)
    metrics.add_rows(0, rows(1.0, 2.0))
    assert made.take_new_points(now=0) == {}  # rank 1 may still come
    metrics.add_rows(1, rows(3.0, 4.0))
    assert made.take_new_points(now=0.1)["loss"][2].tolist() == [2.0, 3.0] == metrics["loss"]
    assert made.take_new_points(now=0.2) == {}


def test_a_rank_that_reports_alone_is_shown_after_a_moment() -> None:
    metrics = Metrics(2)
    made = followed(metrics)
    metrics.add_rows(0, rows(1.0))
    assert made.take_new_points(now=0) == {}
    assert made.take_new_points(now=STEP_S)["loss"][2].tolist() == [1.0]


def test_a_late_rank_corrects_its_step() -> None:
    metrics = Metrics(2)
    made = followed(metrics)
    metrics.add_rows(0, rows(1.0, 1.0))
    made.take_new_points(now=0)
    made.take_new_points(now=STEP_S)
    metrics.add_rows(1, rows(3.0))
    steps, _, found = made.take_new_points(now=STEP_S)["loss"]
    assert (steps.tolist(), found.tolist()) == ([0.0], [2.0])
    assert values(made) == [2.0, 1.0] == metrics["loss"]


def test_a_panel_that_is_opened_late_has_the_history() -> None:
    metrics = Metrics(2)
    metrics.add_rows(0, rows(1.0, 2.0, 3.0))
    metrics.add_rows(1, rows(3.0, 4.0))
    made = followed(metrics)
    assert values(made) == [2.0, 3.0, 3.0]
    metrics.add_rows(1, rows(5.0, first=2))
    made.take_new_points(now=0)
    assert values(made) == [2.0, 3.0, 4.0] == metrics["loss"]


def test_nan_and_infinity_are_kept() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    metrics.add_rows(0, rows(1.0, "nan", "inf", "-inf"))
    found = made.take_new_points(now=0)["loss"][2]
    assert math.isnan(found[1])
    assert found[2:].tolist() == [math.inf, -math.inf]


def test_thinning_keeps_ends_extremes_and_what_is_no_number() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    many = [math.sin(i / 50) for i in range(5 * MAX_POINTS)]
    many[777], many[4242], many[6000] = 9.0, -9.0, math.nan
    metrics.add_rows(0, rows(*many))
    made.take_new_points(now=0)
    steps, times, found = made.curves["loss"].downsample(500)
    assert len(steps) == len(times) == len(found) <= 500
    assert steps[0] == 0
    assert steps[-1] == len(many) - 1
    assert 9.0 in found
    assert -9.0 in found
    assert any(map(math.isnan, found))
    assert list(steps) == sorted(steps)


def test_a_curve_never_grows_beyond_its_cap() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    for begin in range(0, 20_000, 1000):
        metrics.add_rows(0, rows(*range(1000), first=begin))
        made.take_new_points(now=begin)
        assert len(made.curves["loss"].steps) <= curves.MAX_STORED_POINTS
        assert len(made.curves["loss"]._recent) <= curves.MAX_RECENT_STEPS
    assert made.curves["loss"].steps[-1] == 19_999


def test_a_long_run_is_seeded_by_what_a_curve_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "LONG_RUN_STEPS", 8000)
    metrics = Metrics(2)
    count = curves.LONG_RUN_STEPS
    for rank in range(2):
        metrics.add_rows(rank, rows(*(float(i % 7) for i in range(count))))
    metrics.add_rows(0, rows(99.0, first=500))
    made = followed(metrics)
    assert len(made.curves["loss"].steps) <= curves.MAX_STORED_POINTS
    assert max(values(made)) > 40  # the outlier of one rank, in the mean


def test_steps_that_are_counted_again_replace() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    metrics.add_rows(0, rows(1.0, 2.0, 3.0))
    made.take_new_points(now=0)
    metrics.add_rows(0, rows(7.0, first=1))
    assert made.take_new_points(now=1)["loss"][2].tolist() == [7.0]
    assert values(made) == [1.0, 7.0, 3.0] == metrics["loss"]


def test_two_hundred_names_and_no_more() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    metrics.add_rows(0, [{"step": 0, "time": 1.0, **{f"n{i}": 1.0 for i in range(300)}}])
    made.take_new_points(now=0)
    assert len(made.curves) == curves.MAX_CURVES
    assert len(made.refused) == 100
    assert (
        sum(len(points[0]) for points in made.downsampled_curves().values())
        <= curves.MAX_TOTAL_POINTS
    )


def test_rows_that_are_none_reach_no_follower() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    metrics.add_rows(0, [{"step": 0, "time": 1.0, "loss": "high"}, {"loss": 1.0}, *rows(2.0)])
    assert made.take_new_points(now=0)["loss"][2].tolist() == [2.0]


def test_the_buffer_is_triples_of_little_endian_doubles() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    metrics.add_rows(0, [{"step": 3, "time": 9.5, "loss": 0.25, "acc": 0.5}])
    parts, buffer = pack_points(made.take_new_points(now=0))
    assert parts == [{"name": "loss", "points": 1}, {"name": "acc", "points": 1}]
    assert struct.unpack("<6d", buffer) == (3.0, 9.5, 0.25, 3.0, 9.5, 0.5)


def test_after_the_last_look_rows_are_taken_no_more() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    made.unsubscribe()
    metrics.add_rows(0, rows(1.0))
    assert made.take_new_points(now=0) == {}


def test_few_points_are_not_thinned() -> None:
    metrics = Metrics(1)
    made = followed(metrics)
    metrics.add_rows(0, rows(1.0))
    made.take_new_points(now=0)
    assert downsample_points(made.downsampled_curves()["loss"], 2)[2].tolist() == [1.0]
