"""Figures as the panel says them, in HTML and in text alike."""

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


def cut(text: str, most: int) -> str:
    """A text of so many characters at most; one that is cut ends with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def size(count: float | None) -> str:
    """Bytes: "31.2 GiB", below one GiB "312 MiB"; a dash where they are not known."""
    if count is None:
        return "-"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def clock(seconds: float) -> str:
    """A time: "00:42", "1:02:03"."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, _HOUR)
    minutes, left = divmod(rest, _MINUTE)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes:02}:{left:02}"


def as_of(unix_s: float, version: str) -> str:
    """Of when a page is that does not change, in this machine's time, and who wrote it."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    return f"as of {stamp}; nbdist {version}"


def age(seconds: float) -> str:
    """How long ago: "42 s", "12 min", "3 h", "2 d"."""
    for limit, unit, word in ((_DAY, _DAY, "d"), (_HOUR, _HOUR, "h"), (_MINUTE, _MINUTE, "min")):
        if seconds >= limit:
            return f"{seconds / unit:.0f} {word}"
    return f"{max(0, seconds):.0f} s"


def speed(tokens_per_s: float | None) -> str:
    """Tokens a second: "840", "12.3k", "1.2M"."""
    if tokens_per_s is None:
        return "-"
    for limit, letter in ((_MILLION, "M"), (_THOUSAND, "k")):
        if tokens_per_s >= limit:
            return f"{tokens_per_s / limit:.1f}{letter}"
    return f"{tokens_per_s:.0f}"


def share(part: float | None) -> str:
    """A share as percent; a dash where it is not known."""
    return "-" if part is None else f"{part:.0%}"


def doing(device: DeviceView) -> str:
    """Utilisation, power, temperature, traffic, as far as they are known."""
    said = []
    if device["utilization"] is not None:
        said.append(f"{share(device['utilization'])} busy")
    if device["power_w"] is not None:
        of = f" of {device['power_limit_w']:.0f}" if device["power_limit_w"] is not None else ""
        said.append(f"{device['power_w']:.0f}{of} W")
    if device["temperature_c"] is not None:
        said.append(f"{device['temperature_c']:.0f} \N{DEGREE SIGN}C")
    for name, sent, heard in (
        ("PCIe", device["pcie_tx"], device["pcie_rx"]),
        ("NVLink", device["nvlink_tx"], device["nvlink_rx"]),
    ):
        if sent is not None and heard is not None:
            said.append(f"{name} {size(sent)}/s out, {size(heard)}/s in")
    return ", ".join(said)


def host_memory(node: NodeView) -> str:
    """What is used of a node's own memory."""
    return f"host memory {size(node['host_used_bytes'])} of {size(node['host_bytes'])}"


def notes(device: DeviceView) -> list[str]:
    """What a reader of its bar must know, and who else is there."""
    told = [device["note"]] if device["note"] else []
    if device["holders"]:
        told.append(f"{size(device['others_bytes'])} are held by {', '.join(device['holders'])}")
    return told


def why(reason: str, *, fits: bool) -> str:
    """A plan's reason; one that does not fit says so."""
    said = fits or reason.startswith("does not fit")
    return reason if said else f"does not fit; {reason}"


_TOKENS = re.compile(r"tokens(/|_per_)s")


def precision(name: str) -> str:
    """A precision as the panel calls it: "no" is fp32."""
    return "fp32" if name == "no" else name


def in_order(names: Iterable[str]) -> list[str]:
    """Names of curves: loss and tokens/s first, then other losses, the rest as they came."""

    def place(name: str) -> int:
        if name == "loss":
            return 0
        if _TOKENS.match(name):
            return 1
        return 2 if name.endswith("loss") else 3

    return sorted(names, key=place)


ODD = {
    "NaN": "\N{MULTIPLICATION SIGN}",
    "inf": "\N{BLACK UP-POINTING TRIANGLE}",
    "-inf": "\N{BLACK DOWN-POINTING TRIANGLE}",
}
"""A value that is no number -> its sign in a curve."""


def odd(value: float) -> str:
    """What a value is that is no number: a key of ODD; empty for a number."""
    if math.isfinite(value):
        return ""
    return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"


def key_of_odd(values: Iterable[float]) -> str:
    """What the signs of a curve stand for; empty where all values are numbers."""
    there = {odd(value) for value in values}
    return "  ".join(f"{sign} {name}" for name, sign in ODD.items() if name in there)


def between(low: float, value: float, high: float) -> float:
    """Where a value lies, from 0 to 1; halves, since a difference of huge ones is infinite."""
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.0
