"""How fast this machine was measured to be: links between ranks, computing, disk; pure.

The catalogue says what a link or a device reaches typically; here is what ranks measured, on
request (`worker.benchmarks.communication`) or while the user's own loop was profiled (`learning`).
`known` keeps it; each kind reads its entries itself, and takes none that cannot be.

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
KINDS = ("fp32", "bf16", "fp16")
"""Types that are measured; fp8 follows bf16."""
Curve = tuple[tuple[int, float], ...]
"""Size and time of one collective, smallest first."""

LOOP_SHARE = 0.75
"""Of matrix products measured alone, what a training loop reaches: 0.83 on A100 and 0.65 on H100
(the catalogue's `sustained`, against 271 and 792 TFLOP/s of stas00/ml-engineering's mamf)."""

SMALL = 1 << 16
"""A collective of fewer bytes takes as long as one of so many."""
LARGE = 1 << 20
"""One of more bytes than the largest measured takes longer in proportion, from this size on."""
_NEAR = 2.0
"""Sizes within this factor are one point of a curve."""
_POINTS = 12
_WEIGHT_OF_NEW = 0.5
"""Of a profile against what was there; a calibration replaces it."""

# What is beyond these was not measured, or not on a machine of this decade.
_LINK = (1e5, 1e14)
_FLOPS = (1e8, 1e17)
_MEMORY = (1e7, 1e15)
_DISK = (1e4, 1e12)
_SECONDS = (1e-8, 600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Collectives of all ranks."""

    curves: Mapping[str, Curve]
    day: str
    runs: int = 1

    def seconds(self, collective: str, size: float) -> float | None:
        """Time of one collective of this size; None where that is far from what was measured."""
        curve = self.curves.get(collective, ())
        if not curve:
            return None
        first, last = curve[0], curve[-1]
        if size <= first[0]:
            return first[1] if first[0] <= SMALL or size * _NEAR >= first[0] else None
        if size >= last[0]:
            near = size <= last[0] * _NEAR
            return last[1] * size / last[0] if near or last[0] >= LARGE else None
        upper = next(place for place, (there, _) in enumerate(curve) if there >= size)
        (below, quick), (above, slow) = curve[upper - 1], curve[upper]
        return quick + (slow - quick) * (size - below) / (above - below)

    def with_point(self, collective: str, size: int, seconds: float, day: str) -> Links:
        """The same with what a run has measured, beside what was there or averaged with it."""
        curve = dict(self.curves.get(collective, ()))
        for near in [one for one in curve if one / _NEAR < size < one * _NEAR]:
            old = curve.pop(near)
            seconds = old + _WEIGHT_OF_NEW * (seconds - old)
        points = sorted((curve | {size: seconds}).items())[-_POINTS:]
        return Links(
            curves=MappingProxyType({**self.curves, collective: tuple(points)}),
            day=day,
            runs=self.runs + 1,
        )

    @classmethod
    def parsed(cls, entry: Any) -> Self | None:
        """Read an entry; None for what cannot be."""
        try:
            curves = {name: _curve(entry["curves"].get(name, ())) for name in COLLECTIVES}
            made = cls(
                curves=MappingProxyType({name: one for name, one in curves.items() if one}),
                **_noted(entry),
            )
        except _ODD:
            return None
        return made if made.curves else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Computing in the user's own training loop."""

    flops: float
    memory: float
    model: str
    """Whose loop it was."""
    day: str
    runs: int = 1

    @classmethod
    def parsed(cls, entry: Any) -> Self | None:
        """Read an entry; None for what cannot be."""
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
class Pace:
    """Computing of one rank while all compute."""

    products: Mapping[str, float] = field(default_factory=dict)
    """Type (fp32, bf16, fp16) -> FLOP/s of large matrix products."""
    memory: float | None = None
    """Bytes/s that elementwise kernels read and write, each result in memory of its own."""
    host_link: float | None = None
    """Page-locked copies to a GPU."""
    loops: Mapping[str, Loop] = field(default_factory=dict)
    """Type -> what a training loop reached."""
    day: str = ""
    """Of products and memory."""
    runs: int = 0

    def flops(self, kind: str) -> float | None:
        """What a training loop reaches in a type; None where it was not measured."""
        if kind in self.loops:
            return self.loops[kind].flops
        return self.products[kind] * LOOP_SHARE if kind in self.products else None

    def memory_in(self, kind: str) -> float | None:
        """Bytes/s of elementwise kernels of a loop in a type."""
        return self.loops[kind].memory if kind in self.loops else self.memory

    def faster(self, factor: float) -> Pace:
        """The same of a rank that computes so many times as fast."""
        loops = {
            kind: replace(one, flops=factor * one.flops, memory=factor * one.memory)
            for kind, one in self.loops.items()
        }
        return replace(
            self,
            products={kind: factor * one for kind, one in self.products.items()},
            memory=None if self.memory is None else factor * self.memory,
            loops=loops,
        )

    def source(self, kind: str) -> str:
        """Day on which computing in a type was measured; "" where it was not."""
        if kind in self.loops:
            return self.loops[kind].day
        return self.day if kind in self.products else ""

    @classmethod
    def parsed(cls, entry: Any) -> Self | None:
        """Read an entry, without loops; None for what cannot be."""
        try:
            products = {
                kind: _within(entry["products"][kind], _FLOPS)
                for kind in KINDS
                if kind in entry["products"]
            }
            made = cls(
                products=MappingProxyType(products),
                memory=_maybe(entry.get("memory"), _MEMORY),
                host_link=_maybe(entry.get("host_link"), _LINK),
                **_noted(entry),
            )
        except _ODD:
            return None
        return made if made.products else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A file system, all ranks at once."""

    read: float
    write: float
    filesystem: str
    """As "ext4 on /dev/nvme0n1p1"."""
    day: str = ""
    runs: int = 1

    @property
    def both(self) -> float:
        """Bytes/s where as much is read as written."""
        return 2 / (1 / self.read + 1 / self.write)

    @property
    def in_memory(self) -> bool:
        """It is no disk."""
        return self.is_memory(self.filesystem)

    @staticmethod
    def is_memory(filesystem: str) -> bool:
        """Whether a file system is no disk."""
        return filesystem.partition(" ")[0] in {"tmpfs", "ramfs"}

    @classmethod
    def parsed(cls, entry: Any) -> Self | None:
        """Read an entry; None for what cannot be."""
        try:
            return cls(
                read=_within(entry["read"], _DISK),
                write=_within(entry["write"], _DISK),
                filesystem=str(entry["filesystem"])[:200],
                **_noted(entry),
            )
        except _ODD:
            return None


# ------------------------------------------------------------------- all ranks together


def slowest_curves(
    everyone: Iterable[Mapping[str, Iterable[tuple[int, float]]]],
) -> Mapping[str, Curve]:
    """Curves of a calibration: of each size the slowest rank's time."""
    times: dict[str, dict[int, float]] = {}
    for curves in everyone:
        for name, curve in curves.items():
            for size, seconds in curve:
                mine = times.setdefault(name, {})
                mine[size] = max(seconds, mine.get(size, 0.0))
    return {name: tuple(sorted(points.items())) for name, points in times.items()}


# -------------------------------------------------------------------------- reading

_ODD = (TypeError, KeyError, ValueError, OverflowError, AttributeError)


def _within(given: Any, limits: tuple[float, float]) -> float:
    """A number that can be.

    Raises:
        ValueError: it cannot.
    """
    low, high = limits
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not low <= given <= high:
        raise ValueError(given)
    return float(given)


def _maybe(given: Any, limits: tuple[float, float]) -> float | None:
    return None if given is None else _within(given, limits)


def _noted(entry: Any) -> dict[str, Any]:
    """Day and number of runs.

    Raises:
        ValueError: there is no such day, or it is yet to come.
    """
    runs, day = entry["runs"], cache.day(entry["day"])
    if not day or day > cache.today() or isinstance(runs, bool) or not 1 <= int(runs) < 10**6:
        raise ValueError(entry)
    return {"day": day, "runs": int(runs)}


def _curve(points: Any) -> Curve:
    """Points of a curve.

    Raises:
        ValueError: they cannot be.
    """
    curve = []
    for size, seconds in points:
        took = _within(seconds, _SECONDS)
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 50:
            raise ValueError(size)
        if size >= LARGE:
            _within(size / took, _LINK)
        curve.append((size, took))
    if len(curve) > 4 * _POINTS or any(not math.isfinite(took) for _, took in curve):
        raise ValueError(points)
    return tuple(sorted(curve))
