"""From tensor bytes to device bytes: what was learned from real runs on this machine.

A device holds more than its tensors: the allocator rounds and keeps blocks, CUDA and the
communicator have memory of their own. `device = factor * allocated + context`. Both begin as
defaults and are corrected after each measured session, by device, backend and offload. They
are kept in the user's cache folder, a JSON file that may be deleted at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.planner import cache

if TYPE_CHECKING:
    from pathlib import Path

FACTOR = 1.04
"""Default: caching allocator's unused remainder in a steady training loop."""
CUDA_CONTEXT_BYTES = 600 << 20
"""Default: a CUDA context with torch's kernels loaded (0.4-0.6 GiB by generation)."""
COMMUNICATOR_BYTES = 450 << 20
"""Default: NCCL's buffers and channels for one process group of two or more ranks."""
CPU_CONTEXT_BYTES = 600 << 20
"""Default: resident memory of a rank's process with torch, before any model."""
WEIGHT_OF_NEW = 0.5
"""A new run counts as much as all earlier ones together: drivers and libraries change."""
FACTOR_LIMITS = (1.0, 1.5)
"""A factor beyond these says that something else was measured, another process perhaps."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How device bytes follow from tensor bytes."""

    factor: float = FACTOR
    context_bytes: int = CUDA_CONTEXT_BYTES
    runs: int = 0
    """Measured sessions behind it; 0 for the defaults."""
    day: str = ""
    """Of the last one, as 2026-11-21; empty where it was not noted."""

    def device_bytes(self, allocated_bytes: int) -> int:
        """Bytes of the device for tensors of `allocated_bytes`."""
        return int(allocated_bytes * self.factor) + self.context_bytes


def path() -> Path:
    """The file: nbdist/calibration.json in XDG_CACHE_HOME, or ~/.cache."""
    return cache.folder() / "calibration.json"


def default(kind: str, world_size: int) -> Calibration:
    """What is assumed before anything was measured."""
    if kind == "cpu":
        return Calibration(context_bytes=CPU_CONTEXT_BYTES)
    communicator = COMMUNICATOR_BYTES if world_size > 1 else 0
    return Calibration(context_bytes=CUDA_CONTEXT_BYTES + communicator)


class Learned:
    """The file's contents, read once for a plan."""

    def __init__(self, file: Path | None = None) -> None:
        """Read the file; one that cannot be read counts as empty."""
        self._file = file or path()
        self._entries = cache.read(self._file)

    def known(
        self, device: str, backend: str, offload: str, *, kind: str, world_size: int
    ) -> Calibration:
        """The calibration for a device and strategy; the default where none was measured."""
        entry = self._entries.get(_key(device, backend, offload))
        return _parsed(entry) or default(kind, world_size)

    def learn(
        self,
        device: str,
        backend: str,
        offload: str,
        *,
        allocated_bytes: int,
        reserved_bytes: int,
        device_bytes: int,
    ) -> Calibration:
        """Take in one measured session and write the file.

        Args:
            device: name of the device, as the driver gives it.
            backend: canonical name.
            offload: none, cpu or nvme.
            allocated_bytes: peak of tensors.
            reserved_bytes: peak of what the allocator held for them.
            device_bytes: peak of the device by this process; the rest is context.
        """
        key = _key(device, backend, offload)
        low, high = FACTOR_LIMITS
        factor = min(high, max(low, reserved_bytes / max(1, allocated_bytes)))
        context = max(0, device_bytes - reserved_bytes)
        old = _parsed(self._entries.get(key))
        if old is not None:
            factor += (1 - WEIGHT_OF_NEW) * (old.factor - factor)
            context += int((1 - WEIGHT_OF_NEW) * (old.context_bytes - context))
        made = Calibration(factor, context, 1 + (old.runs if old else 0), cache.today())
        self._entries[key] = {
            "factor": round(made.factor, 4),
            "context_bytes": made.context_bytes,
            "runs": made.runs,
            "day": made.day,
        }
        cache.write(self._file, self._entries)
        return made


def _key(device: str, backend: str, offload: str) -> str:
    return f"{device} | {backend} | {offload}"


def _parsed(entry: Any) -> Calibration | None:
    """Read one entry; None for what this module did not write."""
    try:
        made = Calibration(
            float(entry["factor"]),
            int(entry["context_bytes"]),
            int(entry["runs"]),
            cache.day(entry.get("day")),
        )
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError):
        return None
    low, high = FACTOR_LIMITS
    return made if low <= made.factor <= high and made.context_bytes >= 0 else None
