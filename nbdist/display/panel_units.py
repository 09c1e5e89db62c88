"""Formatting of the panel's numbers, shared by its HTML and text views."""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.panel.protocol import DeviceView, NodeView

GIB = 1 << 30
MIB = 1 << 20
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_THOUSAND, _MILLION = 1e3, 1e6


def truncate(text: str, most: int) -> str:
    """Truncate a text to `most` characters, the last of them an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def format_bytes(count: float | None) -> str:
    """Format bytes: "31.2 GiB", below one GiB "312 MiB"; "-" for None."""
    if count is None:
        return "-"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def format_clock(seconds: float) -> str:
    """Format a duration: "00:42", "1:02:03"."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, _HOUR)
    minutes, left = divmod(rest, _MINUTE)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes:02}:{left:02}"


def snapshot_note(unix_s: float, version: str) -> str:
    """Return the time of a static page in local time, and the version that wrote it."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    return f"as of {stamp}; nbdist {version}"


def format_age(seconds: float) -> str:
    """Format how long ago something happened: "42 s", "12 min", "3 h", "2 d"."""
    for limit, unit, word in ((_DAY, _DAY, "d"), (_HOUR, _HOUR, "h"), (_MINUTE, _MINUTE, "min")):
        if seconds >= limit:
            return f"{seconds / unit:.0f} {word}"
    return f"{max(0, seconds):.0f} s"


def format_tokens_per_s(tokens_per_s: float | None) -> str:
    """Format tokens per second: "840", "12.3k", "1.2M"; "-" for None."""
    if tokens_per_s is None:
        return "-"
    for limit, letter in ((_MILLION, "M"), (_THOUSAND, "k")):
        if tokens_per_s >= limit:
            return f"{tokens_per_s / limit:.1f}{letter}"
    return f"{tokens_per_s:.0f}"


def format_percent(part: float | None) -> str:
    """Format a share as percent; "-" for None."""
    return "-" if part is None else f"{part:.0%}"


def device_activity_text(device: DeviceView) -> str:
    """Return utilization, power, temperature and traffic of a device, as far as they are known."""
    parts = []
    if device["utilization"] is not None:
        parts.append(f"{format_percent(device['utilization'])} busy")
    if device["power_w"] is not None:
        limit = f" of {device['power_limit_w']:.0f}" if device["power_limit_w"] is not None else ""
        parts.append(f"{device['power_w']:.0f}{limit} W")
    if device["temperature_c"] is not None:
        parts.append(f"{device['temperature_c']:.0f} \N{DEGREE SIGN}C")
    for name, tx, rx in (
        ("PCIe", device["pcie_tx"], device["pcie_rx"]),
        ("NVLink", device["nvlink_tx"], device["nvlink_rx"]),
    ):
        if tx is not None and rx is not None:
            parts.append(f"{name} {format_bytes(tx)}/s out, {format_bytes(rx)}/s in")
    return ", ".join(parts)


def host_memory_text(node: NodeView) -> str:
    """Return the used and total host memory of a node."""
    return (
        f"host memory {format_bytes(node['host_used_bytes'])} of {format_bytes(node['host_bytes'])}"
    )


def device_notes(device: DeviceView) -> list[str]:
    """Return the notes on a device, and the processes of others that hold its memory."""
    lines = [device["note"]] if device["note"] else []
    if device["holders"]:
        lines.append(
            f"{format_bytes(device['others_bytes'])} are held by {', '.join(device['holders'])}"
        )
    return lines


def plan_reason_text(reason: str, *, fits: bool) -> str:
    """Return the reason of a plan row, marked if the row does not fit."""
    is_complete = fits or reason.startswith("does not fit")
    return reason if is_complete else f"does not fit; {reason}"


_TOKENS = re.compile(r"tokens(/|_per_)s")


def precision_label(name: str) -> str:
    """Return the label of a precision: "fp32" for "no"."""
    return "fp32" if name == "no" else name


def sort_curve_names(names: Iterable[str]) -> list[str]:
    """Sort curve names: loss, tokens/s, other losses, the rest in the order of their arrival."""

    def priority(name: str) -> int:
        if name == "loss":
            return 0
        if _TOKENS.match(name):
            return 1
        return 2 if name.endswith("loss") else 3

    return sorted(names, key=priority)


NON_FINITE_SYMBOLS = {
    "NaN": "\N{MULTIPLICATION SIGN}",
    "inf": "\N{BLACK UP-POINTING TRIANGLE}",
    "-inf": "\N{BLACK DOWN-POINTING TRIANGLE}",
}
"""Kind of a non-finite value -> its symbol in a curve."""


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
