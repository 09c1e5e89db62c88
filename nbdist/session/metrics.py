"""The rows of `report()` from all ranks, and events between steps; runs in the notebook's kernel.

The reader thread adds rows, the user and the panel read columns. A value takes 12 bytes and a row
18, so a million steps on four ranks with one scalar each take about 120 MB. If a rank reports a
step again, the new values replace the old ones.

numpy is imported when values are read, so that it does not delay `%load_ext nbdist`.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nbdist.display import Table, element
from nbdist.errors import NbdistError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

STEP = "step"
TIME = "time"
"""Keys of a row besides the user's names: step, and Unix time in seconds on the rank's clock."""

MAX_RECENT_STEPS = 1024
"""`Metrics.recent` returns a step in full if each rank has reported at most this many since."""
RANK_WAIT_TIMEOUT_S = 0.4
"""By default, `UnsentPoints` waits this long for the ranks that have not reported a step."""
MAX_EVENTS = 500
_SHOWN_ROWS = 10
_EMPTY = "No metrics yet: call report(loss=loss) in a %%distribute cell"
_log = logging.getLogger(__name__)


class UnknownMetric(OptionError, KeyError):  # noqa: N818 - a KeyError
    """No rank has reported a scalar of this name."""

    __str__ = Exception.__str__  # KeyError would put the message in quotes


class MetricReports(NamedTuple):
    """Values of one name, one element per call of `report()`, in order of arrival."""

    ranks: NDArray[Any]
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    """Unix time in seconds."""
    values: NDArray[np.float64]

    def select(self, which: NDArray[Any]) -> MetricReports:
        """Return some of the reports, by a mask or by indices."""
        return MetricReports(*(column[which] for column in self))

    def by_step(self) -> MetricReports:
        """Return the last report of each step and rank, sorted by step and rank."""
        import numpy as np

        # lexsort is stable, so that the reports of a rank for one step stay in order of arrival
        ordered = self.select(np.lexsort((self.ranks, self.steps)))
        is_last = np.ones(len(ordered.steps), dtype=bool)
        is_last[:-1] = (np.diff(ordered.steps) != 0) | (np.diff(ordered.ranks) != 0)
        return ordered.select(is_last)

    def mean_over_ranks(self) -> StepMeans:
        """Return the mean by step, over the ranks that have reported the step."""
        import numpy as np

        _, steps, times, values = self.by_step()
        distinct, starts, counts = np.unique(steps, return_index=True, return_counts=True)
        with np.errstate(all="ignore"):  # values may be infinite or NaN
            means = np.add.reduceat(values, starts) / counts
        return StepMeans(distinct, np.maximum.reduceat(times, starts), means, counts)


class StepMeans(NamedTuple):
    """Means over ranks, sorted by step."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    """Unix time of the last rank in seconds."""
    values: NDArray[np.float64]
    num_ranks: NDArray[np.int64]
    """Number of ranks that have reported the step."""

    def points(self) -> NDArray[np.float64]:
        """Return an array of shape (steps, 3): step, Unix time, value."""
        import numpy as np

        return np.column_stack([self.steps, self.times, self.values]).astype(float)


class Metrics:
    """Values that the ranks reported: `metrics["loss"]` is the mean over ranks, by step.

    Behaves like a table: `len()` is the number of steps, `in` and iteration use names.
    Reading while a cell runs returns the values received so far; the mean of the newest step
    then covers the ranks that have reported it. Thread-safe.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.last_step = 0
        """Step of the last row received."""
        self._lock = threading.Lock()
        # One element per call of report(), in order of arrival.
        self._ranks, self._steps, self._times = array("H"), array("q"), array("d")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        """By name: the row index of each value, and the value."""

    def add_rows(self, rank: int, rows: Sequence[Mapping[str, float | str]]) -> None:
        """Append rows of one rank; converts "nan" and "inf" strings to numbers."""
        with self._lock:
            for row in rows:
                try:
                    self._add_row(rank, row)
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    # Not from report(). The reader thread must not stop.
                    _log.warning("rank %d sent an invalid row (%r): %r", rank, error, row)

    def _add_row(self, rank: int, row: Mapping[str, float | str]) -> None:
        """Append one call of report(), entirely or not at all."""
        scalars = {name: float(value) for name, value in row.items() if name != STEP}
        number, time_s, step = len(self._steps), scalars.pop(TIME), int(row[STEP])
        self._steps.append(step)  # first, because it raises for steps beyond 64 bits
        self._times.append(time_s)
        self._ranks.append(rank)
        for name, value in scalars.items():
            indices, values = self._columns.setdefault(name, (array("I"), array("d")))
            indices.append(number)
            values.append(value)
        self.last_step = step

    @property
    def num_rows(self) -> int:
        """Number of calls of `report()` on all ranks."""
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        """Reported names, in order of first use."""
        with self._lock:
            return list(self._columns)

    def __getitem__(self, name: str) -> list[float]:
        """Return the mean over ranks by step, sorted by step.

        Raises:
            UnknownMetric: no such name was reported (also a KeyError).
        """
        values: list[float] = self.mean_over_ranks(name).values.tolist()
        return values

    def mean_over_ranks(self, name: str) -> StepMeans:
        """Return the mean over ranks by step, with steps and times.

        Raises:
            UnknownMetric: no such name was reported (also a KeyError).
        """
        return self._reports(name).mean_over_ranks()

    def steps(self, name: str | None = None) -> list[int]:
        """Return the steps of a column; without a name the steps of all rows."""
        import numpy as np

        reports = self._reports(TIME if name is None else name)
        steps: list[int] = np.unique(reports.steps).tolist()
        return steps

    def by_rank(self, name: str) -> dict[int, list[float]]:
        """Return one column of each rank that reported it, sorted by step."""
        import numpy as np

        ranks, _, _, values = self._reports(name).by_step()
        return {rank: values[ranks == rank].tolist() for rank in np.unique(ranks).tolist()}

    def recent(self, position: int) -> tuple[dict[str, MetricReports], int]:
        """Return what has arrived since `position`, and the position of the next call.

        Args:
            position: number of rows that the caller has seen.

        Returns:
            By name: all reports of the steps that have new ones, as far as they are recent.
        """
        import numpy as np

        with self._lock:
            first = max(0, position - MAX_RECENT_STEPS * self.world_size)
            next_position = len(self._steps)
            ranks, steps, times = (
                np.array(column[first:]) for column in (self._ranks, self._steps, self._times)
            )
            columns = {}
            for name, (indices, values) in self._columns.items():
                if indices[-1] >= position:
                    start = bisect_left(indices, first)
                    columns[name] = np.array(indices[start:]), np.array(values[start:])
        reports = {}
        for name, (rows, column) in columns.items():
            in_copy = rows - first
            of_name = MetricReports(ranks[in_copy], steps[in_copy], times[in_copy], column)
            new_steps = of_name.steps[rows >= position]
            reports[name] = of_name.select(np.isin(of_name.steps, new_steps))
        return reports, next_position

    def __contains__(self, name: object) -> bool:
        """Return whether a scalar of this name was reported."""
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of steps that any rank has reported."""
        return len(self.steps())

    def __bool__(self) -> bool:
        """Return whether any rank has reported a row."""
        return bool(self._steps)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame: one row per step (the index), one column per name.

        Values are means over ranks, as `metrics[name]`; missing values are NaN. The column `time`
        holds Unix time in seconds. Imports pandas.

        Raises:
            NbdistError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise NbdistError(
                "to_pandas() needs pandas, which is not installed. Run %pip install pandas, or use"
                " metrics[name] and metrics.steps(name)."
            ) from error
        columns = {name: self.mean_over_ranks(name) for name in (TIME, *self.names)}
        series = {
            name: pandas.Series(means.values.tolist(), index=means.steps.tolist(), dtype="float64")
            for name, means in columns.items()
        }
        frame = pandas.DataFrame(series)
        frame.index.name = STEP
        return frame

    def __repr__(self) -> str:
        summary, table = self._last_rows()
        return f"Metrics: {summary}" if table is None else f"Metrics: {summary}\n{table.text}"

    def _repr_html_(self) -> str:
        """Return the last rows as an HTML table."""
        summary, table = self._last_rows()
        return str(element("p", f"Metrics: {summary}") if table is None else table.html)

    def _reports(self, name: str) -> MetricReports:
        """Return copies of one column; computed without the lock."""
        import numpy as np

        with self._lock:
            if name not in self._columns and name != TIME:
                known = f"Use one of {', '.join(self._columns)}." if self._columns else ""
                raise UnknownMetric(f"No rank reported {name!r}. {known or f'{_EMPTY}.'}")
            rows = MetricReports(
                np.array(self._ranks), np.array(self._steps), *2 * (np.array(self._times),)
            )
            indices, values = map(np.array, self._columns.get(name, ((), ())))
        return rows if name == TIME else rows.select(indices)._replace(values=values)

    def _last_rows(self) -> tuple[str, Table | None]:
        """Return a summary and a table of the last rows."""
        steps = self.steps()
        if not steps:
            return _EMPTY, None
        num_ranks = len(set(self._ranks))
        ranks = "1 rank" if num_ranks == 1 else f"mean of {num_ranks} ranks"
        shown, names = steps[-_SHOWN_ROWS:], self.names
        columns = []
        for name in names:
            reports = self._reports(name)
            means = reports.select(reports.steps >= shown[0]).mean_over_ranks()
            columns.append(dict(zip(means.steps.tolist(), means.values.tolist(), strict=True)))
        rows = [
            [str(step), *(f"{column[step]:.6g}" if step in column else "" for column in columns)]
            for step in shown
        ]
        summary = f"{len(steps)} steps, {ranks}"
        table = Table(header=[STEP, *names], rows=rows, text_columns=(), caption=summary)
        return summary, table


class UnsentPoints:
    """New means over ranks, for a reader that passes them on: the panel, or a tracker.

    Starts with the rows that arrive after its creation.

    Args:
        metrics: the metrics to read.
        max_names: read only this many names.
        wait_s: after this time a step is passed on without the ranks that have not reported it.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        max_names: int | None = None,
        wait_s: float = RANK_WAIT_TIMEOUT_S,
    ) -> None:
        self.metrics = metrics
        self._max_names, self._wait_s = max_names, wait_s
        self._position = metrics.num_rows
        """Number of rows of the metrics that were read."""
        self._waiting: dict[str, dict[float, tuple[float, list[float]]]] = {}
        """Name -> step that some ranks have not reported -> time of its first report, point."""

    def pop_ready(self, *, now: float | None = None) -> dict[str, NDArray[np.float64]]:
        """Return the new points of each name: steps that are complete, changed or timed out.

        A point is step, Unix time, mean.

        Args:
            now: monotonic time in seconds; infinity to wait for no rank.
        """
        import numpy as np

        now = time.monotonic() if now is None else now
        recent, self._position = self.metrics.recent(self._position)
        points: dict[str, list[list[float]]] = {}
        for name in self.metrics.names[: self._max_names]:
            ready = points.setdefault(name, [])
            waiting = self._waiting.setdefault(name, {})
            if name in recent:
                means = recent[name].mean_over_ranks()
                for point, count in zip(means.points().tolist(), means.num_ranks, strict=True):
                    since, _ = waiting.pop(point[0], (now, point))
                    if count >= self.metrics.world_size:
                        ready.append(point)
                    else:
                        waiting[point[0]] = since, point
            timed_out = [
                step for step, (since, _) in waiting.items() if now - since >= self._wait_s
            ]
            ready += [waiting.pop(step)[1] for step in timed_out]
        return {name: np.array(ready) for name, ready in points.items() if ready}


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """An event to show on the curves."""

    step: int
    """Last step reported before the event."""
    kind: Literal["switch", "save", "load", "restart"]
    text: str
    time: float = field(default_factory=time.time)
    """Unix time in seconds."""


class TrainingEvents:
    """The last events of a session; thread-safe."""

    def __init__(self) -> None:
        self._marks: deque[TrainingEvent] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()

    def add(self, mark: TrainingEvent) -> None:
        """Append an event."""
        with self._lock:
            self._marks.append(mark)

    def reset(self, mark: TrainingEvent) -> None:
        """Drop all events and add `mark`: steps are counted from 0 again."""
        with self._lock:
            self._marks.clear()
            self._marks.append(mark)

    def to_list(self) -> list[TrainingEvent]:
        """Return the events, oldest first."""
        with self._lock:
            return list(self._marks)
