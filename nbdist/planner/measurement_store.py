"""What was measured on this machine, kept in the user's cache folder; pure.

By the names of devices, their link, the number of ranks, the processor of the host and torch's
version, never by host name: a folder that several hosts share serves each with its own.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, replace
from functools import cache as once
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nbdist.planner import cache
from nbdist.planner.measurements import KINDS, Disk, Links, Loop, Pace

if TYPE_CHECKING:
    from pathlib import Path

ENTRIES = 64
"""Of each sort in the file; the oldest go."""


class Known:
    """Everything that was measured on a machine, read once for a plan.

    Args:
        host: what tells hosts apart that have the same GPUs: processor and cores.
        file: default: the user's own.
    """

    def __init__(self, host: str, file: Path | None = None) -> None:
        """Read the file; one that cannot be read counts as empty."""
        self._file = file or path()
        self._about = f"{host} | torch {_torch()}"
        self._sections = cache.read(self._file)

    def links(self, place: str) -> Links | None:
        """What was measured between these ranks.

        Args:
            place: devices, link and number of ranks, as a cluster describes itself.
        """
        return Links.parsed(self._entry("links", place))

    def pace(self, place: str) -> Pace | None:
        """What one rank of a place computes, on its own and in training loops."""
        pace = Pace.parsed(self._entry("pace", place))
        found = {kind: Loop.parsed(self._entry("loops", f"{place}, {kind}")) for kind in KINDS}
        loops = {kind: one for kind, one in found.items() if one is not None}
        if pace is None and not loops:
            return None
        return replace(pace or Pace(), loops=MappingProxyType(loops))

    def disk(self) -> Disk | None:
        """The disk that was measured last."""
        disks = [Disk.parsed(one) for one in self._section("disks").values()]
        real = [one for one in disks if one is not None and not one.in_memory]
        return max(real, key=lambda one: one.day, default=None)

    def keep_links(self, place: str, links: Links) -> None:
        """Keep what was measured between ranks in place of what was there."""
        plain = {name: [list(one) for one in curve] for name, curve in links.curves.items()}
        self._keep("links", place, {"curves": plain, "day": links.day, "runs": links.runs})

    def keep_pace(self, place: str, pace: Pace) -> None:
        """Keep what a rank computes, beside what loops have reached."""
        plain = {
            "products": dict(pace.products),
            "memory": pace.memory,
            "host_link": pace.host_link,
            "day": pace.day,
            "runs": pace.runs,
        }
        self._keep("pace", place, plain)

    def keep_loop(self, place: str, kind: str, loop: Loop) -> None:
        """Keep what a training loop reached."""
        self._keep("loops", f"{place}, {kind}", asdict(loop))

    def keep_disk(self, disk: Disk) -> None:
        """Keep what a disk reached."""
        self._keep("disks", disk.filesystem, asdict(disk))

    def save(self) -> None:
        """Write the file."""
        cache.write(self._file, self._sections)

    def _section(self, name: str) -> dict[str, Any]:
        section = self._sections.get(name)
        return section if isinstance(section, dict) else {}

    def _entry(self, section: str, place: str) -> Any:
        return self._section(section).get(f"{place} | {self._about}")

    def _keep(self, section: str, place: str, entry: dict[str, Any]) -> None:
        """Put the entry last, and drop the oldest beyond so many."""
        key = f"{place} | {self._about}"
        others = [(name, one) for name, one in self._section(section).items() if name != key]
        self._sections[section] = dict([*others[1 - ENTRIES :], (key, entry)])


def path() -> Path:
    """The file: nbdist/speeds.json in XDG_CACHE_HOME, or ~/.cache."""
    return cache.folder() / "speeds.json"


@once
def _torch() -> str:
    """Its version, without the import of it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"
