"""Formatting of the numbers of a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.profiler.measurements import LineProfile

_TWICE = 2
_LONG = 60
_SMALLEST = 0.005


def format_percent(fraction: float) -> str:
    """Format a share: "41 %", or "under 1 %" instead of "0 %"."""
    return f"{100 * fraction:.0f} %" if fraction >= _SMALLEST or fraction <= 0 else "under 1 %"


def format_speedup(gain: float) -> str:
    """Format a relative gain in speed: "35 % faster", "2.4 times as fast", "8 % slower"."""
    if gain < 0:
        return f"{format_percent(-gain)} slower"
    if gain >= _TWICE - 1:
        return f"{1 + gain:.1f} times as fast"
    return f"{format_percent(gain)} faster"


def format_duration(seconds: float) -> str:
    """Format a duration: "0.4 ms", "12 ms", "3.42 s"."""
    milli = 1000 * seconds
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{milli:.0f} ms" if milli >= 10 else f"{milli:.1f} ms"  # noqa: PLR2004


def format_source_line(line: LineProfile) -> str:
    """Return the text of a source line, truncated."""
    text = " ".join(line.source.split())
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
