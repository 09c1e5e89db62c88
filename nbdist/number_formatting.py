"""Formatting of sizes, durations, shares, speeds and other numbers, for every text and page."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

GIB = 1 << 30
_SMALL = 10
"""Smaller numbers get a digit more than larger ones."""
_PRECISE_UNITS = ("GiB", "TiB")
"""Always with a decimal: the memory of a device is a few of them."""
_MAX_SOURCE_CHARS = 60
_MIN_FRACTION = 0.005
"""A smaller share would be rounded to "0 %"."""


def format_bytes(num_bytes: float | None) -> str:
    """Format bytes: "36.4 TiB", "31.2 GiB", "312 MiB", "3.5 MiB", "512 bytes"; "-" for None."""
    if num_bytes is None:
        return "-"
    if num_bytes <= 0:
        return "0 MiB"
    amount, unit = num_bytes, "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:  # noqa: PLR2004 - the step between the units
            break
        amount, unit = amount / 1024, larger
    is_precise = unit in _PRECISE_UNITS or (amount < _SMALL and unit != "bytes")
    return f"{amount:.1f} {unit}" if is_precise else f"{amount:.0f} {unit}"


def format_gib(size: float, *, unit: bool = False) -> str:
    """Format bytes in GiB, as torch and nvidia-smi count: "31.2", or with the unit "31.2 GiB"."""
    value = size / GIB
    text = f"{value:.2f}" if 0 < value < 1 / _SMALL else f"{value:.1f}"
    return f"{text} GiB" if unit else text


def memory_part_text(part: str, size: float) -> str:
    """Format one part of the memory: "optimizer 12.1"."""
    return f"{part} {format_gib(size)}"


def format_count(number: float) -> str:
    """Format a count with three digits: "8.03B", "124M", "512"."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:.3g}"


def format_tokens_per_s(tokens_per_s: float | None) -> str:
    """Format tokens per second: "840", "12.3k", "1.2M"; "-" for None."""
    if tokens_per_s is None:
        return "-"
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if tokens_per_s >= limit:
            return f"{tokens_per_s / limit:.1f}{letter}"
    return f"{tokens_per_s:.0f}"


def format_seconds(time_s: float) -> str:
    """Format a predicted duration: "12 ms", "3.4 s"."""
    return f"{time_s * 1000:.0f} ms" if time_s < 1 else f"{time_s:.2g} s"


def format_duration(seconds: float) -> str:
    """Format a measured duration: "0.4 ms", "12 ms", "3.42 s"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milli = 1000 * seconds
    return f"{milli:.0f} ms" if milli >= _SMALL else f"{milli:.1f} ms"


def format_clock(seconds: float) -> str:
    """Format an elapsed time: "00:42", "1:02:03"."""
    minutes, left = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes:02}:{left:02}"


def format_age(seconds: float) -> str:
    """Format how long ago something happened: "42 s", "12 min", "3 h", "2 d"."""
    for unit_s, word in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {word}"
    return f"{max(0, seconds):.0f} s"


def format_percent(fraction: float) -> str:
    """Format a share: "41 %", or "under 1 %" instead of "0 %"."""
    return f"{100 * fraction:.0f} %" if fraction >= _MIN_FRACTION or fraction <= 0 else "under 1 %"


def format_speedup(gain: float) -> str:
    """Format a relative gain in speed: "35 % faster", "2.4 times as fast", "8 % slower"."""
    if gain < 0:
        return f"{format_percent(-gain)} slower"
    return f"{1 + gain:.1f} times as fast" if gain >= 1 else f"{format_percent(gain)} faster"


def precision_label(name: str) -> str:
    """Return the label of a precision: "fp32" for "no"."""
    return "fp32" if name == "no" else name


def truncate(text: str, max_chars: int) -> str:
    """Truncate a text to `max_chars` characters, the last of them an ellipsis."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}\N{HORIZONTAL ELLIPSIS}"


def format_source_line(source: str) -> str:
    """Return a line of code without indentation, truncated."""
    text = " ".join(source.split())
    return text if len(text) <= _MAX_SOURCE_CHARS else f"{text[: _MAX_SOURCE_CHARS - 3]}..."


# ---------------------------------------------------------------------------- curves

_TOKENS = re.compile(r"tokens(/|_per_)s")
NON_FINITE_SYMBOLS = {
    "NaN": "\N{MULTIPLICATION SIGN}",
    "inf": "\N{BLACK UP-POINTING TRIANGLE}",
    "-inf": "\N{BLACK DOWN-POINTING TRIANGLE}",
}
"""Kind of a non-finite value -> its symbol in a curve."""


def sort_curve_names(names: Iterable[str]) -> list[str]:
    """Sort curve names: loss, tokens/s, other losses, the rest in the order of their arrival."""

    def priority(name: str) -> int:
        if name == "loss":
            return 0
        if _TOKENS.match(name):
            return 1
        return 2 if name.endswith("loss") else 3

    return sorted(names, key=priority)


def non_finite_kind(value: float) -> str:
    """Return the kind of a non-finite value, a key of ``NON_FINITE_SYMBOLS``; "" for a number."""
    if math.isfinite(value):
        return ""
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"


def non_finite_legend(values: Iterable[float]) -> str:
    """Return the legend of the non-finite symbols of a curve; "" if all values are finite."""
    kinds = {non_finite_kind(value) for value in values}
    return "  ".join(f"{sign} {name}" for name, sign in NON_FINITE_SYMBOLS.items() if name in kinds)


def relative_position(low: float, value: float, high: float) -> float:
    """Return the relative position of a value between two others, from 0 to 1."""
    # Halved: the difference of two huge values is infinite.
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.0
