"""Formatting of the numbers of a plan."""

from __future__ import annotations

GIB = 1 << 30
_SMALL = 10
"""Numbers below 1 / _SMALL get two decimals, all others one."""


def format_gib(size: float, *, unit: bool = False) -> str:
    """Format bytes in GiB, as torch and nvidia-smi count: "31.2", or with the unit "31.2 GiB"."""
    value = size / GIB
    text = f"{value:.2f}" if 0 < value < 1 / _SMALL else f"{value:.1f}"
    return f"{text} GiB" if unit else text


def format_bytes(bytes_: float) -> str:
    """Format bytes in a fitting unit: "36.4 TiB", "31.2 GiB", "12.0 MiB", "0.5 KiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if bytes_ >= 1 << power:
            return f"{bytes_ / (1 << power):.1f} {unit}"
    return f"{bytes_ / (1 << 10):.1f} KiB" if bytes_ > 0 else "0.0 MiB"


def format_count(number: float) -> str:
    """Format a count with three digits: "8.03B", "124M", "512"."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:.3g}"


def memory_part_text(part: str, size: float) -> str:
    """Format one part of the memory: "optimizer 12.1"."""
    return f"{part} {format_gib(size)}"


def format_seconds(time_s: float) -> str:
    """Format a duration: "12 ms", "3.4 s"."""
    return f"{time_s * 1000:.0f} ms" if time_s < 1 else f"{time_s:.2g} s"
