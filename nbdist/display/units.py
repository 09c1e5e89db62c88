"""Numbers as a plan says them."""

from __future__ import annotations

GIB = 1 << 30
_SMALL = 10
"""Below it a figure gets one digit after the point, and below 0.1 two."""


def gib(size: float, *, unit: bool = False) -> str:
    """Bytes in GiB, as torch and nvidia-smi count: "31.2", or with its unit "31.2 GiB"."""
    value = size / GIB
    text = f"{value:.2f}" if 0 < value < 1 / _SMALL else f"{value:.1f}"
    return f"{text} GiB" if unit else text


def size(bytes_: float) -> str:
    """Bytes in the unit that fits: "36.4 TiB", "31.2 GiB", "12.0 MiB", "0.5 KiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if bytes_ >= 1 << power:
            return f"{bytes_ / (1 << power):.1f} {unit}"
    return f"{bytes_ / (1 << 10):.1f} KiB" if bytes_ > 0 else "0.0 MiB"


def count(number: float) -> str:
    """A count in a few digits: "8.03B", "124M", "512"."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:.3g}"


def part_words(part: str, size: float) -> str:
    """One part of the memory: "optimizer 12.1"."""
    return f"{part} {gib(size)}"


def seconds(time_s: float) -> str:
    """A time in a unit that fits: "12 ms", "3.4 s"."""
    return f"{time_s * 1000:.0f} ms" if time_s < 1 else f"{time_s:.2g} s"
