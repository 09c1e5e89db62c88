"""Ranks beside one another: whom they wait for, and whose own work takes longer; pure.

A collective ends when its last rank has come, so a slow rank shows as communication on all the
others. The k-th collective of a group is the same on all its ranks, and ranks share the clock:
what lies before the last rank's begin is waiting, what is left is communication.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from nbdist.profiler.measurements import Traffic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.profiler.measurements import Part, RankFigures

_MATCHED_WITHIN = 0.25
"""Of a step: the same collective ends on all ranks within a few milliseconds, one that was
matched with another step's is off by about a step."""
_NOT_OWN = ("communication", "waiting")
"""Parts in which a rank depends on the others."""
NAMES: Mapping[Part, str] = {
    "data": "waiting for data",
    "copies": "copies to the device",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the optimizer's step",
    "communication": "communication that nothing hides",
    "waiting": "waiting for other ranks",
    "offload": "offload traffic",
    "python": "the cell's own Python",
    "idle": "idle time",
}
"""Parts of a step, in words."""


_UNMATCHED = (
    "The ranks' collectives could not be matched, so waiting for a slower rank counts as"
    " communication."
)


class _Call(NamedTuple):
    """One collective on one rank, as moments."""

    begin: float
    exposed: tuple[tuple[float, float], ...]
    """Spans in which nothing was computed beside it."""
    end: float

    def before(self, moment: float) -> float:
        """Exposed seconds until a moment."""
        return sum(max(0.0, min(moment, until) - since) for since, until in self.exposed)


def compared(figures: Sequence[RankFigures]) -> tuple[tuple[RankFigures, ...], list[str]]:
    """Tell waiting apart from communication on all ranks.

    Returns:
        The same figures, ascending by rank, with `waiting` of parts and of traffic filled in;
        and sentences about what could not be told apart.
    """
    ranks = sorted(figures, key=lambda one: one.rank)
    waits, notes = _waits(ranks)
    return tuple(_told_apart(one, sum(waits[one.rank].values())) for one in ranks), notes


def _told_apart(one: RankFigures, waiting: float) -> RankFigures:
    """One rank's figures with so many seconds of a step as waiting."""
    communication = one.parts.get("communication", 0.0)
    before = one.parts.get("waiting", 0.0)
    moved = min(waiting, communication)
    parts = {
        **one.parts,
        "communication": communication - moved,
        "waiting": before + moved,
    }
    exposed = sum(kind.exposed_s for kind in one.traffic)
    share = min(1.0, moved / exposed) if exposed > 0 else 0.0
    traffic = [
        replace(kind, waiting_s=max(kind.waiting_s, share * kind.exposed_s)) for kind in one.traffic
    ]
    return replace(one, parts=parts, traffic=traffic)


# ------------------------------------------------------------------- the same collective


def _waits(ranks: Sequence[RankFigures]) -> tuple[dict[int, dict[int, float]], list[str]]:
    """Rank -> index of the step -> seconds of a step that it waited, as shares of the mean."""
    waits: dict[int, dict[int, float]] = {one.rank: defaultdict(float) for one in ranks}
    unmatched: list[str] = []
    for group in sorted({name for one in ranks for name in one.begins}):
        inside = [one for one in ranks if len(one.begins.get(group, ())) > 0]
        if len(inside) < 2:  # noqa: PLR2004 - one rank alone waits for nobody
            continue
        calls = _matched([(one, _calls(one, group)) for one in inside])
        if calls is None:
            unmatched.append(group)
            continue
        for same in calls:
            last = max(call.begin for call in same)
            for one, call in zip(inside, same, strict=True):
                if late := call.before(last):
                    waits[one.rank][_step_of(one, call.end)] += late / len(one.steps or [1])
    return waits, [_UNMATCHED] if unmatched else []


def _calls(one: RankFigures, group: str) -> list[_Call]:
    """A rank's collectives of a group, with what is known of when they were exposed.

    Where that is only how long, it is taken to be at the end, or all of it where the whole is not
    known either.
    """
    made = []
    for begin, exposed, *more in one.begins[group]:
        end = begin + max([exposed, *more[:1], *more[-1:]])
        spans = tuple(
            (begin + since, begin + until)
            for since, until in zip(more[1::2], more[2::2], strict=False)
        )
        made.append(_Call(begin, spans or ((end - exposed, end),), end))
    return made


def _matched(
    sequences: Sequence[tuple[RankFigures, list[_Call]]],
) -> list[tuple[_Call, ...]] | None:
    """The same collective of all ranks, in order; None where windows have nothing in common.

    Windows may begin a step apart: sequences are shifted by whole steps until their ends agree.
    """
    (first, reference), *others = sequences
    per_step = max(1, round(len(reference) / max(1, len(first.steps))))
    limit = _MATCHED_WITHIN * first.step_s
    shifts = [0]
    for _, calls in others:
        candidates = [number * per_step for number in (0, 1, -1, 2, -2)]
        apart = {shift: _apart(reference, calls, shift) for shift in candidates}
        best = min(candidates, key=lambda shift: apart[shift])
        if apart[best] > limit:
            return None
        shifts.append(best)
    lists = [reference, *(calls for _, calls in others)]
    begin = max(-shift for shift in shifts)
    until = min(len(calls) - shift for calls, shift in zip(lists, shifts, strict=True))
    return [
        tuple(calls[at + shift] for calls, shift in zip(lists, shifts, strict=True))
        for at in range(max(0, begin), until)
    ]


def _apart(reference: Sequence[_Call], calls: Sequence[_Call], shift: int) -> float:
    """How far apart collectives end, in the median, when one rank's are shifted."""
    pairs = [
        abs(reference[at].end - calls[at + shift].end)
        for at in range(len(reference))
        if 0 <= at + shift < len(calls)
    ]
    return statistics.median(pairs) if pairs else float("inf")


def _step_of(one: RankFigures, moment: float) -> int:
    """Index of the step that a moment lies in."""
    return min(bisect_left(one.ends, moment, lo=1), max(1, len(one.ends) - 1)) - 1


def mean_traffic(ranks: Sequence[RankFigures]) -> list[Traffic]:
    """Collectives by kind, in the mean of the ranks, those that are waited for longest first."""
    names = dict.fromkeys(kind.name for one in ranks for kind in one.traffic)
    made = []
    for name in names:
        same = [kind for one in ranks for kind in one.traffic if kind.name == name]
        made.append(
            Traffic(
                name=name,
                count=sum(kind.count for kind in same) / len(ranks),
                bytes=round(sum(kind.bytes for kind in same) / len(ranks)),
                seconds=sum(kind.seconds for kind in same) / len(ranks),
                exposed_s=sum(kind.exposed_s for kind in same) / len(ranks),
                waiting_s=sum(kind.waiting_s for kind in same) / len(ranks),
            )
        )
    return sorted(made, key=lambda kind: kind.waiting_s - kind.exposed_s)


# ------------------------------------------------------------------------- the straggler


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    slower: float
    """Its own work against the others' middle: 0.3 is 30 % more."""
    waited: float
    """Share of a step that the others wait, in the mean."""
    part: Part
    """Where it loses the most."""
    lost_s: float
    """Seconds of a step by which its own work is longer."""

    @property
    def where(self) -> str:
        """The part in words."""
        return NAMES[self.part]


_SLOWER = 0.15
"""Of the others' own work. Ten control runs of eight steps, two ranks on two cores that eight
processes wanted, differed by 0 to 19 %: this alone is no proof, hence _STEADY and _CLEAR."""
_WAITED = 0.08
"""Of a step: less would gain less than 9 %."""
_STEADY = 0.7
"""Of the steps in which it must be the one that waits least: noise changes sides."""
_CLEAR = 2.5
"""Standard errors by which the others' waiting must exceed its own, step by step. In the control
runs above it was 2.1 at most. With a rank that had a third more to do it was 0.5 to 4.1 under the
same load: what noise covers is not named."""
_FEWEST = 5
"""Steps that must be compared: in two or three, a rank of a healthy loop was late by chance."""


def straggler(ranks: Sequence[RankFigures]) -> Straggler | None:
    """The rank that makes the others wait, or None: figures that `compared` has told apart."""
    if len(ranks) < 2 or min(one.step_s for one in ranks) <= 0:  # noqa: PLR2004
        return None
    if min(len(one.steps) for one in ranks) < _FEWEST:
        return None
    own = {one.rank: _own(one) for one in ranks}
    slow = max(ranks, key=lambda one: own[one.rank])
    others = [one for one in ranks if one is not slow]
    usual = statistics.median(own[one.rank] for one in others)
    waited = statistics.fmean(one.parts.get("waiting", 0.0) / one.step_s for one in others)
    lost = own[slow.rank] - usual
    if usual <= 0 or lost < _SLOWER * usual or min(waited, lost / slow.step_s) < _WAITED:
        return None
    if not _steadily_last(ranks, slow):
        return None
    own_parts = [name for name in NAMES if name not in _NOT_OWN]
    part = max(own_parts, key=lambda name: _more(slow, others, name))
    return Straggler(
        rank=slow.rank,
        slower=own[slow.rank] / usual - 1,
        waited=waited,
        part=part,
        lost_s=lost,
    )


def _own(one: RankFigures) -> float:
    """Seconds of a step that depend on no other rank."""
    return sum(seconds for part, seconds in one.parts.items() if part not in _NOT_OWN)


def _more(slow: RankFigures, others: Sequence[RankFigures], part: Part) -> float:
    """By how much a part is longer on one rank than on the others."""
    return slow.parts.get(part, 0.0) - statistics.fmean(one.parts.get(part, 0.0) for one in others)


def _steadily_last(ranks: Sequence[RankFigures], slow: RankFigures) -> bool:
    """Whether, step by step, it is the same rank that waits least, and clearly so."""
    waits, _ = _waits(ranks)
    steps = sorted({step for by_step in waits.values() for step in by_step})
    if not steps:  # moments are not known; means are all there is
        return True
    if len(steps) < _FEWEST:
        return False
    least = [min(waits, key=lambda rank: waits[rank].get(step, 0.0)) for step in steps]
    if least.count(slow.rank) < _STEADY * len(steps):
        return False
    others = [by_step for rank, by_step in waits.items() if rank != slow.rank]
    late = [
        statistics.fmean(by_step.get(step, 0.0) for by_step in others)
        - waits[slow.rank].get(step, 0.0)
        for step in steps
    ]
    error = statistics.stdev(late) / math.sqrt(len(late))
    return statistics.fmean(late) >= _CLEAR * error
