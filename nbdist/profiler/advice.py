"""A recommendation: the change, its predicted speedup, and how to recognize it later."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.display.units import format_bytes, format_percent, format_speedup

if TYPE_CHECKING:
    from nbdist.profiler.speedup import Speedup

MIN_GAIN = 0.05
"""Minimum predicted speedup of a recommendation. Repeated runs differ by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A recommended change."""

    title: str
    """Short name, such as "num_workers=4" or "switch to zero2"."""
    why: str
    """Explanation in one or two sentences."""
    line: str
    """Code to paste, or a comment if the change depends on the user's code."""
    gain: Speedup
    change: dict[str, Any] = field(default_factory=dict)
    """Expected difference in the next profile: {"options": {...}}, {"micro_batch": 8},
    {"num_workers": 4}, {"pin_memory": True} or {"largest_unit": 1000}. Empty if the next profile
    cannot show whether the change was made."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Session.switch` that apply it; empty if the cell itself must change."""
    saves_bytes: int = 0
    """Reduction of the peak memory."""

    @property
    def text(self) -> str:
        """Title, predicted speedup with its range, and explanation."""
        return f"{self.title}: {self.gain_text}. {self.why}"

    @property
    def gain_text(self) -> str:
        """Predicted speedup, as "about 35 % faster (28 to 43 %)", or the memory it saves."""
        gain = self.gain
        if gain.faster < MIN_GAIN:
            costs = (
                f", and is about {format_speedup(gain.faster)}" if gain.faster <= -MIN_GAIN else ""
            )
            return f"reduces the peak memory by {format_bytes(self.saves_bytes)}{costs}"
        if gain.faster >= 1:
            return (
                f"about {format_speedup(gain.faster)} ({1 + gain.low:.1f} to {1 + gain.high:.1f})"
            )
        low, high = max(0.0, gain.low), format_percent(gain.high)
        return f"about {format_speedup(gain.faster)} ({100 * low:.0f} to {high})"

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `text`."""
        return {**asdict(self), "text": self.text}
