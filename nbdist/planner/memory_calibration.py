"""Device memory beyond tensors, calibrated by measured sessions on this machine.

A device holds more than tensors: the allocator rounds up and caches blocks, CUDA and the
communicator need memory. `device = factor * allocated + context`. Both start as defaults and are
updated after each measured session, by device, backend and offload. They are stored as JSON in the
user's cache folder, which may be deleted at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.planner import cache

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_ALLOCATOR_FACTOR = 1.04
"""Default overhead of the caching allocator in a steady training loop."""
CUDA_CONTEXT_BYTES = 600 << 20
"""Default size of a CUDA context with torch's kernels loaded (0.4-0.6 GiB by generation)."""
COMMUNICATOR_BYTES = 450 << 20
"""Default size of NCCL's buffers and channels for a process group of two or more ranks."""
CPU_CONTEXT_BYTES = 600 << 20
"""Default resident memory of a rank's process with torch, before any model."""
UPDATE_WEIGHT = 0.5
"""Weight of a new run against all earlier ones: high, as drivers and libraries change."""
FACTOR_LIMITS = (1.0, 1.5)
"""A factor outside this range is a measurement error, such as another process on the device."""


@dataclass(frozen=True, slots=True)
class DeviceOverhead:
    """Conversion from tensor bytes to device bytes."""

    factor: float = DEFAULT_ALLOCATOR_FACTOR
    context_bytes: int = CUDA_CONTEXT_BYTES
    runs: int = 0
    """Number of measured sessions; 0 for the defaults."""
    day: str = ""
    """Date of the last session, such as "2026-11-21"; empty if unknown."""

    def device_bytes(self, allocated_bytes: int) -> int:
        """Return the device bytes for tensors of `allocated_bytes`."""
        return int(allocated_bytes * self.factor) + self.context_bytes


def calibration_path() -> Path:
    """Return the file: nbdist/calibration.json in XDG_CACHE_HOME, or ~/.cache."""
    return cache.cache_dir() / "calibration.json"


def default_overhead(kind: str, world_size: int) -> DeviceOverhead:
    """Return the overhead that is assumed without measurements."""
    if kind == "cpu":
        return DeviceOverhead(context_bytes=CPU_CONTEXT_BYTES)
    communicator = COMMUNICATOR_BYTES if world_size > 1 else 0
    return DeviceOverhead(context_bytes=CUDA_CONTEXT_BYTES + communicator)


class MemoryCalibration:
    """Contents of the calibration file, read once per plan."""

    def __init__(self, file: Path | None = None) -> None:
        """Read the file. An unreadable file counts as empty."""
        self._file = file or calibration_path()
        self._entries = cache.read_entries(self._file)

    def overhead_for(
        self, device: str, backend: str, offload: str, *, kind: str, world_size: int
    ) -> DeviceOverhead:
        """Return the overhead of a device and strategy, or the default if it was not measured."""
        entry = self._entries.get(_key(device, backend, offload))
        return _parsed(entry) or default_overhead(kind, world_size)

    def record_session(
        self,
        device: str,
        backend: str,
        offload: str,
        *,
        allocated_bytes: int,
        reserved_bytes: int,
        device_bytes: int,
    ) -> DeviceOverhead:
        """Add one measured session and write the file.

        Args:
            device: name of the device as reported by the driver.
            backend: canonical name.
            offload: none, cpu or nvme.
            allocated_bytes: peak of tensors.
            reserved_bytes: peak reserved by the allocator.
            device_bytes: peak of the device used by this process; the rest is context.
        """
        key = _key(device, backend, offload)
        low, high = FACTOR_LIMITS
        factor = min(high, max(low, reserved_bytes / max(1, allocated_bytes)))
        context = max(0, device_bytes - reserved_bytes)
        old = _parsed(self._entries.get(key))
        if old is not None:
            factor += (1 - UPDATE_WEIGHT) * (old.factor - factor)
            context += int((1 - UPDATE_WEIGHT) * (old.context_bytes - context))
        overhead = DeviceOverhead(factor, context, 1 + (old.runs if old else 0), cache.today())
        self._entries[key] = {
            "factor": round(overhead.factor, 4),
            "context_bytes": overhead.context_bytes,
            "runs": overhead.runs,
            "day": overhead.day,
        }
        cache.write_entries(self._file, self._entries)
        return overhead


def _key(device: str, backend: str, offload: str) -> str:
    return f"{device} | {backend} | {offload}"


def _parsed(entry: Any) -> DeviceOverhead | None:
    """Parse one entry; None if it is invalid."""
    try:
        overhead = DeviceOverhead(
            float(entry["factor"]),
            int(entry["context_bytes"]),
            int(entry["runs"]),
            cache.parse_date(entry.get("day")),
        )
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError):
        return None
    low, high = FACTOR_LIMITS
    return overhead if low <= overhead.factor <= high and overhead.context_bytes >= 0 else None
