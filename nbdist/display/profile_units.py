"""Figures as a profile says them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.profiler.measurements import Line

_TWICE = 2
_LONG = 60
_SMALLEST = 0.005


def percent(share: float) -> str:
    """A share: "41 %"; "under 1 %" for what would read as nothing."""
    return f"{100 * share:.0f} %" if share >= _SMALLEST or share <= 0 else "under 1 %"


def faster(gain: float) -> str:
    """A gain in speed: "35 % faster", "2.4 times as fast", "8 % slower"."""
    if gain < 0:
        return f"{percent(-gain)} slower"
    if gain >= _TWICE - 1:
        return f"{1 + gain:.1f} times as fast"
    return f"{percent(gain)} faster"


def time(seconds: float) -> str:
    """A time: "0.4 ms", "12 ms", "3.42 s"."""
    milli = 1000 * seconds
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{milli:.0f} ms" if milli >= 10 else f"{milli:.1f} ms"  # noqa: PLR2004


def source(line: Line) -> str:
    """A line's text, cut where it is long."""
    text = " ".join(line.source.split())
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
