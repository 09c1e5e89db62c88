from __future__ import annotations

import math
import sys
import threading
from typing import Any

import pytest

from nbdist.errors import NbdistError
from nbdist.session.metrics import Metrics, UnknownMetric


def row(step: int, **scalars: Any) -> dict[str, Any]:
    return {"step": step, "time": 1000.0 + step, **scalars}


def filled(world_size: int = 2, count: int = 3) -> Metrics:
    metrics = Metrics(world_size)
    for rank in range(world_size):
        metrics.add_rows(rank, [row(step, loss=step + rank) for step in range(count)])
    return metrics


def test_a_column_is_the_mean_over_ranks_by_step() -> None:
    metrics = filled()
    assert metrics["loss"] == [0.5, 1.5, 2.5]
    assert metrics.steps("loss") == [0, 1, 2]
    assert metrics.by_rank("loss") == {0: [0.0, 1.0, 2.0], 1: [1.0, 2.0, 3.0]}
    assert len(metrics) == 3


def test_what_has_not_arrived_yet_is_not_waited_for() -> None:
    metrics = filled()
    metrics.add_rows(0, [row(3, loss=9), row(4, loss=10)])
    assert metrics["loss"] == [0.5, 1.5, 2.5, 9.0, 10.0]
    metrics.add_rows(1, [row(3, loss=11)])
    assert metrics["loss"] == [0.5, 1.5, 2.5, 10.0, 10.0]


def test_names_may_come_in_some_rows_only() -> None:
    metrics = Metrics(1)
    metrics.add_rows(0, [row(0, loss=1), row(1, loss=2, accuracy=0.5), row(2, accuracy=0.75)])
    assert metrics.names == ["loss", "accuracy"]
    assert metrics.steps("loss") == [0, 1]
    assert metrics.steps("accuracy") == [1, 2]
    assert metrics["accuracy"] == [0.5, 0.75]
    assert metrics.steps() == [0, 1, 2]
    assert len(metrics) == 3


def test_a_step_reported_again_replaces_the_first() -> None:
    metrics = filled(count=4)
    for rank in range(2):
        metrics.add_rows(rank, [row(1, loss=100), row(0, loss=50)])
    assert metrics["loss"] == [50.0, 100.0, 2.5, 3.5]
    assert metrics.by_rank("loss")[0] == [50.0, 100.0, 2.0, 3.0]
    assert metrics.steps("loss") == [0, 1, 2, 3]


def test_numbers_that_json_has_not_come_as_text() -> None:
    metrics = Metrics(1)
    metrics.add_rows(0, [row(0, loss="nan"), row(1, loss="-inf"), row(2, loss="inf")])
    assert math.isnan(metrics["loss"][0])
    assert metrics["loss"][1:] == [-math.inf, math.inf]
    assert "nan" in repr(metrics)


def test_a_missing_name_says_which_there_are() -> None:
    metrics = filled()
    metrics.add_rows(0, [row(3, lr=1)])
    for read in (metrics.__getitem__, metrics.by_rank, metrics.steps):
        with pytest.raises(UnknownMetric) as caught:
            read("los")
        assert str(caught.value) == "No rank reported 'los'. Use one of loss, lr."
        assert isinstance(caught.value, NbdistError)
        assert isinstance(caught.value, KeyError)


def test_before_the_first_row_it_says_what_to_do() -> None:
    metrics = Metrics(2)
    assert (len(metrics), list(metrics), metrics.steps()) == (0, [], [])
    assert not metrics
    with pytest.raises(UnknownMetric, match=r"No metrics yet: call report\(loss=loss\)"):
        _ = metrics["loss"]
    assert "call report(loss=loss)" in repr(metrics)
    assert "call report(loss=loss)" in metrics._repr_html_()


def test_the_last_rows_are_shown() -> None:
    metrics = filled(count=30)
    metrics.add_rows(0, [row(29, lr=1e-05)])
    lines = repr(metrics).splitlines()
    assert lines[0] == "Metrics: 30 steps, mean of 2 ranks"
    assert lines[1].split() == ["step", "loss", "lr"]
    assert lines[-1].split() == ["29", "29.5", "1e-05"]
    assert lines[2].split() == ["20", "20.5"]
    assert len(lines) == 12


def test_html_escapes_names() -> None:
    metrics = Metrics(1)
    metrics.add_rows(0, [row(0, **{"<b>": 1.25})])
    shown = metrics._repr_html_()
    assert "&lt;b&gt;</th>" in shown
    assert ">1.25</td>" in shown
    assert "<b>" not in shown


@pytest.mark.parametrize(
    "bad",
    [row(3, loss="x"), row(3, loss=None), {"loss": 1, "time": 0}, {"step": 3}, row(2**63), {}],
)
def test_a_malformed_row_is_left_out_and_logged(
    bad: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = filled()
    metrics.add_rows(0, [bad, row(3, loss=7)])
    assert metrics["loss"] == [0.5, 1.5, 2.5, 7.0]
    assert len(metrics) == 4
    assert "rank 0 sent an invalid row" in caplog.text


def test_pandas_gets_a_row_for_each_step() -> None:
    metrics = filled()
    metrics.add_rows(0, [row(1, lr=0.5)])
    table = metrics.to_pandas()
    assert (table.index.name, list(table.columns)) == ("step", ["time", "loss", "lr"])
    assert table["loss"].to_dict() == {0: 0.5, 1: 1.5, 2: 2.5}
    assert table["lr"].dropna().to_dict() == {1: 0.5}
    assert table["time"].tolist() == [1000.0, 1001.0, 1002.0]


def test_without_pandas_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NbdistError, match=r"needs pandas, .*%pip install pandas, or use metrics"):
        filled().to_pandas()


def test_reading_while_the_reader_thread_adds() -> None:
    metrics = Metrics(2)

    def add(rank: int) -> None:
        for step in range(2000):
            metrics.add_rows(rank, [row(step, loss=step)])

    threads = [threading.Thread(target=add, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if "loss" in metrics:
            values = metrics["loss"]
            assert values == [float(step) for step in range(len(values))]
    assert len(metrics) == 2000
