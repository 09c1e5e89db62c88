"""Measured errors of the planner's predictions: the ranges of speeds, and the margin of memory."""

from __future__ import annotations

import itertools
import math
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# -- speed -----------------------------------------------------------------------------------

# An entry is (stated, ratio): the uncertainty that the prediction stated from its parts, and the
# measured value divided by the predicted one. A range scales the stated uncertainty so that it
# holds `COVERAGE` of the entries, on both sides separately. The loops that check the ranges are
# others: `benchmarks/advice_speedups.py` and `benchmarks/plan_choice.py` draw new ones.

COVERAGE = 0.9
"""Fraction of the entries inside a range: 80 % of other loops, and a reserve for small tables."""
COMPARED = 0.8
"""Fraction of the pairs of predictions whose ratio has at most the stated error."""

Entry = tuple[float, float]
Prediction = Literal["step time", "gain"]


class Interval(NamedTuple):
    """Factors of a predicted value between which the measured one is expected."""

    low: float
    high: float


# Seconds per step, by the kind of the devices and whether speeds were measured on them. Entries of
# one line are of one model on one machine.
_STEP_TIMES: Mapping[tuple[str, bool], Sequence[Sequence[Entry]]] = MappingProxyType(
    {
        # tests/unit/published_runs.py; two constants were fitted to eleven of them.
        ("cuda", False): (
            ((0.2, 0.99), (0.2, 1.01)),
            ((0.21, 1.03),),
            ((0.21, 0.99),),
            ((0.21, 0.92),),
            ((0.21, 0.86),),
            ((0.21, 1.07),),
            ((0.21, 1.0),),
            ((0.21, 0.9),),
            ((0.21, 0.87),),
            ((0.2, 1.0), (0.2, 0.96), (0.2, 0.94), (0.2, 1.03), (0.2, 1), (0.2, 0.97), (0.2, 1.17)),
            ((0.2, 0.83), (0.2, 0.85)),
        ),
        # Two CPU ranks on a busy machine with two cores, fp32, benchmarks/plan_choice.py: nine
        # models under ddp, fsdp2, zero1, zero2 and zero3, with speeds of the catalogue.
        ("cpu", False): (
            ((0.41, 1.21), (0.41, 1.56), (0.41, 1.16), (0.41, 1.16), (0.41, 1.38)),
            ((1.60, 8.81), (1.28, 18.32), (1.35, 15.01), (1.33, 18.39), (0.90, 17.20)),
            ((0.51, 6.29), (0.54, 12.22), (0.52, 11.75), (0.52, 10.73), (0.53, 16.69)),
            ((0.47, 2.31), (0.48, 2.51), (0.48, 2.25), (0.48, 3.66), (0.48, 5.52)),
            ((0.41, 1.13), (0.41, 1.08), (0.41, 1.21), (0.41, 1.10), (0.41, 2.44)),
            ((0.51, 3.25), (0.53, 5.07), (0.51, 3.51), (0.51, 3.55), (0.52, 9.60)),
            ((1.36, 7.92), (1.27, 14.99), (1.20, 3.61), (1.20, 2.47), (0.90, 7.67)),
            ((0.52, 1.45), (0.52, 3.03), (0.52, 1.35), (0.52, 1.02), (0.52, 2.67)),
            ((0.81, 5.22), (0.80, 10.44), (0.81, 2.50), (0.80, 3.31), (0.67, 7.69)),
        ),
        # The same steps, predicted with a calibration and a profile of that machine.
        ("cpu", True): (
            ((0.20, 0.69), (0.18, 0.95), (0.18, 0.69), (0.18, 0.68), (0.18, 0.82)),
            ((0.83, 3.96), (0.80, 11.79), (0.87, 9.29), (0.87, 11.66), (0.61, 12.94)),
            ((0.34, 1.66), (0.31, 4.04), (0.31, 3.38), (0.31, 3.08), (0.32, 5.35)),
            ((0.31, 0.80), (0.27, 0.99), (0.27, 0.78), (0.27, 1.27), (0.27, 2.10)),
            ((0.22, 0.60), (0.19, 0.62), (0.20, 0.70), (0.20, 0.63), (0.20, 1.35)),
            ((0.33, 0.89), (0.30, 1.67), (0.30, 1.01), (0.30, 1.02), (0.31, 3.07)),
            ((0.55, 2.53), (0.56, 6.02), (0.55, 1.48), (0.55, 1.01), (0.54, 4.95)),
            ((0.26, 0.68), (0.24, 1.49), (0.25, 0.69), (0.25, 0.53), (0.25, 1.34)),
            ((0.44, 1.40), (0.42, 3.76), (0.46, 0.95), (0.46, 1.28), (0.40, 3.64)),
        ),
    }
)
# Speed after a change that a profile advises, relative to before: two CPU ranks of a busy machine
# with two cores, benchmarks/advice_speedups.py. There are none of GPUs, so their ranges are not
# scaled.
_GAINS: Mapping[str, Sequence[Entry]] = MappingProxyType(
    {
        "cpu": (
            (0.35, 1.43),
            (0.29, 1.11),
            (0.24, 0.61),
            (0.74, 1.75),
            (0.46, 1.6),
            (0.38, 2.84),
            (0.25, 1.18),
        )
    }
)


def _step_times(kind: str, *, measured: bool) -> Sequence[Sequence[Entry]]:
    # No GPU was measured both ways.
    return _STEP_TIMES.get((kind, measured)) or _STEP_TIMES[kind, False]


def _scale(stated: float) -> float:
    # A tiny step on CPU ranks has a larger uncertainty than itself.
    return math.log1p(min(stated, 1.0))


@cache
def _scales(prediction: Prediction, kind: str, *, measured: bool) -> Interval:
    """Return the bounds of the logarithmic errors, in units of the stated uncertainty."""
    steps = _step_times(kind, measured=measured)
    entries = _GAINS.get(kind, ()) if prediction == "gain" else list(itertools.chain(*steps))
    scores = sorted(math.log(ratio) / _scale(stated) for stated, ratio in entries)
    if not scores:
        return Interval(-1.0, 1.0)
    outside = (1 - COVERAGE) / 2
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
    scale = _scale(stated)
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
    return math.expm1(errors[math.ceil(COMPARED * len(errors)) - 1])


# -- memory ----------------------------------------------------------------------------------

# The benchmark `plan_memory` writes `SHORTFALLS`: how far the allocator's peak exceeded the plan,
# over the cases of a run. On a GPU, the step from tensors to device memory adds its own error.


class Shortfall(NamedTuple):
    """Measured errors of one backend."""

    num_cases: int
    share: float
    """By how much the peak exceeded the plan in at most 1 of 20 cases, relative to the plan."""


SHORTFALLS: Mapping[tuple[str, str], Shortfall] = {
    # written by benchmarks/plan_memory.py --write
    ("", "traced"): Shortfall(32, 0.1211),
    ("ddp", "closed form"): Shortfall(42, 0.0046),
    ("fsdp1", "closed form"): Shortfall(30, 0.0004),
    ("fsdp2", "closed form"): Shortfall(42, 0.0070),
    ("zero1", "closed form"): Shortfall(26, 0.0001),
    ("zero2", "closed form"): Shortfall(26, 0.0088),
    ("zero3", "closed form"): Shortfall(30, 0.0112),
    # end
}
"""By backend and depth of the model; "" stands for all backends."""
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
    tensors = SHORTFALLS.get((backend, depth)) or SHORTFALLS.get(("", depth), UNKNOWN)
    return Margin(tensors, device, calibrated)
