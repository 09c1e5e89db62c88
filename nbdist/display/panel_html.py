"""The picture as HTML without script: where no widget can be, and in a notebook that was saved.

Inline styles alone: front ends remove `<style>`, `<svg>` and `<script>` from notebooks that are
not trusted; they keep tables, `<details>` and images. Colours stand on light and dark alike.
Everything of the user's is escaped.
"""

from __future__ import annotations

import base64
import math
import time
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from nbdist.display import panel_profile_html, panel_units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nbdist.panel.curves import Points
    from nbdist.panel.protocol import (
        CheckpointView,
        DeviceView,
        MarkView,
        NodeView,
        Part,
        Picture,
        RankView,
        StrategyRow,
    )

_OnNode = TypeVar("_OnNode", "DeviceView", "RankView")

COLORS = {
    "parameters": "#3987c8",
    "master": "#2b6fb3",
    "gradients": "#c2620a",
    "optimizer": "#8a63d2",
    "gathered": "#12938f",
    "activations": "#4b8b2b",
    "logits": "#a87b00",
    "buffers": "#c4527f",
    "temporaries": "#96683f",
    "context": "#7c8694",
    "other": "#6b7280",
}
"""Part of the memory -> colour of its bar, as in widgets/src/parts.ts."""
LINE = "#2b6fb3"
GREY = "#7c8694"
ODD = "#c2410c"
"""Of the signs for values that are no numbers."""
MAX_CURVES = 8
WIDTH, HEIGHT = 460, 130
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 8, 18
_POINTS = 300

_CELL = "padding:2px 8px 2px 0;text-align:left;vertical-align:middle"
_NUMBER = "padding:2px 8px 2px 0;text-align:right;vertical-align:middle;white-space:nowrap"
_GROUP = "padding:8px 8px 2px 0;text-align:left;font-weight:normal"
_TRACK = (
    "position:relative;width:100%;min-width:140px;height:14px;border-radius:2px;"
    "background:rgba(124,134,148,.22);overflow:hidden"
)


def page(picture: Picture, curves: Mapping[str, Points]) -> str:
    """The whole page.

    Args:
        picture: what is shown.
        curves: thinned points by name.
    """
    now = time.time()
    parts = (
        _head(picture, now),
        _section("Memory", _devices(picture["devices"], picture["nodes"])),
        _section("Strategies", _strategies(picture)),
        _section("Profile", panel_profile_html.body(picture["profile"])),
        _section("Curves", _curves(curves, picture["marks"])),
        _section("Ranks", _ranks(picture["ranks"])),
        _section("Checkpoints", _checkpoints(picture["checkpoints"], now)),
        _section("Marks", _marks(picture["marks"])),
    )
    style = "font-size:13px;line-height:1.4;max-width:960px"
    return f"<div style='{style}'>{''.join(parts)}</div>"


def _section(title: str, body: str) -> str:
    if not body:
        return ""
    return f"<div style='font-weight:600;margin:10px 0 2px'>{escape(title)}</div>{body}"


# ---------------------------------------------------------------------------- header


def _head(picture: Picture, now: float) -> str:
    head = picture["header"]
    strategy = ", ".join(filter(None, (head["backend"], head["options"])))
    offload = "" if head["offload"] == "none" else f", offload {head['offload']}"
    line = f"{strategy}{offload}, {panel_units.precision(head['precision'])}"
    since = "" if head["since"] is None else f" since {panel_units.clock(now - head['since'])}"
    age = (
        ""
        if head["started"] is None
        else f", session {panel_units.clock(now - head['started'])} old"
    )
    lines = [
        f"<div><b>{escape(line)}</b> on {escape(head['place'])}</div>",
        f"<div>{escape(head['words'] + since + age)}</div>",
        f"<div style='color:{GREY}'>{escape(panel_units.as_of(now, head['version']))}</div>",
    ]
    if (progress := picture["progress"]) is not None:
        share = f", {panel_units.share(progress['share'])}" if progress["share"] is not None else ""
        lines.append(f"<div>{escape(progress['text'] + share)}</div>")
    lines += [f"<div>waits: {escape(one['text'])}</div>" for one in picture["queue"]]
    if (notice := picture["notice"]) is not None:
        mark = "Error: " if notice["kind"] == "error" else ""
        text = escape(mark + notice["text"]).replace("\n", "<br>")
        lines.append(f"<div>{text}</div>")
    return "".join(lines)


# ---------------------------------------------------------------------------- memory


def _devices(devices: Sequence[DeviceView], nodes: Sequence[NodeView]) -> str:
    if not devices:
        return ""
    headings = {node["name"]: _node(node) for node in nodes}
    rows = _grouped(devices, headings, _device)
    head = _row(
        ["device", "predicted, and what is used", "used", "peak", "predicted", "of", "now"],
        tag="th",
    )
    key = _key(
        [one["predicted"] for one in devices],
        used=any(one["used_bytes"] for one in devices),
        peak=any(one["peak_bytes"] for one in devices),
        others=any(one["others_bytes"] for one in devices),
    )
    return f"{_table(head + rows)}{key}"


def _node(node: NodeView) -> str:
    """A heading for the rows of a node."""
    words_of = f"{node['words']} · {panel_units.host_memory(node)}"
    return _heading(f"<b>{escape(node['name'])}</b> · {escape(words_of)}")


def _device(device: DeviceView) -> str:
    top = max(
        device["capacity_bytes"] or 0,
        device["predicted_bytes"] or 0,
        device["peak_bytes"] or 0,
        (device["used_bytes"] or 0) + device["others_bytes"],
        1,
    )
    cells = [
        _device_name(device),
        _bar(
            device["predicted"],
            top,
            label=_spoken(device),
            used=device["used_bytes"],
            others=device["others_bytes"],
            peak=device["peak_bytes"],
        ),
        panel_units.size(device["used_bytes"]),
        panel_units.size(device["peak_bytes"]),
        panel_units.size(device["predicted_bytes"]),
        panel_units.size(device["capacity_bytes"]),
        escape(panel_units.doing(device)),
    ]
    below = "".join(
        f"<tr><td colspan='7' style='{_CELL}'>{escape(note)}</td></tr>"
        for note in panel_units.notes(device)
    )
    return _row(cells) + below


def _device_name(device: DeviceView) -> str:
    """Its name, and whose it is where the name does not say so."""
    ranks = f"rank {', '.join(map(str, device['ranks']))}"
    whose = "" if device["name"].endswith(ranks) else f" ({ranks})"
    return f"<div style='white-space:nowrap'>{escape(device['name'] + whose)}</div>"


def _spoken(device: DeviceView) -> str:
    """The bar in words."""
    return (
        f"{device['name']}: {panel_units.size(device['used_bytes'])} used, predicted"
        f" {panel_units.size(device['predicted_bytes'])}, of"
        f" {panel_units.size(device['capacity_bytes'])}"
    )


def _bar(
    parts: Sequence[Part],
    top: int,
    *,
    label: str,
    used: int | None = None,
    others: int = 0,
    peak: int | None = None,
    limit: int | None = None,
) -> str:
    """Parts side by side; what is used is a line over them, peak and limit are marks."""

    def percent(count: float) -> str:
        return f"{min(100.0, 100 * count / top):.2f}%"

    pieces = "".join(
        f"<div title='{escape(one['part'])} {panel_units.size(one['bytes'])}' style='float:left;"
        f"height:100%;width:{percent(one['bytes'])};background:{COLORS.get(one['part'], GREY)}'>"
        "</div>"
        for one in parts
    )
    if used:
        pieces += (
            f"<div style='position:absolute;left:0;bottom:0;height:5px;width:{percent(used)};"
            "background:currentColor'></div>"
        )
    if others:
        pieces += (
            f"<div style='position:absolute;right:0;top:0;height:100%;width:{percent(others)};"
            f"background:{GREY};opacity:.6'></div>"
        )
    for at in (peak, limit):
        if at:
            pieces += (
                f"<div style='position:absolute;left:{percent(at)};margin-left:-2px;top:0;"
                "height:100%;width:2px;background:currentColor'></div>"
            )
    return f"<div role='img' aria-label='{escape(label)}' style='{_TRACK}'>{pieces}</div>"


_MARKS = {
    "used": ("width:10px;height:5px;background:currentColor", "in use"),
    "peak": ("width:2px;height:10px;background:currentColor", "peak"),
    "others": (f"width:10px;height:10px;background:{GREY};opacity:.6", "other processes"),
    "limit": ("width:2px;height:10px;background:currentColor", "free memory of a device"),
}
"""What lies over the parts of a bar: how it looks in the key, and what it is."""


def _key(bars: Iterable[Sequence[Part]], **marks: bool) -> str:
    """What the colours stand for, and those of _MARKS that are there."""
    used = {one["part"] for bar in bars for one in bar}
    shown = [
        (f"width:10px;height:10px;background:{color}", part)
        for part, color in COLORS.items()
        if part in used
    ]
    shown += [_MARKS[name] for name, there in marks.items() if there]
    items = "".join(
        f"<span style='white-space:nowrap;margin-right:12px'><span style='display:inline-block;"
        f"{style}'></span> {word}</span> "
        for style, word in shown
    )
    return f"<div>{items}</div>" if items else ""


# ---------------------------------------------------------------------------- strategies


def _strategies(picture: Picture) -> str:
    strategies = picture["strategies"]
    note = f"<div>{escape(strategies['note'])}</div>" if strategies["note"] else ""
    rows = strategies["rows"]
    if not rows:
        return note
    free = rows[0]["capacity_bytes"]
    top = max(free, min(max(row["device_bytes"] for row in rows), 2 * free), 1)
    head = _row(["", "memory of a device", "peak", "tokens/s", "why"], tag="th")
    body = "".join(_strategy(row, top) for row in rows)
    key = _key([row["parts"] for row in rows], limit=free > 0)
    return f"{_table(head + body)}{key}{note}"


def _strategy(row: StrategyRow, top: int) -> str:
    said = [row["words"]]
    said += ["runs now"] if row["current"] else []
    said += ["recommended"] if row["recommended"] else []
    label = f"{row['words']}: {panel_units.size(row['device_bytes'])}"
    cells = [
        escape(" \N{MIDDLE DOT} ".join(said)),
        _bar(row["parts"], top, label=label, limit=row["capacity_bytes"]),
        panel_units.size(row["device_bytes"]),
        panel_units.speed(row["tokens_per_s"]),
        escape(panel_units.why(row["why"], fits=row["fits"])) + _command(row),
    ]
    return _row(cells)


def _command(row: StrategyRow) -> str:
    """The line that switches to it; no button is here."""
    shown = row["command"] and not row["current"]
    return f"<div><code>{escape(row['command'])}</code></div>" if shown else ""


# ---------------------------------------------------------------------------- curves


def _curves(curves: Mapping[str, Points], marks: Sequence[MarkView]) -> str:
    shown = panel_units.in_order(name for name in curves if len(curves[name][0]))
    pieces = [_curve(name, curves[name], marks) for name in shown[:MAX_CURVES]]
    left = len(shown) - MAX_CURVES
    if left > 0:
        pieces.append(f"<div>and {left} more: nbdist.session().metrics</div>")
    return "".join(pieces)


def _curve(name: str, points: Points, marks: Sequence[MarkView]) -> str:
    from nbdist.panel.curves import thinned

    steps, _, values = thinned(points, _POINTS)
    last = f"{name}: {values[-1]:.6g} at step {steps[-1]:.0f}"
    drawing = _svg(steps, values, [mark["step"] for mark in marks])
    picture = base64.b64encode(drawing.encode()).decode()
    return (
        "<div style='display:inline-block;margin-right:16px'>"
        f"<div>{escape(last)}</div>"
        f"<img width='{WIDTH}' height='{HEIGHT}' alt='{escape(f'curve of {last}')}'"
        f" src='data:image/svg+xml;base64,{picture}'>"
        f"{f'<div>{key}</div>' if (key := panel_units.key_of_odd(values)) else ''}</div>"
    )


def _svg(steps: Sequence[float], values: Sequence[float], marks: Sequence[float]) -> str:
    """A line over steps, with a sign where a value is no number. Holds no text of users."""
    numbers = [value for value in values if math.isfinite(value)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if low == high:
        low, high = low - abs(low or 1) / 10, high + abs(high or 1) / 10
    first, last = steps[0], steps[-1]

    def across(step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * panel_units.between(first, step, last)

    def down(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * panel_units.between(low, value, high)

    path, signs, pen = [], [], "M"
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            path.append(f"{pen}{across(step):.1f} {down(value):.1f}")
            pen = "L"
        else:
            signs.append(_sign(across(step), value))
            pen = "M"
    lines = "".join(
        f"<path d='M{across(mark):.1f} {_TOP}V{HEIGHT - _BOTTOM}' stroke='{GREY}'"
        " stroke-dasharray='3 3' fill='none'/>"
        for mark in marks
        if first <= mark <= last
    )
    text = f"font-family='sans-serif' font-size='10' fill='{GREY}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}'>"
        f"<rect x='{_LEFT}' y='{_TOP}' width='{WIDTH - _LEFT - _RIGHT}'"
        f" height='{HEIGHT - _TOP - _BOTTOM}' fill='none' stroke='{GREY}' stroke-opacity='.5'/>"
        f"{lines}<path d='{''.join(path)}' fill='none' stroke='{LINE}' stroke-width='1.5'/>"
        f"<path d='{''.join(signs)}' fill='none' stroke='{ODD}' stroke-width='1.5'/>"
        f"<text x='{_LEFT - 4}' y='{_TOP + 8}' text-anchor='end' {text}>{high:.4g}</text>"
        f"<text x='{_LEFT - 4}' y='{HEIGHT - _BOTTOM}' text-anchor='end' {text}>{low:.4g}</text>"
        f"<text x='{_LEFT}' y='{HEIGHT - 5}' {text}>{first:.0f}</text>"
        f"<text x='{WIDTH - _RIGHT}' y='{HEIGHT - 5}' text-anchor='end' {text}>{last:.0f}</text>"
        "</svg>"
    )


def _sign(x: float, value: float) -> str:
    """A cross for NaN and a triangle that points where an infinite value lies."""
    bottom, top = HEIGHT - _BOTTOM - 4, _TOP + 4
    if math.isnan(value):
        return f"M{x - 3:.1f} {bottom - 3}l6 6m0 -6l-6 6"
    if value > 0:
        return f"M{x - 3:.1f} {top + 3}h6l-3 -6z"
    return f"M{x - 3:.1f} {bottom - 3}h6l-3 6z"


# ---------------------------------------------------------------------------- tables


def _ranks(ranks: Sequence[RankView]) -> str:
    head = _row(["rank", "state", "pid", "device", "at", "last line"], tag="th")
    names = dict.fromkeys(one["node"] for one in ranks)
    headings = {name: _heading(f"<b>{escape(name)}</b>") for name in names if name}
    rows = _grouped(ranks, headings, _rank)
    return f"<details><summary>{len(ranks)} ranks</summary>{_table(head + rows)}</details>"


def _rank(one: RankView) -> str:
    return _row(
        [
            str(one["rank"]),
            one["state"],
            "-" if one["pid"] is None else str(one["pid"]),
            escape(one["device"]),
            escape(one["where"]),
            f"<code>{escape(one['line'])}</code>" if one["line"] else "",
        ]
    )


def _checkpoints(checkpoints: Sequence[CheckpointView], now: float) -> str:
    if not checkpoints:
        return ""
    head = _row(["name", "step", "size", "backend", "saved", ""], tag="th")
    rows = "".join(
        _row(
            [
                escape(one["name"]),
                "-" if one["step"] is None else str(one["step"]),
                panel_units.size(one["size_bytes"]) if one["state"] == "done" else "-",
                escape(one["backend"]),
                f"{panel_units.age(now - one['saved'])} ago",
                escape(_said_of(one)),
            ]
        )
        for one in reversed(checkpoints)
    )
    return _table(head + rows)


def _said_of(one: CheckpointView) -> str:
    if one["state"] == "failed":
        return f"failed: {one['problem']}"
    return "being written" if one["state"] == "running" else ""


def _marks(marks: Sequence[MarkView]) -> str:
    items = "".join(
        f"<li>step {one['step']}: {escape(one['kind'])}: {escape(one['text'])}</li>"
        for one in marks
    )
    return f"<ul style='margin:0'>{items}</ul>" if items else ""


def _grouped(
    views: Sequence[_OnNode], headings: Mapping[str, str], row: Callable[[_OnNode], str]
) -> str:
    """Rows below the headings of their nodes.

    Args:
        views: in the order of the nodes.
        headings: by name of a node.
        row: makes a row of a view.
    """
    groups = groupby(views, key=itemgetter("node"))
    return "".join(headings.get(name, "") + "".join(map(row, group)) for name, group in groups)


def _heading(words_of: str) -> str:
    """A row that is one cell, of HTML already."""
    return f"<tr><th colspan='7' scope='colgroup' style='{_GROUP}'>{words_of}</th></tr>"


def _table(rows: str) -> str:
    return f"<table style='border-collapse:collapse;margin:2px 0;font-size:inherit'>{rows}</table>"


def _row(cells: Sequence[str], *, tag: str = "td") -> str:
    """Cells that are HTML already."""
    scope = " scope='col'" if tag == "th" else ""
    body = "".join(
        f"<{tag}{scope} style='{_NUMBER if _is_figure(one) else _CELL}'>{one}</{tag}>"
        for one in cells
    )
    return f"<tr>{body}</tr>"


def _is_figure(cell: str) -> bool:
    """A number with its unit, or a dash where it is not known."""
    return cell == "-" or (cell[:1].isdigit() and cell.count(" ") <= 1)
