"""Predicted speedups with uncertainty, for changes that do not need the planner.

Times are compared per sample, so a larger batch is not a speedup by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.profiler.measurements import DataLoaderStats
    from nbdist.profiler.profile_data import ProfileData

_SURE = 0.25
"""Relative uncertainty of each part that changes. The planner's own predictions have 20 to 40 %;
here only the ratio of two predictions is used."""
_NEVER_FETCHED_AHEAD = 0.1
"""Share of the load time that workers cannot hide: transfer between processes, and the first
batches of an epoch."""
_SHORTEST = 0.01
"""Lower bound of the predicted step time, as a share of the measured one."""
_UNEVEN = 1.2
"""Factor for workers that finish unevenly and compete with the rank for cores."""
_MOST_WORKERS = 8
_PINNED = 0.5
"""Time of a copy from pinned memory, relative to pageable memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Predicted change of the throughput, with a range."""

    faster: float
    """Relative speedup; 0.35 is 35 % more samples per second."""
    low: float
    high: float

    @classmethod
    def from_times(cls, before_s: float, after_s: float, changed_s: float) -> Speedup:
        """Create from times for the same samples.

        Args:
            before_s: measured time.
            after_s: predicted time.
            changed_s: part of the time that changes, which is uncertain.
        """
        after_s = max(after_s, _SHORTEST * before_s)
        late, early = _SURE * changed_s, _SURE * min(changed_s, after_s)
        return cls(
            faster=before_s / after_s - 1,
            low=before_s / (after_s + late) - 1,
            high=before_s / (after_s - early) - 1,
        )


def speedup_without(profile: ProfileData, seconds: float) -> Speedup:
    """Return the speedup if every step takes so many seconds less (more, if negative)."""
    step = profile.step_s
    saved = min(seconds, step)
    return Speedup.from_times(step, step - saved, abs(saved))


# ------------------------------------------------------------------------ data loader


def recommend_num_workers(profile: ProfileData) -> tuple[int, Speedup] | None:
    """Return the recommended number of DataLoader workers and the speedup.

    W workers load W batches in the time of one. With n batches of f seconds per step, and R for
    the rest of the step, the step waits max(0, n f / W - R). On CPU ranks, workers that compute
    take cores from the ranks.

    Returns:
        None if there is no loader or more workers are not faster.
    """
    loader = profile.loader
    if loader is None:
        return None
    step, data = profile.step_s, profile.data_s
    compute = max(0.0, step - data)
    fetch = _fetch_s(profile, loader)
    shared = _computing_s(loader) / _cores(profile) if profile.kind == "cpu" else 0.0
    options: list[tuple[int, Speedup]] = []
    most = _most(profile, loader)
    count = min(most, 2 * max(1, loader.num_workers))
    while loader.num_workers < count <= most:
        left = max(0.0, _UNEVEN * fetch / count - compute) + _NEVER_FETCHED_AHEAD * fetch / count
        left = min(data, max(left, shared))
        options.append((count, Speedup.from_times(step, compute + left, data - left)))
        count *= 2
    best = max((gain.faster for _, gain in options), default=0.0)
    return next(
        (option for option in options if option[1].faster >= NEARLY_BEST_FRACTION * best > 0), None
    )


def _most(profile: ProfileData, loader: DataLoaderStats) -> int:
    """Return the maximum number of workers to recommend."""
    # Workers that compute need cores; those that wait for a disk or a network do not.
    if _computing_s(loader) > loader.fetch_s * loader.batches / 2:
        return max(1, int(min(_MOST_WORKERS, _cores(profile))))
    return max(_MOST_WORKERS, 2 * loader.num_workers)


def _computing_s(loader: DataLoaderStats) -> float:
    """Return the CPU seconds to load the batches of a step; 0 if unknown."""
    return loader.fetch_cpu_s * loader.batches


def _cores(profile: ProfileData) -> float:
    """Return the cores of a machine per rank; `_MOST_WORKERS` if unknown."""
    cluster = profile.setting.cluster
    if cluster.num_cpus is None:
        return _MOST_WORKERS
    return cluster.num_cpus * cluster.num_nodes / len(cluster.devices)


NEARLY_BEST_FRACTION = 0.9
"""The smallest change that reaches this share of the best speedup is recommended."""


def _fetch_s(profile: ProfileData, loader: DataLoaderStats) -> float:
    """Return the seconds that one worker takes to load the batches of a step."""
    if loader.fetch_s > 0:
        return loader.fetch_s * max(1.0, loader.batches)
    if loader.num_workers == 0:
        return profile.data_s
    return profile.step_s * loader.num_workers  # the step is limited by the workers


def pin_memory_speedup(profile: ProfileData) -> Speedup:
    """Return the speedup by pinned memory."""
    return speedup_without(profile, _PINNED * profile.parts["copies"])
