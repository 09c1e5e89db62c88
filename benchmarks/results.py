"""Rows of the benchmark: a value, its bar, and whether it holds; as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value against its bar."""

    name: str
    value: float
    unit: str
    """"x" for a ratio of two things measured in the same run."""
    limit: float
    sense: Literal["<=", ">="] = "<="
    noise: float = 0.0
    """Half the width of the value's 95 % confidence interval; a miss is larger than that."""
    detail: str = ""
    """What the value was made of, for the table."""
    skipped: str = ""
    """Why nothing could be measured here; the row then says nothing."""

    @property
    def bar(self) -> str:
        """The bar as text: "<= 0.7"."""
        return f"{self.sense} {self.limit:g}"

    @property
    def holds(self) -> bool:
        """Whether the value is on the right side of its bar, or nothing was measured."""
        if self.skipped:
            return True
        if self.sense == "<=":
            return self.value - self.noise <= self.limit
        return self.value + self.noise >= self.limit

    def to_json(self) -> dict[str, object]:
        """The row as build/bench.json has it."""
        return {
            "name": self.name,
            "value": None if self.skipped else round(self.value, 4),
            "unit": self.unit,
            "noise": round(self.noise, 4),
            "bar": self.bar,
            "holds": self.holds,
            "detail": self.detail,
            "skipped": self.skipped,
        }


def machine() -> str:
    """The machine and the versions in one line."""
    versions = [f"{name} {version(name)}" for name in ("torch", "accelerate", "ipykernel")]
    hardware = f"{os.cpu_count()} cores {cpu_model()}"
    return ", ".join([hardware, f"Python {platform.python_version()}", *versions])


def cpu_model() -> str:
    """The processor's own name, where Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(rows: Iterable[Row]) -> str:
    lines = [f"{'':5}{'what':58} {'value':>12} {'bar':>10}   made of"]
    for row in rows:
        mark = "skip" if row.skipped else "ok" if row.holds else "MISS"
        noise = f" ±{row.noise:.2g}" if row.noise else ""
        value = "" if row.skipped else f"{row.value:.3g}{noise} {row.unit}"
        made_of = row.skipped or row.detail
        lines.append(f"{mark:5}{row.name:58} {value:>12} {row.bar:>10}   {made_of}")
    return "\n".join(lines)


def write(group: str, rows: Iterable[Row], path: Path) -> None:
    """Replace the rows of one group of benchmarks in a JSON file; those of others stay."""
    groups = json.loads(path.read_text()) if path.exists() else {}
    groups[group] = {
        "date": f"{datetime.now(tz=UTC):%Y-%m-%d}",
        "machine": machine(),
        "rows": [row.to_json() for row in rows],
    }
    path.write_text(json.dumps(groups, indent=1) + "\n")


def middle(values: Sequence[float]) -> float:
    """Median."""
    return statistics.median(values)


class Ratio(TypedDict):
    """Value and noise of a row."""

    value: float
    noise: float


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the median of the ratios of pairs that were measured in turns, and its noise.

    The noise comes from a bootstrap of the pairs, so that a bar holds on a machine that is busy
    with other things, and a real loss still misses it.
    """
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    dice = random.Random(0)  # noqa: S311 - resampling
    medians = [middle(dice.choices(ratios, k=len(ratios))) for _ in range(2000)]
    low, *_, high = statistics.quantiles(medians, n=40)
    return {"value": middle(ratios), "noise": (high - low) / 2}


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def write_prediction_errors(section: str, values: object) -> None:
    """Replace a section of the measured errors from which nbdist takes its ranges and margins."""
    file = Path(__file__).parents[1] / "nbdist/planner/prediction_errors.json"
    text = json.dumps(json.loads(file.read_text()) | {section: values}, indent=2)
    entries = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]")  # of a model, on one line
    file.write_text(entries.sub(lambda found: json.dumps(json.loads(found[0])), text) + "\n")
