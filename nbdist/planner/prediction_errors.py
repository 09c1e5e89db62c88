"""Measured errors of the planner's predictions: the ranges of speeds, and the margin of memory."""

from __future__ import annotations

import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEASURED: Any = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Measured errors.

An entry of the sections about speed is [stated, ratio]: the uncertainty that the prediction stated
from its parts, and the measured value divided by the predicted one.

step time: of GPUs, published runs in tests/unit/published_runs.py, of which eleven fitted two
    constants; of CPUs, benchmarks/plan_choice.py on two ranks of a machine with two cores, busy or
    idle. A list for each model on one machine, by the source of the speeds.
gain: speed after a change that a profile advises, relative to before; benchmarks/advice_speedups.py
    on such a machine. There are none of GPUs, so their ranges are not scaled.
memory: how far the allocator's peak exceeded the plan, by backend ("": all) and depth of the
    model; benchmarks/plan_memory.py --write.
"""

# -- speed -----------------------------------------------------------------------------------

# A range scales the stated uncertainty so that it holds `COVERAGE` of the entries, on both sides
# separately. Later runs of the benchmarks, which draw other loops, check the ranges.

Prediction = Literal["step time", "gain"]

COVERAGE: dict[Prediction, float] = {"step time": 0.85, "gain": 0.9}
"""Fraction of the entries inside a range: 80 % of other loops, and a reserve, which is larger for
gains because machines differ in them."""
PAIR_COVERAGE = 0.8
"""Fraction of the pairs of predictions whose ratio has at most the stated error."""

Entry = tuple[float, float]


class Interval(NamedTuple):
    """Factors of a predicted value between which the measured one is expected."""

    low: float
    high: float


def _step_times(kind: str, *, measured: bool) -> Sequence[Sequence[Entry]]:
    of_kind = _MEASURED["step time"][kind]
    entries: Sequence[Sequence[Entry]] = of_kind["catalog"]
    if measured:
        entries = of_kind.get("measured", entries)  # no GPU was measured both ways
    return entries


@cache
def _scales(prediction: Prediction, kind: str, *, measured: bool) -> Interval:
    """Return the bounds of the logarithmic errors, in units of the stated uncertainty."""
    steps = _step_times(kind, measured=measured)
    entries = (
        _MEASURED["gain"].get(kind, ()) if prediction == "gain" else list(itertools.chain(*steps))
    )
    scores = sorted(math.log(ratio) / math.log1p(stated) for stated, ratio in entries)
    if not scores:
        return Interval(-1.0, 1.0)
    outside = (1 - COVERAGE[prediction]) / 2
    # The ranks of split conformal prediction: n errors cover n + 1 places for the next one.
    low = max(0, math.floor(outside * (len(scores) + 1)) - 1)
    return Interval(scores[low], scores[len(scores) - 1 - low])


def interval(
    prediction: Prediction, kind: str, stated: float, *, measured: bool = False
) -> Interval:
    """Return the range of a prediction, as factors.

    Args:
        prediction: what was predicted.
        kind: kind of the devices.
        stated: uncertainty of the prediction by its parts.
        measured: True if it uses speeds that were measured on these devices.
    """
    low, high = _scales(prediction, kind, measured=measured)
    scale = math.log1p(stated)
    return Interval(math.exp(min(0.0, low) * scale), math.exp(max(0.0, high) * scale))


@cache
def comparison_uncertainty(kind: str) -> float:
    """Return how far the ratio of two predictions for one model and machine is from the measured.

    It is the error that 80 % of the pairs in the table stay below.
    """
    errors = sorted(
        abs(math.log(first / second))
        for entries in _step_times(kind, measured=False)
        for (_, first), (_, second) in itertools.combinations(entries, 2)
    )
    return math.expm1(errors[math.ceil(PAIR_COVERAGE * len(errors)) - 1])


# -- memory ----------------------------------------------------------------------------------

# On a GPU, the step from tensors to device memory adds its own error.


class Shortfall(NamedTuple):
    """Measured errors of one backend."""

    num_cases: int
    share: float
    """By how much the peak exceeded the plan in at most 1 of 20 cases, relative to the plan."""


UNKNOWN = Shortfall(0, 0.02)
"""A backend without measured cases."""
DEVICE_SHARE = 0.04
"""From tensors to device memory: the median error of the published runs in docs/planner.md."""
CALIBRATED_DEVICE_SHARE = 0.02
"""The same after a measured session on this machine: the allocator's rounding between models."""


class Margin(NamedTuple):
    """Shares of a row's memory that must stay free."""

    tensors: Shortfall = UNKNOWN
    device: float = DEVICE_SHARE
    is_calibrated: bool = False

    @property
    def total(self) -> float:
        """The whole margin, relative to the row's memory."""
        return self.tensors.share + self.device

    def describe(self) -> str:
        """Return what the margin is made of, in one line."""
        count, share = self.tensors
        source = f"covers 95% of {count} measured cases" if count else "not measured"
        device = "measured here" if self.is_calibrated else "error of published runs"
        return (
            f"margin that must stay free: {self.total:.1%}; {share:.1%} for tensors ({source}),"
            f" {self.device:.0%} for allocator and context ({device})"
        )


UNMEASURED = Margin()
"""The margin of a backend without measured cases."""


def margin_of(backend: str, depth: Literal["closed form", "traced"], *, calibrated: bool) -> Margin:
    """Return the margin of a backend; calibrated: device memory was measured on this machine."""
    device = CALIBRATED_DEVICE_SHARE if calibrated else DEVICE_SHARE
    shortfalls = _MEASURED["memory"]
    shortfall = shortfalls.get(backend, {}).get(depth) or shortfalls.get("", {}).get(depth)
    return Margin(Shortfall(*shortfall) if shortfall else UNKNOWN, device, calibrated)
