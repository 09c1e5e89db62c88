"""Measured errors of the planner's predictions, and the ranges that are shown because of them.

An entry is (stated, ratio): the uncertainty that the prediction stated from its parts, and the
measured value divided by the predicted one. A range scales the stated uncertainty so that it holds
`COVERAGE` of the entries, on both sides separately. The loops that check the ranges are others:
`benchmarks/advice_speedups.py` and `benchmarks/plan_choice.py` draw them anew.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COVERAGE = 0.86
"""Fraction of the entries inside a range: 80 % of other loops, and a reserve for small tables."""
COMPARED = 0.8
"""Fraction of the pairs of predictions whose ratio has at most the stated error."""

Entry = tuple[float, float]
Prediction = Literal["step time", "gain"]
Kind = Literal["cuda", "cpu"]


class Interval(NamedTuple):
    """Factors of a predicted value between which the measured one is expected."""

    low: float
    high: float


# Seconds per step. Entries of one line are of one model on one machine.
_STEP_TIMES: Mapping[str, Sequence[Sequence[Entry]]] = MappingProxyType(
    {
        # tests/unit/published_runs.py; two constants were fitted to eleven of them.
        "cuda": (
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
        # CPU TABLE
        "cpu": (((0.4, 0.7), (0.4, 1.4)), ((0.4, 1.0), (0.4, 2.0))),
    }
)
# Speed after a change that a profile advises, relative to before: two CPU ranks of a busy machine
# with two cores, benchmarks/advice_speedups.py. There are none of GPUs, so their ranges are these.
_GAINS: Sequence[Entry] = ((0.1, 0.9), (0.1, 1.1))


@cache
def _scales(prediction: Prediction, kind: Kind) -> Interval:
    """Return the bounds of the logarithmic errors, in units of the stated uncertainty."""
    entries = _GAINS if prediction == "gain" else itertools.chain(*_STEP_TIMES[kind])
    scores = sorted(math.log(ratio) / stated for stated, ratio in entries)
    outside = (1 - COVERAGE) / 2
    # The ranks of split conformal prediction: n errors cover n + 1 places for the next one.
    low = max(0, math.floor(outside * (len(scores) + 1)) - 1)
    return Interval(scores[low], scores[len(scores) - 1 - low])


def interval(prediction: Prediction, kind: Kind, stated: float) -> Interval:
    """Return the range of a prediction, as factors.

    Args:
        prediction: what was predicted.
        kind: kind of the devices.
        stated: uncertainty of the prediction by its parts.
    """
    low, high = _scales(prediction, kind)
    return Interval(math.exp(min(0.0, low) * stated), math.exp(max(0.0, high) * stated))


@cache
def comparison_uncertainty(kind: Kind) -> float:
    """Return how far the ratio of two predictions for one model and machine is from the measured.

    It is the error that 80 % of the pairs in the table stay below.
    """
    errors = sorted(
        abs(math.log(one / other))
        for entries in _STEP_TIMES[kind]
        for (_, one), (_, other) in itertools.combinations(entries, 2)
    )
    return math.expm1(errors[math.ceil(COMPARED * len(errors)) - 1])
