"""Measurements of all ranks in one profiling window, compared; pure, in the notebook's kernel.

A collective ends only after its last rank has entered it, so a slow rank appears as communication
on all others. The k-th collective of a process group is the same on all its ranks, and ranks share
the clock: time before the last rank enters is waiting, the rest is communication.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nbdist import rank_sets
from nbdist.profiler.measurements import STEP_PARTS, CollectiveStats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.profiler.dataloader_call import DataLoaderCall
    from nbdist.profiler.lint import LintFinding
    from nbdist.profiler.measurements import (
        DataLoaderStats,
        ProfiledModel,
        RankProfile,
        StepPart,
    )
    from nbdist.strategies import Options

_MAX_END_DIFFERENCE = 0.25
"""Maximum difference between the ends of matched collectives, as a share of the step. The same
collective ends on all ranks within milliseconds; a wrong match differs by about a step."""
_NOT_OWN = ("communication", "waiting")
"""Parts of a step in which a rank depends on other ranks."""
STEP_PART_LABELS: Mapping[StepPart, str] = {
    "data": "waiting for data",
    "copies": "copies to the device",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the optimizer step",
    "communication": "exposed communication",
    "waiting": "waiting for other ranks",
    "offload": "offload traffic",
    "python": "Python code of the cell",
    "idle": "idle time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledConfig:
    """Configuration of the profiled session."""

    options: Options
    """Validated options of the session."""
    cluster: ClusterSpec
    """Devices of the ranks and the links between them."""
    model_spec: ModelSpec | None = None
    """Model for the planner. None if the planner does not support it; then no change of the
    backend is recommended."""


@dataclass(frozen=True, kw_only=True)
class ProfileData:
    """Measurements of a profile. All times are seconds per optimizer step."""

    ranks: tuple[RankProfile, ...]
    """Measurements ordered by rank, with waiting separated from communication."""
    setting: ProfiledConfig
    remarks: tuple[LintFinding, ...] = ()
    loader_text: DataLoaderCall | None = None
    """Source of the call that created the loop's DataLoader, if known."""
    general_notes: tuple[str, ...] = ()
    """Notes of the kernel and of the comparison of ranks."""

    # ------------------------------------------------------------------------ measurements

    @property
    def num_steps(self) -> int:
        """Number of steps in the window."""
        return min(len(rank.steps) for rank in self.ranks)

    @cached_property
    def step_s(self) -> float:
        """Mean step time over all ranks and steps."""
        return statistics.fmean(rank.step_s for rank in self.ranks)

    @property
    def p50_s(self) -> float:
        """Median step time."""
        return self._quantile(0.5)

    @property
    def p90_s(self) -> float:
        """90th percentile of the step time."""
        return self._quantile(0.9)

    def _quantile(self, fraction: float) -> float:
        steps = sorted(seconds for rank in self.ranks for seconds in rank.steps)
        return steps[math.ceil(fraction * len(steps)) - 1] if steps else 0.0

    @cached_property
    def parts(self) -> dict[StepPart, float]:
        """Mean time of each part of the step over all ranks."""
        return {
            name: statistics.fmean(rank.parts.get(name, 0.0) for rank in self.ranks)
            for name in STEP_PARTS
        }

    def share(self, *names: StepPart) -> float:
        """Return the share of these parts in the step."""
        return sum(self.parts[name] for name in names) / self.step_s if self.step_s > 0 else 0.0

    @property
    def hidden_s(self) -> float:
        """Mean communication time that overlaps with computation."""
        return statistics.fmean(rank.hidden_s for rank in self.ranks)

    @cached_property
    def traffic(self) -> tuple[CollectiveStats, ...]:
        """Collectives by kind, averaged over the ranks, longest exposed communication first."""
        return tuple(mean_collective_stats(self.ranks))

    @property
    def model(self) -> ProfiledModel | None:
        """The prepared model and its workload; None if unknown."""
        return next((rank.model for rank in self.ranks if rank.model is not None), None)

    @property
    def loader(self) -> DataLoaderStats | None:
        """The DataLoader that provided the most batches."""
        loaders = (self.reader or self.ranks[0]).loaders
        return max(loaders, key=lambda loader: loader.batches, default=None)

    @property
    def reader(self) -> RankProfile | None:
        """The rank that reads batches for all, as Accelerate does with an IterableDataset."""
        reading = [rank for rank in self.ranks if rank.loaders]
        return reading[0] if len(reading) == 1 < len(self.ranks) else None

    @property
    def data_s(self) -> float:
        """Time per step spent waiting for batches; that of `reader`, if there is one."""
        return self.reader.parts.get("data", 0.0) if self.reader else self.parts["data"]

    @property
    def kind(self) -> str:
        """Kind of the devices: cuda or cpu."""
        return self.ranks[0].kind

    # ------------------------------------------------------------------------- throughput

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together; 0 if the micro-batch size is unknown."""
        samples = (
            rank.model.samples * rank.model.accumulate if rank.model else 0 for rank in self.ranks
        )
        return sum(samples) / self.step_s if self.step_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together; samples if the model takes no tokens."""
        length = max(1, self.model.seq_len) if self.model else 1
        return self.samples_per_s * length

    @property
    def peak_flops(self) -> float | None:
        """Specified peak FLOP/s of the device; None on CPU ranks."""
        if self.kind == "cpu":
            return None
        return self.setting.cluster.slowest_device.peak_flops(self.precision)

    @property
    def precision(self) -> str:
        """Precision of the computation: no, fp16, bf16 or fp8."""
        return (self.model and self.model.precision) or self.setting.options.precision or "no"

    @cached_property
    def straggler_details(self) -> Straggler | None:
        """The straggler that the other ranks wait for, if there is one."""
        slow, reader = find_straggler(self.ranks), self.reader
        # If one rank reads for all, its data time is caused by the loader and not by the rank.
        if slow and reader and (slow.rank, slow.slowest_part) == (reader.rank, "data"):
            return None
        return slow

    @property
    def straggler(self) -> int | None:
        """Rank of the straggler, if there is one."""
        return self.straggler_details.rank if self.straggler_details else None

    @property
    def options(self) -> Options:
        """Options of the session, with the measured gradient accumulation and precision."""
        accumulate = self.model.accumulate if self.model else self.setting.options.accumulate
        return replace(self.setting.options, accumulate=accumulate, precision=self.precision)

    @property
    def notes(self) -> list[str]:
        """Notes for the user, such as what could not be measured and on which ranks."""
        by_note: dict[str, list[int]] = {}
        for rank in self.ranks:
            for note in rank.notes:
                by_note.setdefault(note, []).append(rank.rank)
        num_ranks = len(self.ranks)
        noted = [
            note if len(ranks) == num_ranks else f"{rank_sets.describe_ranks(ranks)}: {note}"
            for note, ranks in by_note.items()
        ]
        return [*self.general_notes, *noted]


# ------------------------------------------------------------------- waiting of the ranks

_UNMATCHED = (
    "The collectives of the ranks could not be matched, so waiting for a slower rank counts as"
    " communication."
)


class _CollectiveCall(NamedTuple):
    begin: float
    exposed: tuple[tuple[float, float], ...]
    """Spans without overlapping computation."""
    end: float

    def before(self, moment: float) -> float:
        """Return the exposed seconds before a timestamp."""
        return sum(max(0.0, min(moment, until) - since) for since, until in self.exposed)


def compare_ranks(figures: Sequence[RankProfile]) -> tuple[tuple[RankProfile, ...], list[str]]:
    """Separate waiting from communication on all ranks.

    Returns:
        The measurements ordered by rank, with waiting times of parts and collectives filled in;
        and notes about process groups that could not be compared.
    """
    ranks = sorted(figures, key=lambda rank: rank.rank)
    waits, notes = _waiting_times(ranks)
    compared: list[RankProfile] = []
    for rank in ranks:
        communication = rank.parts.get("communication", 0.0)
        moved_s = min(sum(waits[rank.rank].values()), communication)
        parts = {
            **rank.parts,
            "communication": communication - moved_s,
            "waiting": rank.parts.get("waiting", 0.0) + moved_s,
        }
        exposed = sum(kind.exposed_s for kind in rank.traffic)
        share = min(1.0, moved_s / exposed) if exposed > 0 else 0.0
        traffic = [
            replace(kind, waiting_s=max(kind.waiting_s, share * kind.exposed_s))
            for kind in rank.traffic
        ]
        compared.append(replace(rank, parts=parts, traffic=traffic))
    return tuple(compared), notes


# ------------------------------------------------------------------- the same collective


def _waiting_times(ranks: Sequence[RankProfile]) -> tuple[dict[int, dict[int, float]], list[str]]:
    """Compute the waiting time of each rank.

    Returns:
        Rank -> index of the step -> waiting seconds divided by the number of steps, so that the
        sum is the mean per step; and notes.
    """
    waits: dict[int, dict[int, float]] = {rank.rank: defaultdict(float) for rank in ranks}
    unmatched: list[str] = []
    for group in sorted({name for rank in ranks for name in rank.begins}):
        members = [rank for rank in ranks if len(rank.begins.get(group, ())) > 0]
        if len(members) < 2:  # noqa: PLR2004 - a single rank never waits
            continue
        calls = _match_calls([(rank, _calls(rank, group)) for rank in members])
        if calls is None:
            unmatched.append(group)
            continue
        for same in calls:
            last = max(call.begin for call in same)
            for rank, call in zip(members, same, strict=True):
                if waited := call.before(last):
                    last_step = max(1, len(rank.ends) - 1)
                    step = min(bisect_left(rank.ends, call.end, lo=1), last_step) - 1
                    waits[rank.rank][step] += waited / len(rank.steps or [1])
    return waits, [_UNMATCHED] if unmatched else []


def _calls(rank: RankProfile, group: str) -> list[_CollectiveCall]:
    """Return a rank's collectives of a process group.

    If the exposed spans are unknown, the exposed time is assumed to be at the end of the
    collective. If its total time is unknown too, all of it is assumed to be exposed.
    """
    calls = []
    for begin, exposed, *more in rank.begins[group]:
        end = begin + max([exposed, *more[:1], *more[-1:]])
        spans = tuple(
            (begin + since, begin + until)
            for since, until in zip(more[1::2], more[2::2], strict=False)
        )
        calls.append(_CollectiveCall(begin, spans or ((end - exposed, end),), end))
    return calls


def _match_calls(
    sequences: Sequence[tuple[RankProfile, list[_CollectiveCall]]],
) -> list[tuple[_CollectiveCall, ...]] | None:
    """Group the calls of the same collective on all ranks, in order.

    The windows of ranks may start up to two steps apart, so sequences are shifted by whole steps
    until the ends of the collectives agree. Returns None if they never do.
    """
    (first, reference), *others = sequences
    per_step = max(1, round(len(reference) / max(1, len(first.steps))))
    limit = _MAX_END_DIFFERENCE * first.step_s
    shifts = [0]
    for _, calls in others:
        candidates = [number * per_step for number in (0, 1, -1, 2, -2)]
        median_distances = {}
        for shift in candidates:
            pairs = zip(reference[max(0, -shift) :], calls[max(0, shift) :], strict=False)
            differences = [abs(call.end - other.end) for call, other in pairs]
            median_distances[shift] = (
                statistics.median(differences) if differences else float("inf")
            )
        best = min(candidates, key=lambda shift: median_distances[shift])
        if median_distances[best] > limit:
            return None
        shifts.append(best)
    lists = [reference, *(calls for _, calls in others)]
    begin = max(-shift for shift in shifts)
    until = min(len(calls) - shift for calls, shift in zip(lists, shifts, strict=True))
    return [
        tuple(calls[at + shift] for calls, shift in zip(lists, shifts, strict=True))
        for at in range(max(0, begin), until)
    ]


def mean_collective_stats(ranks: Sequence[RankProfile]) -> list[CollectiveStats]:
    """Average the collectives of each kind over the ranks, longest exposed communication first."""
    names = dict.fromkeys(kind.name for rank in ranks for kind in rank.traffic)
    means = []
    for name in names:
        same = [kind for rank in ranks for kind in rank.traffic if kind.name == name]
        means.append(
            CollectiveStats(
                name=name,
                count=sum(kind.count for kind in same) / len(ranks),
                bytes=round(sum(kind.bytes for kind in same) / len(ranks)),
                seconds=sum(kind.seconds for kind in same) / len(ranks),
                exposed_s=sum(kind.exposed_s for kind in same) / len(ranks),
                waiting_s=sum(kind.waiting_s for kind in same) / len(ranks),
            )
        )
    return sorted(means, key=lambda kind: kind.waiting_s - kind.exposed_s)


# ------------------------------------------------------------------------- the straggler


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others, which wait for it."""

    rank: int
    slowdown: float
    """Own work relative to the median of the other ranks; 0.3 is 30 % more."""
    wait_share: float
    """Mean share of a step that the others wait."""
    slowest_part: StepPart
    """Part of the step with the largest difference."""
    lost_s: float
    """Seconds per step by which its own work is longer."""


_SLOWER = 0.15
"""Minimum excess of own work over the other ranks. In ten control runs of eight steps with two
ranks, on two cores shared by eight processes, ranks differed by 0 to 19 %. So this alone is not
sufficient, hence `_STEADY` and `_CLEAR`."""
_MIN_WAIT_SHARE = 0.08
"""Minimum share of the step that others wait. Less would gain less than 9 %."""
_STEADY = 0.7
"""Minimum share of the steps in which the straggler waits least. With noise the rank varies."""
_CLEAR = 2.5
"""Number of standard errors by which the others' waiting must exceed its own, over the steps. In
the control runs above it was at most 2.1. With a rank that had a third more work it was 0.5 to 4.1
under the same load, so a straggler may be missed in noise."""
_MIN_STEPS = 5
"""Minimum number of steps. In two or three steps a rank may be late by chance."""


def find_straggler(ranks: Sequence[RankProfile]) -> Straggler | None:
    """Return the straggler, or None.

    Args:
        ranks: measurements processed by ``compare_ranks``.
    """
    if len(ranks) < 2 or min(rank.step_s for rank in ranks) <= 0:  # noqa: PLR2004
        return None
    if min(len(rank.steps) for rank in ranks) < _MIN_STEPS:
        return None
    own_parts = [name for name in STEP_PART_LABELS if name not in _NOT_OWN]
    own = {rank.rank: sum(rank.parts.get(name, 0.0) for name in own_parts) for rank in ranks}
    slow = max(ranks, key=lambda rank: own[rank.rank])
    others = [rank for rank in ranks if rank is not slow]
    usual = statistics.median(own[rank.rank] for rank in others)
    waited = statistics.fmean(rank.parts.get("waiting", 0.0) / rank.step_s for rank in others)
    lost = own[slow.rank] - usual
    if usual <= 0 or lost < _SLOWER * usual or min(waited, lost / slow.step_s) < _MIN_WAIT_SHARE:
        return None
    if not _steadily_last(ranks, slow):
        return None
    differences = {
        name: slow.parts.get(name, 0.0)
        - statistics.fmean(rank.parts.get(name, 0.0) for rank in others)
        for name in own_parts
    }
    return Straggler(
        rank=slow.rank,
        slowdown=own[slow.rank] / usual - 1,
        wait_share=waited,
        slowest_part=max(differences, key=lambda name: differences[name]),
        lost_s=lost,
    )


def _steadily_last(ranks: Sequence[RankProfile], slow: RankProfile) -> bool:
    """Return whether this rank consistently and significantly waits least, over the steps."""
    waits, _ = _waiting_times(ranks)
    steps = sorted({step for by_step in waits.values() for step in by_step})
    if not steps:  # without timestamps only the means can be compared
        return True
    if len(steps) < _MIN_STEPS:
        return False
    least = [min(waits, key=lambda rank: waits[rank].get(step, 0.0)) for step in steps]
    if least.count(slow.rank) < _STEADY * len(steps):
        return False
    others = [by_step for rank, by_step in waits.items() if rank != slow.rank]
    excess = [
        statistics.fmean(by_step.get(step, 0.0) for by_step in others)
        - waits[slow.rank].get(step, 0.0)
        for step in steps
    ]
    error = statistics.stdev(excess) / math.sqrt(len(excess))
    return statistics.fmean(excess) >= _CLEAR * error
