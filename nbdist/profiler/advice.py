"""One piece of advice: a change, what it gains, and how it is recognised later; pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.display.profile_units import faster, percent
from nbdist.display.units import size

if TYPE_CHECKING:
    from nbdist.profiler.speedup import Gain

CHEAP = 0.05
"""Predicted gain below which nothing is advised: repeated runs differ by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change."""

    title: str
    """In a few words: "num_workers=4", "switch to zero2"."""
    why: str
    """One sentence."""
    line: str
    """To paste; a comment where only the user knows what to write."""
    gain: Gain
    change: dict[str, Any] = field(default_factory=dict)
    """What will be different in the next profile: {"options": {...}}, {"micro_batch": 8},
    {"num_workers": 4}, {"pin_memory": True} or {"largest_unit": 1000}; empty where the next
    profile cannot tell whether it was taken."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Session.switch` that do it; empty where the cell itself must change."""
    saves_bytes: int = 0
    """Of the peak of memory."""

    @property
    def text(self) -> str:
        """The change, its gain with its uncertainty, and why."""
        return f"{self.title}: {self.gain_words}. {self.why}"

    @property
    def gain_words(self) -> str:
        """As "about 35 % faster (28 to 43 %)"; what gains memory alone says what it costs."""
        gain = self.gain
        if gain.faster < CHEAP:
            costs = f", and is about {faster(gain.faster)}" if gain.faster <= -CHEAP else ""
            return f"frees {size(self.saves_bytes)} of the peak{costs}"
        if gain.faster >= 1:
            return f"about {faster(gain.faster)} ({1 + gain.low:.1f} to {1 + gain.high:.1f})"
        low, high = max(0.0, gain.low), percent(gain.high)
        return f"about {faster(gain.faster)} ({100 * low:.0f} to {high})"

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the words made of them."""
        return {**asdict(self), "text": self.text}
