"""Measurements of this machine, in one file of the user's cache folder; pure.

The catalogue holds typical speeds. A calibration (`worker.operations.calibrate`), a profile of
the user's loop and a session's third optimizer step measure this machine; `MeasurementStore` keeps
each as a `Measurement`. Files of the cache folder may be deleted at any time; their contents are
untrusted and validated on reading.

Sizes are in bytes of the full tensor (all_gather's output, reduce_scatter's input), times in
seconds, speeds in bytes/s and FLOP/s.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache as once
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbdist import paths, rank_python

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.rank_python import RankPython

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
DTYPES = ("fp32", "bf16", "fp16")
"""Measured data types; fp8 is derived from bf16."""

MeasurementKind = Literal["collective", "compute", "loop", "disk", "memory"]
"""Kinds of measurements.

collective: seconds by size of one collective between these ranks.
compute: one rank while all ranks compute: FLOP/s of large matrix products by data type, bytes/s of
    elementwise kernels ("memory"), bytes/s of pinned copies to a GPU ("host_link").
loop: "flops" and "memory" that the user's training loop reached in one data type.
disk: bytes/s of "read" and "write" of a file system while all ranks use it.
memory: device memory beyond tensors of a device, backend and offload: "factor" of the allocator,
    "context_bytes" of CUDA and the communicator.
"""

_LINK = (1e5, 1e14)
_FLOPS = (1e8, 1e17)
_BANDWIDTH = (1e7, 1e15)
_DISK = (1e4, 1e12)
_SECONDS = (1e-8, 600.0)
ALLOCATOR_FACTOR_LIMITS = (1.0, 1.5)
"""A factor outside this range is a measurement error, such as another process on the device."""
_PLAUSIBLE: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "compute": dict.fromkeys(DTYPES, _FLOPS) | {"memory": _BANDWIDTH, "host_link": _LINK},
    "loop": {"flops": _FLOPS, "memory": _BANDWIDTH},
    "disk": {"read": _DISK, "write": _DISK},
    "memory": {"factor": ALLOCATOR_FACTOR_LIMITS, "context_bytes": (0, 1e13)},
}
"""Kind -> quantity -> range; a value outside of it is not believed."""

DEFAULT_LOOP_EFFICIENCY = 0.75
"""Speed of a training loop relative to matrix products alone: 0.83 on A100 and 0.65 on H100 (the
catalogue's `compute_efficiency`, against 271 and 792 TFLOP/s of stas00/ml-engineering's mamf)."""
WEIGHT_OF_NEW = 0.5
"""Weight of a new profile or session against all earlier ones: high, as drivers and libraries
change."""
MAX_ENTRIES = 64
"""Entries of one kind that the file keeps; the oldest are dropped."""

SMALL_COLLECTIVE_BYTES = 1 << 16
"""Collectives of fewer bytes take as long as one of this size."""
LARGE_COLLECTIVE_BYTES = 1 << 20
"""From this size on, the time is extrapolated in proportion to the size."""
_MERGE_RATIO = 2.0
"""Sizes within this factor are one point of a curve."""
_POINTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Quantities that were measured together."""

    values: Mapping[str, float]
    """Quantity -> value; see `MeasurementKind`. A collective's quantities are its sizes."""
    day: str
    """Date of the last measurement, such as "2026-11-21"."""
    runs: int = 1
    """Number of measurements so far."""

    @classmethod
    def from_json(cls, kind: MeasurementKind, entry: Any) -> Measurement | None:
        """Parse an entry of the file; None if it is invalid, implausible or from the future."""
        try:
            values, runs = entry["values"], entry["runs"]
            day = dt.date.fromisoformat(str(entry["day"])).isoformat()
            if day > today() or isinstance(runs, bool) or not 1 <= runs < 10**6:
                return None
            given = {str(name): value for name, value in values.items()}
        except (TypeError, KeyError, ValueError, AttributeError):
            return None
        if not given or not _is_plausible(kind, given):
            return None
        return cls(values=given, day=day, runs=int(runs))

    def updated(self, kind: MeasurementKind, values: Mapping[str, float]) -> dict[str, float]:
        """Return its values with new ones, each averaged with the same older quantity."""
        merged = dict(self.values)
        for name, new in values.items():
            average, reset_names = new, [name]
            if kind == "collective":
                size = int(name)
                reset_names = [
                    known
                    for known in merged
                    if size / _MERGE_RATIO < int(known) < size * _MERGE_RATIO
                ]
            for old in [merged.pop(each) for each in reset_names if each in merged]:
                average = old + WEIGHT_OF_NEW * (average - old)
            merged[name] = average
        if kind == "collective":
            merged = dict(sorted(merged.items(), key=lambda item: int(item[0]))[-_POINTS:])
        return merged

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """Size and time of a collective, in ascending order of size."""
        return tuple(sorted((int(size), seconds) for size, seconds in self.values.items()))

    def collective_time_s(self, size: float) -> float | None:
        """Return the time of a collective, or None if its size is too far from measured ones."""
        curve = self.curve
        first, last = curve[0], curve[-1]
        if size <= first[0]:
            near = first[0] <= SMALL_COLLECTIVE_BYTES or size * _MERGE_RATIO >= first[0]
            return first[1] if near else None
        if size >= last[0]:
            near = size <= last[0] * _MERGE_RATIO or last[0] >= LARGE_COLLECTIVE_BYTES
            return last[1] * size / last[0] if near else None
        upper = next(index for index, (measured, _) in enumerate(curve) if measured >= size)
        (below, quick), (above, slow) = curve[upper - 1], curve[upper]
        return quick + (slow - quick) * (size - below) / (above - below)

    def scaled(self, factor: float) -> Measurement:
        """Return the measurement of a rank whose compute is faster by a factor."""
        faster = {
            name: value if name == "host_link" else factor * value
            for name, value in self.values.items()
        }
        return replace(self, values=faster)


def _is_plausible(kind: MeasurementKind, values: Mapping[str, Any]) -> bool:
    if kind != "collective":
        ranges = _PLAUSIBLE[kind]
        if not values.keys() <= ranges.keys():
            return False
        needed = (
            values.keys() & set(DTYPES) if kind == "compute" else values.keys() == ranges.keys()
        )
        return bool(needed) and all(_is_within(values[name], *ranges[name]) for name in values)
    for text, seconds in values.items():
        if (
            not text.isdecimal()
            or not 0 < int(text) < 1 << 50
            or not _is_within(seconds, *_SECONDS)
        ):
            return False
        if int(text) >= LARGE_COLLECTIVE_BYTES and not _is_within(int(text) / seconds, *_LINK):
            return False
    return len(values) <= 4 * _POINTS


def _is_within(value: Any, low: float, high: float) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and low <= value <= high


class MeasurementStore:
    """All measurements of a machine, read once per plan.

    Entries are keyed by kind, place, host processor and torch version, not by host name, so that a
    folder shared by several hosts holds the entries of each.

    Args:
        host: distinguishes hosts with the same GPUs: processor and cores. Not needed for "memory",
            which does not depend on it.
        file: default: the user's file.
    """

    def __init__(self, host: str = "", file: Path | None = None) -> None:
        """Read the file. An unreadable file counts as empty."""
        self._file = file or store_path()
        self._host = host
        self._sections = read_entries(self._file)

    def get(self, kind: MeasurementKind, place: str) -> Measurement | None:
        """Return what was measured at a place: the name of a device, ranks, a file system."""
        return Measurement.from_json(kind, self._section(kind).get(self._key(kind, place)))

    def latest(self, kind: MeasurementKind) -> tuple[str, Measurement] | None:
        """Return the place and the measurement of this kind that was made last."""
        suffix = self._key(kind, "")
        entries = {
            key.removesuffix(suffix): Measurement.from_json(kind, entry)
            for key, entry in self._section(kind).items()
            if key.endswith(suffix)
        }
        valid = [(place, entry) for place, entry in entries.items() if entry is not None]
        return max(valid, key=lambda item: item[1].day, default=None)

    def record(
        self,
        kind: MeasurementKind,
        place: str,
        values: Mapping[str, float],
        *,
        average: bool = True,
    ) -> Measurement | None:
        """Add a measurement of today; `save` writes it.

        Args:
            kind: what was measured.
            place: as in `get`.
            values: by quantity.
            average: average with the older measurement; otherwise replace it.

        Returns:
            The stored measurement; None if it is implausible, and then nothing is stored.
        """
        old = self.get(kind, place)
        entry = {
            "values": dict(values),
            "day": today(),
            "runs": 1 + (old.runs if old else 0),
        }
        if Measurement.from_json(kind, entry) is None:
            return None
        if old is not None and average:
            entry["values"] = old.updated(kind, values)
        key = self._key(kind, place)
        others = [item for item in self._section(kind).items() if item[0] != key]
        self._sections[kind] = dict([*others[1 - MAX_ENTRIES :], (key, entry)])
        return self.get(kind, place)

    def save(self) -> None:
        """Write the file."""
        write_entries(self._file, self._sections)

    def _section(self, kind: MeasurementKind) -> dict[str, Any]:
        section = self._sections.get(kind)
        return section if isinstance(section, dict) else {}

    def _key(self, kind: MeasurementKind, place: str) -> str:
        host = "" if kind == "memory" else f" | {self._host}"
        return f"{place}{host} | torch {_torch_of(rank_python.selected())}"


def store_path() -> Path:
    """Return the file of this user: measurements.json in the cache folder."""
    return paths.cache_dir() / "measurements.json"


@once
def _torch_of(python: RankPython) -> str:
    return python.version_of("torch") or "none"


def is_memory_filesystem(filesystem: str) -> bool:
    """Return whether a file system, such as "ext4 on /dev/nvme0n1p1", is in memory."""
    return filesystem.partition(" ")[0] in {"tmpfs", "ramfs"}


# -- files and dates -------------------------------------------------------------------------


def read_entries(file: Path) -> dict[str, Any]:
    """Return the entries of a file, or {} if it cannot be read."""
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}  # missing or truncated: it is only a cache
    return entries if isinstance(entries, dict) else {}


def write_entries(file: Path, entries: dict[str, Any]) -> None:
    """Write a file atomically. Errors are ignored: only a cache is lost."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(entries, new, indent=1)
        Path(new.name).replace(file)


def today() -> str:
    """Return the current date as ISO text, such as "2026-11-21"."""
    return dt.datetime.now().astimezone().date().isoformat()


# -- device memory ---------------------------------------------------------------------------

DEFAULT_ALLOCATOR_FACTOR = 1.04
"""Default overhead of the caching allocator in a steady training loop."""
CUDA_CONTEXT_BYTES = 770 << 20
"""Default size of a CUDA context with torch's kernels loaded, and of cuBLAS's workspaces: 706 and
64 MiB on an H200 with torch 2.11."""
COMMUNICATOR_BYTES = 450 << 20
"""Default size of NCCL's buffers and channels for a process group of two or more ranks."""
CPU_CONTEXT_BYTES = 600 << 20
"""Default resident memory of a rank's process with torch, before any model."""


@dataclass(frozen=True, slots=True)
class DeviceOverhead:
    """Conversion from tensor bytes to device bytes.

    The allocator rounds up and caches blocks, CUDA and the communicator need memory:
    `device = factor * allocated + context`.
    """

    factor: float = DEFAULT_ALLOCATOR_FACTOR
    context_bytes: int = CUDA_CONTEXT_BYTES
    runs: int = 0
    """Number of measured sessions; 0 for the defaults."""
    day: str = ""
    """Date of the last session; empty for the defaults."""

    def device_bytes(self, allocated_bytes: int, idle_pool_bytes: int = 0) -> int:
        """Return the device bytes for tensors of `allocated_bytes`.

        Args:
            allocated_bytes: tensors at the peak.
            idle_pool_bytes: blocks that the allocator holds for other moments; a measured factor
                contains them.
        """
        held = allocated_bytes + (0 if self.runs else idle_pool_bytes)
        return int(held * self.factor) + self.context_bytes


def default_overhead(kind: str, world_size: int) -> DeviceOverhead:
    """Return the overhead that is assumed without measurements."""
    if kind == "cpu":
        return DeviceOverhead(context_bytes=CPU_CONTEXT_BYTES)
    communicator = COMMUNICATOR_BYTES if world_size > 1 else 0
    return DeviceOverhead(context_bytes=CUDA_CONTEXT_BYTES + communicator)


def device_overhead(
    store: MeasurementStore,
    device: str,
    backend: str,
    offload: str,
    *,
    kind: str,
    world_size: int,
) -> DeviceOverhead:
    """Return the overhead of a device and strategy, or the default if it was not measured."""
    measured = store.get("memory", f"{device}, {backend}, {offload}")
    if measured is None:
        return default_overhead(kind, world_size)
    factor, context = measured.values["factor"], int(measured.values["context_bytes"])
    return DeviceOverhead(factor, context, measured.runs, measured.day)


def record_device_memory(
    device: str,
    backend: str,
    offload: str,
    *,
    allocated_bytes: int,
    reserved_bytes: int,
    device_bytes: int,
) -> None:
    """Store the device memory of one measured session, averaged with earlier ones.

    Args:
        device: name of the device as reported by the driver.
        backend: canonical name.
        offload: none, cpu or nvme.
        allocated_bytes: peak of tensors.
        reserved_bytes: peak reserved by the allocator.
        device_bytes: peak of the device used by this process; the rest is context.
    """
    store = MeasurementStore()
    factor = reserved_bytes / allocated_bytes
    values = {"factor": factor, "context_bytes": max(0, device_bytes - reserved_bytes)}
    store.record("memory", f"{device}, {backend}, {offload}", values)
    store.save()
