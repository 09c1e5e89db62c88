"""What a change would bring, in a number with its uncertainty; those that need no planner; pure.

Speeds are compared per sample, so that a larger batch is no gain by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.profile.figures import Loader
    from nbdist.profile.result import Profile

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
    seconds.
    """
    loader = profile.loader
    if loader is None:
        return None
    step, data = profile.step_s, profile.data_s
    rest = max(0.0, step - data)
    fetch = _fetch_s(profile, loader)
    found: list[tuple[int, Gain]] = []
    count = 2 * max(1, loader.num_workers)
    while count <= max(_MOST_WORKERS, 2 * loader.num_workers):
        left = max(0.0, _UNEVEN * fetch / count - rest) + _NEVER_FETCHED_AHEAD * fetch / count
        found.append((count, Gain.of(step, rest + min(data, left), max(0.0, data - left))))
        count *= 2
    best = max(gain.faster for _, gain in found)
    return next((one for one in found if one[1].faster >= NEARLY * best > 0), None)


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
