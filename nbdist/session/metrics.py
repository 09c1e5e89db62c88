"""The rows of `report()` from all ranks; runs in the notebook's kernel.

The reader thread adds rows, the user reads columns. A value takes 12 bytes and a row 16, so a
million steps on four ranks with one scalar each take about 110 MB. If a rank reports a step again,
the new values replace the old ones.
"""

from __future__ import annotations

import html
import importlib
import logging
import threading
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    _Series = tuple[array[int], array[float]]
    """Steps, strictly ascending, and the value of each."""
    Column = tuple[array[int], array[float], array[float]]
    """Steps, strictly ascending, with the time and the value of each."""

STEP = "step"
TIME = "time"
"""Keys of a row besides the user's names: step, and Unix time in seconds on the rank's clock."""

_SHOWN_ROWS = 10
_log = logging.getLogger(__name__)


class UnknownMetric(OptionError, KeyError):  # noqa: N818 - a KeyError
    """No rank has reported a scalar of this name."""

    __str__ = Exception.__str__  # KeyError would put the message in quotes


Row = tuple[int, float, dict[str, float]]
"""One call of report(): step, Unix time in seconds, scalars by name."""


@dataclass(slots=True)
class _RankRows:
    """All rows of one rank, in call order."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    """By name: the row index of each value, and the value."""

    def add(self, row: Mapping[str, float | str]) -> Row:
        """Append one call of report(), atomically; return it as numbers."""
        scalars = {name: float(value) for name, value in row.items() if name != STEP}
        number, at, step = len(self.steps), scalars.pop(TIME), int(row[STEP])
        self.steps.append(step)  # first, because it raises for steps beyond 64 bits
        self.times.append(at)
        for name, value in scalars.items():
            rows, values = self.columns.setdefault(name, (array("I"), array("d")))
            rows.append(number)
            values.append(value)
        return step, at, scalars

    def timed_columns(self) -> dict[str, tuple[array[int], array[float], array[float]]]:
        """Return copies of all columns: steps, times and values."""
        return {
            name: (
                array("q", map(self.steps.__getitem__, rows)),
                array("d", map(self.times.__getitem__, rows)),
                values[:],
            )
            for name, (rows, values) in self.columns.items()
        }

    def column(self, name: str) -> _Series:
        """Return a copy of a column: steps and values."""
        if name == TIME:
            return self.steps[:], self.times[:]
        rows, values = self.columns.get(name, (array("I"), array("d")))
        if len(rows) == len(self.steps):  # in every row
            return self.steps[:], values[:]
        return array("q", map(self.steps.__getitem__, rows)), values[:]


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
        self._ranks: dict[int, _RankRows] = {}
        self._lock = threading.Lock()
        self._followers: list[Callable[[int, list[Row]], object]] = []

    def add_rows(self, rank: int, rows: Sequence[Mapping[str, float | str]]) -> None:
        """Append rows of one rank; converts "nan" and "inf" strings to numbers."""
        with self._lock:
            own = self._ranks.setdefault(rank, _RankRows())
            taken: list[Row] = []
            for row in rows:
                try:
                    taken.append(own.add(row))
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    # Not from report(). The reader thread must not stop.
                    _log.warning("rank %d sent an invalid row (%r): %r", rank, error, row)
            if taken:
                self.last_step = taken[-1][0]
                for follower in self._followers:
                    follower(rank, taken)

    def subscribe(
        self, follower: Callable[[int, list[Row]], object]
    ) -> dict[str, dict[int, Column]]:
        """Call `follower` for all further rows, and return the earlier ones.

        It is called on the reader thread while a lock is held: it must not block, only queue rows.

        Returns:
            Name -> rank -> (steps, times, values), sorted by step.
        """
        with self._lock:
            self._followers.append(follower)
            copies = {rank: rows.timed_columns() for rank, rows in sorted(self._ranks.items())}
        columns: dict[str, dict[int, Column]] = {}
        for rank, of_rank in copies.items():
            for name, (steps, times, values) in of_rank.items():
                kept, last = _ascending(steps, values)
                at = times if len(kept) == len(steps) else _ascending(steps, times)[1]
                columns.setdefault(name, {})[rank] = (kept, at, last)
        return columns

    def unsubscribe(self, follower: Callable[[int, list[Row]], object]) -> None:
        """Stop calling `follower`."""
        with self._lock:
            self._followers.remove(follower)

    @property
    def names(self) -> list[str]:
        """Reported names, in order of first use."""
        with self._lock:
            columns = [rows.columns for _, rows in sorted(self._ranks.items())]
            return list(dict.fromkeys(name for names in columns for name in names))

    def __getitem__(self, name: str) -> list[float]:
        """Return the mean over ranks by step, sorted by step.

        Raises:
            UnknownMetric: no such name was reported (also a KeyError).
        """
        return self._mean_series(name)[1]

    def steps(self, name: str | None = None) -> list[int]:
        """Return the steps of a column; without a name the steps of all rows."""
        series = self._series(TIME if name is None else name)
        same = _in_step(list(series.values()))
        first = next(iter(series.values()))[0][:same].tolist() if series else []
        return first + sorted({step for steps, _ in series.values() for step in steps[same:]})

    def by_rank(self, name: str) -> dict[int, list[float]]:
        """Return one column of each rank that reported it, sorted by step."""
        return {rank: values.tolist() for rank, (_, values) in self._series(name).items()}

    def __contains__(self, name: object) -> bool:
        """Return whether a scalar of this name was reported."""
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of steps that any rank has reported."""
        return len(self.steps())

    def __bool__(self) -> bool:
        """Return whether any rank has reported a row."""
        return bool(self._ranks)

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
            message = (
                "to_pandas() needs pandas, which is not installed. Run %pip install pandas, or use"
                " metrics[name] and metrics.steps(name)."
            )
            raise NbdistError(message) from error
        columns = {name: self._mean_series(name) for name in (TIME, *self.names)}
        series = {
            name: pandas.Series(values, index=steps, dtype="float64")
            for name, (steps, values) in columns.items()
        }
        frame = pandas.DataFrame(series)
        frame.index.name = STEP
        return frame

    def __repr__(self) -> str:
        """Return the last rows as a text table."""
        header, rows = self._last_rows()
        if not rows:
            return f"Metrics: {self._empty()}"
        widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in (header, *rows)
        ]
        return "\n".join([f"Metrics: {self._summary()}", *lines])

    def _repr_html_(self) -> str:
        """Return the last rows as an HTML table."""
        header, rows = self._last_rows()
        if not rows:
            return f"<p>Metrics: {html.escape(self._empty())}</p>"
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        return (
            f"<table><caption>{html.escape(self._summary())}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    # ---- reading

    def _series(self, name: str) -> dict[int, _Series]:
        """Return copies of one column of each rank that has it; computed without the lock."""
        with self._lock:
            copies = {rank: rows.column(name) for rank, rows in sorted(self._ranks.items())}
        series = {rank: _ascending(*copy) for rank, copy in copies.items() if copy[0]}
        if not series and name != TIME:
            raise UnknownMetric(self._unknown(name))
        return series

    def _mean_series(self, name: str, *, since: int = 0) -> tuple[list[int], list[float]]:
        """Return steps and mean values of a column, from step `since` on."""
        series = self._series(name).values()
        return _mean([_tail(steps, values, since) for steps, values in series])

    def _unknown(self, name: object) -> str:
        names = ", ".join(self.names)
        known = f"Use one of {names}." if names else f"{self._empty()}."
        return f"No rank reported {name!r}. {known}"

    def _empty(self) -> str:
        return "No metrics yet: call report(loss=loss) in a %%distribute cell"

    def _summary(self) -> str:
        ranks = "1 rank" if len(self._ranks) == 1 else f"mean of {len(self._ranks)} ranks"
        return f"{len(self)} steps, {ranks}"

    def _last_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return header and cells of the last rows."""
        names, steps = self.names, self.steps()[-_SHOWN_ROWS:]
        since = steps[0] if steps else 0
        columns = [dict(zip(*self._mean_series(name, since=since), strict=True)) for name in names]
        rows = [[str(step), *(_cell(column.get(step)) for column in columns)] for step in steps]
        return [STEP, *names], rows


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _ascending(steps: array[int], values: array[float]) -> _Series:
    """Sort by step; keep the last value of a repeated step."""
    if all(step < following for step, following in pairwise(steps)):
        return steps, values
    last = dict(sorted(dict(zip(steps, values, strict=True)).items()))
    return array("q", last), array("d", last.values())


def _mean(series: Sequence[_Series]) -> tuple[list[int], list[float]]:
    """Return the mean by step of sorted columns, over those that have the step."""
    same = _in_step(series)
    first = series[0][0][:same] if series else []
    common = zip(*(values[:same] for _, values in series), strict=True)
    means = [sum(row) / len(row) for row in common]
    table: dict[int, list[float]] = {}
    for steps, values in series:
        for step, value in zip(steps[same:], values[same:], strict=True):
            table.setdefault(step, []).append(value)
    rest = sorted(table.items())
    return (
        [*first, *(step for step, _ in rest)],
        [*means, *(sum(row) / len(row) for _, row in rest)],
    )


def _in_step(series: Sequence[_Series]) -> int:
    """Return the number of leading rows in which all ranks have the same steps.

    Only the last few rows usually differ, so most rows need no merging.
    """
    same = min((len(steps) for steps, _ in series), default=0)
    alike = all(steps[:same] == series[0][0][:same] for steps, _ in series[1:])
    return same if alike else 0


def _tail(steps: array[int], values: array[float], since: int) -> _Series:
    start = bisect_left(steps, since)
    return steps[start:], values[start:]
