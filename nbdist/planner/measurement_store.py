"""Stores the speeds measured on this machine in the user's cache folder; pure.

Entries are keyed by device names, link, number of ranks, host processor and torch version, not by
host name, so that a folder shared by several hosts holds the entries of each.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, replace
from functools import cache as once
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nbdist.planner import cache
from nbdist.planner.measurements import DTYPES, CommSpeed, ComputeSpeed, DiskSpeed, LoopEfficiency

if TYPE_CHECKING:
    from pathlib import Path

MAX_ENTRIES = 64
"""Maximum number of entries per section of the file; the oldest are dropped."""


class MeasurementStore:
    """All measurements of a machine, read once per plan.

    Args:
        host: distinguishes hosts with the same GPUs: processor and cores.
        file: default: the user's file.
    """

    def __init__(self, host: str, file: Path | None = None) -> None:
        """Read the file. An unreadable file counts as empty."""
        self._file = file or store_path()
        self._about = f"{host} | torch {_torch()}"
        self._sections = cache.read_entries(self._file)

    def comm_speed(self, place: str) -> CommSpeed | None:
        """Return the measured collectives between these ranks.

        Args:
            place: devices, link and number of ranks, from `ClusterSpec.describe`.
        """
        return CommSpeed.from_json(self._entry("links", place))

    def compute_speed(self, place: str) -> ComputeSpeed | None:
        """Return the measured compute speed of one rank, alone and in training loops."""
        pace = ComputeSpeed.from_json(self._entry("pace", place))
        parsed = {
            kind: LoopEfficiency.from_json(self._entry("loops", f"{place}, {kind}"))
            for kind in DTYPES
        }
        loops = {kind: loop for kind, loop in parsed.items() if loop is not None}
        if pace is None and not loops:
            return None
        return replace(pace or ComputeSpeed(), loop_efficiency=MappingProxyType(loops))

    def disk_speed(self) -> DiskSpeed | None:
        """Return the disk measured last."""
        disks = [DiskSpeed.from_json(entry) for entry in self._section("disks").values()]
        real = [disk for disk in disks if disk is not None and not disk.is_in_memory]
        return max(real, key=lambda disk: disk.day, default=None)

    def store_comm_speed(self, place: str, links: CommSpeed) -> None:
        """Store the measured collectives between ranks, replacing older ones."""
        plain = {name: [list(point) for point in curve] for name, curve in links.curves.items()}
        self._keep("links", place, {"curves": plain, "day": links.day, "runs": links.runs})

    def store_compute_speed(self, place: str, speed: ComputeSpeed) -> None:
        """Store a rank's compute speed; the speeds of training loops are kept."""
        plain = {
            "products": dict(speed.matmul_flops),
            "memory": speed.memory_bandwidth,
            "host_link": speed.host_link,
            "day": speed.day,
            "runs": speed.runs,
        }
        self._keep("pace", place, plain)

    def store_loop_efficiency(self, place: str, kind: str, loop: LoopEfficiency) -> None:
        """Store the speed reached in a training loop."""
        self._keep("loops", f"{place}, {kind}", asdict(loop))

    def store_disk_speed(self, disk: DiskSpeed) -> None:
        """Store the speed of a disk."""
        self._keep("disks", disk.filesystem, asdict(disk))

    def save(self) -> None:
        """Write the file."""
        cache.write_entries(self._file, self._sections)

    def _section(self, name: str) -> dict[str, Any]:
        section = self._sections.get(name)
        return section if isinstance(section, dict) else {}

    def _entry(self, section: str, place: str) -> Any:
        return self._section(section).get(f"{place} | {self._about}")

    def _keep(self, section: str, place: str, entry: dict[str, Any]) -> None:
        """Append the entry and drop the oldest beyond the maximum."""
        key = f"{place} | {self._about}"
        others = [(name, old) for name, old in self._section(section).items() if name != key]
        self._sections[section] = dict([*others[1 - MAX_ENTRIES :], (key, entry)])


def store_path() -> Path:
    """Return the file: nbdist/speeds.json in XDG_CACHE_HOME, or ~/.cache."""
    return cache.cache_dir() / "speeds.json"


@once
def _torch() -> str:
    """Return torch's version without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"
