"""What a change would bring, in a number with its uncertainty; those that need no planner; pure.

Speeds are compared per sample, so that a larger batch is no gain by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.profiler.measurements import Loader
    from nbdist.profiler.report import Profile

_SURE = 0.25
"""Of each part that changes: how far its new length may be off. The planner states 20 to 40 % for
parts that it only predicts; here a ratio of two of its figures is used."""
_NEVER_FETCHED_AHEAD = 0.1
"""Of a batch's time: handing it over, and the first ones of an epoch."""
_SHORTEST = 0.01
"""Of a step: no change makes it a hundred times as fast."""
_UNEVEN = 1.2
"""Workers are not always done in time for one another, and take cores from the rank."""
_MOST_WORKERS = 8
_PINNED = 0.5
"""Of a copy's time from pageable memory that one from page-locked memory takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How much faster the same samples would be done."""

    faster: float
    """0.35: 35 % more samples a second."""
    low: float
    high: float

    @classmethod
    def of(cls, before_s: float, after_s: float, changed_s: float) -> Gain:
        """From seconds before and after for the same samples, and how many of them change."""
        after_s = max(after_s, _SHORTEST * before_s)
        late, early = _SURE * changed_s, _SURE * min(changed_s, after_s)
        return cls(
            faster=before_s / after_s - 1,
            low=before_s / (after_s + late) - 1,
            high=before_s / (after_s - early) - 1,
        )


def without(profile: Profile, seconds: float) -> Gain:
    """The gain of taking so many seconds out of every step; negative ones are put in."""
    step = profile.step_s
    gone = min(seconds, step)
    return Gain.of(step, step - gone, abs(gone))


# ------------------------------------------------------------------------ the data loader


def workers(profile: Profile) -> tuple[int, Gain] | None:
    """How many workers the loader needs, and what they bring; None where it has enough.

    While a step computes, W workers make W batches in the time of one. What they do not make
    during the rest of the step, R, is waited for: max(0, n f / W - R) for n batches of f
    seconds. On CPU ranks batches that are computed take cores from the ranks all the same.
    """
    loader = profile.loader
    if loader is None:
        return None
    step, data = profile.step_s, profile.data_s
    rest = max(0.0, step - data)
    fetch = _fetch_s(profile, loader)
    shared = _computing_s(loader) / _cores(profile) if profile.kind == "cpu" else 0.0
    found: list[tuple[int, Gain]] = []
    most = _most(profile, loader)
    count = min(most, 2 * max(1, loader.num_workers))
    while loader.num_workers < count <= most:
        left = max(0.0, _UNEVEN * fetch / count - rest) + _NEVER_FETCHED_AHEAD * fetch / count
        left = min(data, max(left, shared))
        found.append((count, Gain.of(step, rest + left, data - left)))
        count *= 2
    best = max((gain.faster for _, gain in found), default=0.0)
    return next((one for one in found if one[1].faster >= NEARLY * best > 0), None)


def _most(profile: Profile, loader: Loader) -> int:
    """Workers that compute need cores; those that wait for a disk or a network do not."""
    if _computing_s(loader) > loader.fetch_s * loader.batches / 2:
        return max(1, int(min(_MOST_WORKERS, _cores(profile))))
    return max(_MOST_WORKERS, 2 * loader.num_workers)


def _computing_s(loader: Loader) -> float:
    """Seconds of a core that the batches of a step take; 0 where it is not known."""
    return loader.fetch_cpu_s * loader.batches


def _cores(profile: Profile) -> float:
    """Of the machine, for one rank; as many as are ever wanted where nobody said."""
    cluster = profile.setting.cluster
    if cluster.num_cpus is None:
        return _MOST_WORKERS
    return cluster.num_cpus * cluster.nodes / len(cluster.devices)


NEARLY = 0.9
"""Of the best gain: the smallest change that reaches so much of it is advised."""


def _fetch_s(profile: Profile, loader: Loader) -> float:
    """Seconds that one worker takes for the batches of a step."""
    if loader.fetch_s > 0:
        return loader.fetch_s * max(1.0, loader.batches)
    if loader.num_workers == 0:
        return profile.data_s
    return profile.step_s * loader.num_workers  # it is them that the step waits for


def pinned(profile: Profile) -> Gain:
    """The gain of page-locked batches."""
    return without(profile, _PINNED * profile.parts["copies"])
