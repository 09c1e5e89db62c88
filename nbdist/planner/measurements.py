"""Speeds measured on this machine: collectives, compute, disk; pure.

The catalogue holds typical speeds; this module holds those measured by ranks on request
(`worker.benchmarks.calibration`) or while the user's loop was profiled (`fit_measurements`).
`measurement_store` keeps them; each class parses its own entries and rejects implausible ones.

Sizes are in bytes of the full tensor (all_gather's output, reduce_scatter's input), times in
seconds, speeds in bytes/s and FLOP/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from nbdist.planner import cache

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
DTYPES = ("fp32", "bf16", "fp16")
"""Measured data types; fp8 is derived from bf16."""
TimingCurve = tuple[tuple[int, float], ...]
"""Size and time of one collective, in ascending order of size."""

DEFAULT_LOOP_EFFICIENCY = 0.75
"""Speed of a training loop relative to matrix products alone: 0.83 on A100 and 0.65 on H100 (the
catalogue's `compute_efficiency`, against 271 and 792 TFLOP/s of stas00/ml-engineering's mamf)."""

SMALL_COLLECTIVE_BYTES = 1 << 16
"""Collectives of fewer bytes take as long as one of this size."""
LARGE_COLLECTIVE_BYTES = 1 << 20
"""From this size on, the time is extrapolated in proportion to the size."""
_NEAR = 2.0
"""Sizes within this factor are one point of a curve."""
_POINTS = 12
_WEIGHT_OF_NEW = 0.5
"""Weight of a profile against older values; a calibration replaces them."""

# Values outside these ranges are implausible.
_LINK = (1e5, 1e14)
_FLOPS = (1e8, 1e17)
_MEMORY = (1e7, 1e15)
_DISK = (1e4, 1e12)
_SECONDS = (1e-8, 600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSpeed:
    """Measured collectives between all ranks."""

    curves: Mapping[str, TimingCurve]
    day: str
    runs: int = 1

    def collective_time_s(self, collective: str, size: float) -> float | None:
        """Return the time of a collective, or None if its size is too far from measured ones."""
        curve = self.curves.get(collective, ())
        if not curve:
            return None
        first, last = curve[0], curve[-1]
        if size <= first[0]:
            return (
                first[1] if first[0] <= SMALL_COLLECTIVE_BYTES or size * _NEAR >= first[0] else None
            )
        if size >= last[0]:
            near = size <= last[0] * _NEAR
            return last[1] * size / last[0] if near or last[0] >= LARGE_COLLECTIVE_BYTES else None
        upper = next(index for index, (measured, _) in enumerate(curve) if measured >= size)
        (below, quick), (above, slow) = curve[upper - 1], curve[upper]
        return quick + (slow - quick) * (size - below) / (above - below)

    def with_measurement(self, collective: str, size: int, seconds: float, day: str) -> CommSpeed:
        """Return a copy with one more measurement, averaged with an older one of similar size."""
        curve = dict(self.curves.get(collective, ()))
        for near in [known for known in curve if known / _NEAR < size < known * _NEAR]:
            old = curve.pop(near)
            seconds = old + _WEIGHT_OF_NEW * (seconds - old)
        points = sorted((curve | {size: seconds}).items())[-_POINTS:]
        return CommSpeed(
            curves=MappingProxyType({**self.curves, collective: tuple(points)}),
            day=day,
            runs=self.runs + 1,
        )

    @classmethod
    def from_json(cls, entry: Any) -> Self | None:
        """Parse an entry; None if it is invalid."""
        try:
            curves = {name: _curve(entry["curves"].get(name, ())) for name in COLLECTIVES}
            links = cls(
                curves=MappingProxyType({name: curve for name, curve in curves.items() if curve}),
                **_noted(entry),
            )
        except _ODD:
            return None
        return links if links.curves else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEfficiency:
    """Compute speed reached in the user's training loop."""

    flops: float
    memory: float
    model: str
    """Name of the model that was trained."""
    day: str
    runs: int = 1

    @classmethod
    def from_json(cls, entry: Any) -> Self | None:
        """Parse an entry; None if it is invalid."""
        try:
            return cls(
                flops=_within(entry["flops"], _FLOPS),
                memory=_within(entry["memory"], _MEMORY),
                model=str(entry["model"])[:200],
                **_noted(entry),
            )
        except _ODD:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpeed:
    """Compute speed of one rank while all ranks compute."""

    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    """Data type (fp32, bf16, fp16) -> FLOP/s of large matrix products."""
    memory_bandwidth: float | None = None
    """Bytes/s that elementwise kernels read and write, each result in new memory."""
    host_link: float | None = None
    """Bytes/s of pinned copies to a GPU."""
    loop_efficiency: Mapping[str, LoopEfficiency] = field(default_factory=dict)
    """Data type -> speed reached in a training loop."""
    day: str = ""
    """Date of the matrix product and memory measurements."""
    runs: int = 0

    def flops_for(self, kind: str) -> float | None:
        """Return the FLOP/s of a training loop in a data type, or None if not measured."""
        if kind in self.loop_efficiency:
            return self.loop_efficiency[kind].flops
        return (
            self.matmul_flops[kind] * DEFAULT_LOOP_EFFICIENCY if kind in self.matmul_flops else None
        )

    def memory_bandwidth_for(self, kind: str) -> float | None:
        """Return the bytes/s of elementwise kernels of a loop in a data type."""
        return (
            self.loop_efficiency[kind].memory
            if kind in self.loop_efficiency
            else self.memory_bandwidth
        )

    def scaled(self, factor: float) -> ComputeSpeed:
        """Return the speeds of a rank whose compute is faster by a factor."""
        loops = {
            kind: replace(loop, flops=factor * loop.flops, memory=factor * loop.memory)
            for kind, loop in self.loop_efficiency.items()
        }
        return replace(
            self,
            matmul_flops={kind: factor * flops for kind, flops in self.matmul_flops.items()},
            memory_bandwidth=None
            if self.memory_bandwidth is None
            else factor * self.memory_bandwidth,
            loop_efficiency=loops,
        )

    def measured_date(self, kind: str) -> str:
        """Return the date on which compute in a data type was measured, or ""."""
        if kind in self.loop_efficiency:
            return self.loop_efficiency[kind].day
        return self.day if kind in self.matmul_flops else ""

    @classmethod
    def from_json(cls, entry: Any) -> Self | None:
        """Parse an entry without loops; None if it is invalid."""
        try:
            products = {
                kind: _within(entry["products"][kind], _FLOPS)
                for kind in DTYPES
                if kind in entry["products"]
            }
            pace = cls(
                matmul_flops=MappingProxyType(products),
                memory_bandwidth=_maybe(entry.get("memory"), _MEMORY),
                host_link=_maybe(entry.get("host_link"), _LINK),
                **_noted(entry),
            )
        except _ODD:
            return None
        return pace if pace.matmul_flops else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpeed:
    """Speed of a file system while all ranks use it."""

    read: float
    write: float
    filesystem: str
    """Type and device, such as "ext4 on /dev/nvme0n1p1"."""
    day: str = ""
    runs: int = 1

    @property
    def mixed_bandwidth(self) -> float:
        """Bytes/s if as much is read as written."""
        return 2 / (1 / self.read + 1 / self.write)

    @property
    def is_in_memory(self) -> bool:
        """True if the file system is in memory, not on a disk."""
        return self.is_memory_filesystem(self.filesystem)

    @staticmethod
    def is_memory_filesystem(filesystem: str) -> bool:
        """Return whether a file system is in memory, not on a disk."""
        return filesystem.partition(" ")[0] in {"tmpfs", "ramfs"}

    @classmethod
    def from_json(cls, entry: Any) -> Self | None:
        """Parse an entry; None if it is invalid."""
        try:
            return cls(
                read=_within(entry["read"], _DISK),
                write=_within(entry["write"], _DISK),
                filesystem=str(entry["filesystem"])[:200],
                **_noted(entry),
            )
        except _ODD:
            return None


# ----------------------------------------------------------------- merging of all ranks


def slowest_curves(
    everyone: Iterable[Mapping[str, Iterable[tuple[int, float]]]],
) -> Mapping[str, TimingCurve]:
    """Merge the curves of all ranks: for each size the slowest rank's time."""
    times: dict[str, dict[int, float]] = {}
    for curves in everyone:
        for name, curve in curves.items():
            for size, seconds in curve:
                slowest = times.setdefault(name, {})
                slowest[size] = max(seconds, slowest.get(size, 0.0))
    return {name: tuple(sorted(points.items())) for name, points in times.items()}


# -------------------------------------------------------------------------- parsing

_ODD = (TypeError, KeyError, ValueError, OverflowError, AttributeError)


def _within(given: Any, limits: tuple[float, float]) -> float:
    """Validate a number.

    Raises:
        ValueError: not a number within the limits.
    """
    low, high = limits
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not low <= given <= high:
        raise ValueError(given)
    return float(given)


def _maybe(given: Any, limits: tuple[float, float]) -> float | None:
    return None if given is None else _within(given, limits)


def _noted(entry: Any) -> dict[str, Any]:
    """Return date and number of runs of an entry.

    Raises:
        ValueError: an invalid date, one in the future, or an invalid number.
    """
    runs, day = entry["runs"], cache.parse_date(entry["day"])
    if not day or day > cache.today() or isinstance(runs, bool) or not 1 <= int(runs) < 10**6:
        raise ValueError(entry)
    return {"day": day, "runs": int(runs)}


def _curve(points: Any) -> TimingCurve:
    """Parse the points of a curve.

    Raises:
        ValueError: implausible points.
    """
    curve = []
    for size, seconds in points:
        valid_s = _within(seconds, _SECONDS)
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 50:
            raise ValueError(size)
        if size >= LARGE_COLLECTIVE_BYTES:
            _within(size / valid_s, _LINK)
        curve.append((size, valid_s))
    if len(curve) > 4 * _POINTS or any(not math.isfinite(valid_s) for _, valid_s in curve):
        raise ValueError(points)
    return tuple(sorted(curve))
