"""Process of a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankProcessInfo:
    """Process of one rank."""

    pid: int
    created: float
    device: str
