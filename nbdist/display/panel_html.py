"""The panel as static HTML, for front ends without widgets and for saved notebooks.

Uses inline styles only: front ends strip `<style>`, `<svg>` and `<script>` from untrusted
notebooks, but keep tables, `<details>` and images. The colours work on light and dark themes.
All user text is escaped.
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
        EventMarkView,
        MemoryPart,
        NodeView,
        PanelState,
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
CURVE_COLOR = "#2b6fb3"
MUTED_COLOR = "#7c8694"
NON_FINITE_COLOR = "#c2410c"
"""Colour of the symbols for non-finite values."""
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


def render_page(state: PanelState, curves: Mapping[str, Points]) -> str:
    """Return the whole page.

    Args:
        state: the panel state.
        curves: downsampled points by name.
    """
    now = time.time()
    parts = (
        _head(state, now),
        _section("Memory", _devices(state["devices"], state["nodes"])),
        _section("Strategies", _strategies(state)),
        _section("Profile", panel_profile_html.render_profile(state["profile"])),
        _section("Curves", _curves(curves, state["marks"])),
        _section("Ranks", _ranks(state["ranks"])),
        _section("Checkpoints", _checkpoints(state["checkpoints"], now)),
        _section("Marks", _marks(state["marks"])),
    )
    style = "font-size:13px;line-height:1.4;max-width:960px"
    return f"<div style='{style}'>{''.join(parts)}</div>"


def _section(title: str, body: str) -> str:
    if not body:
        return ""
    return f"<div style='font-weight:600;margin:10px 0 2px'>{escape(title)}</div>{body}"


# ---------------------------------------------------------------------------- header


def _head(state: PanelState, now: float) -> str:
    head = state["header"]
    strategy = ", ".join(filter(None, (head["backend"], head["options"])))
    offload = "" if head["offload"] == "none" else f", offload {head['offload']}"
    line = f"{strategy}{offload}, {panel_units.precision_label(head['precision'])}"
    since = (
        "" if head["since"] is None else f" since {panel_units.format_clock(now - head['since'])}"
    )
    age = (
        ""
        if head["started"] is None
        else f", session {panel_units.format_clock(now - head['started'])} old"
    )
    note = panel_units.snapshot_note(now, head["version"])
    lines = [
        f"<div><b>{escape(line)}</b> on {escape(head['place'])}</div>",
        f"<div>{escape(head['words'] + since + age)}</div>",
        f"<div style='color:{MUTED_COLOR}'>{escape(note)}</div>",
    ]
    if (progress := state["progress"]) is not None:
        share = (
            f", {panel_units.format_percent(progress['share'])}"
            if progress["share"] is not None
            else ""
        )
        lines.append(f"<div>{escape(progress['text'] + share)}</div>")
    lines += [f"<div>queued: {escape(command['text'])}</div>" for command in state["queue"]]
    if (notice := state["notice"]) is not None:
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
        ["device", "predicted and used memory", "used", "peak", "predicted", "of", "now"],
        tag="th",
    )
    key = _key(
        [device["predicted"] for device in devices],
        used=any(device["used_bytes"] for device in devices),
        peak=any(device["peak_bytes"] for device in devices),
        others=any(device["others_bytes"] for device in devices),
    )
    return f"{_table(head + rows)}{key}"


def _node(node: NodeView) -> str:
    """Heading row of a node."""
    text = f"{node['words']} · {panel_units.host_memory_text(node)}"
    return _heading(f"<b>{escape(node['name'])}</b> · {escape(text)}")


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
            label=_device_label(device),
            used=device["used_bytes"],
            others=device["others_bytes"],
            peak=device["peak_bytes"],
        ),
        panel_units.format_bytes(device["used_bytes"]),
        panel_units.format_bytes(device["peak_bytes"]),
        panel_units.format_bytes(device["predicted_bytes"]),
        panel_units.format_bytes(device["capacity_bytes"]),
        escape(panel_units.device_activity_text(device)),
    ]
    below = "".join(
        f"<tr><td colspan='7' style='{_CELL}'>{escape(note)}</td></tr>"
        for note in panel_units.device_notes(device)
    )
    return _row(cells) + below


def _device_name(device: DeviceView) -> str:
    """Name of a device, and its ranks unless the name contains them."""
    ranks = f"rank {', '.join(map(str, device['ranks']))}"
    suffix = "" if device["name"].endswith(ranks) else f" ({ranks})"
    return f"<div style='white-space:nowrap'>{escape(device['name'] + suffix)}</div>"


def _device_label(device: DeviceView) -> str:
    """Description of a bar for screen readers."""
    return (
        f"{device['name']}: {panel_units.format_bytes(device['used_bytes'])} used, predicted"
        f" {panel_units.format_bytes(device['predicted_bytes'])}, of"
        f" {panel_units.format_bytes(device['capacity_bytes'])}"
    )


def _bar(
    parts: Sequence[MemoryPart],
    top: int,
    *,
    label: str,
    used: int | None = None,
    others: int = 0,
    peak: int | None = None,
    limit: int | None = None,
) -> str:
    """A stacked bar with an overlay for the used memory and ticks for peak and limit."""

    def percent(count: float) -> str:
        return f"{min(100.0, 100 * count / top):.2f}%"

    pieces = "".join(
        f"<div title='{escape(part['part'])} {panel_units.format_bytes(part['bytes'])}'"
        f" style='float:left;height:100%;width:{percent(part['bytes'])};"
        f"background:{COLORS.get(part['part'], MUTED_COLOR)}'></div>"
        for part in parts
    )
    if used:
        pieces += (
            f"<div style='position:absolute;left:0;bottom:0;height:5px;width:{percent(used)};"
            "background:currentColor'></div>"
        )
    if others:
        pieces += (
            f"<div style='position:absolute;right:0;top:0;height:100%;width:{percent(others)};"
            f"background:{MUTED_COLOR};opacity:.6'></div>"
        )
    for position in (peak, limit):
        if position:
            pieces += (
                f"<div style='position:absolute;left:{percent(position)};margin-left:-2px;top:0;"
                "height:100%;width:2px;background:currentColor'></div>"
            )
    return f"<div role='img' aria-label='{escape(label)}' style='{_TRACK}'>{pieces}</div>"


_MARKS = {
    "used": ("width:10px;height:5px;background:currentColor", "in use"),
    "peak": ("width:2px;height:10px;background:currentColor", "peak"),
    "others": (f"width:10px;height:10px;background:{MUTED_COLOR};opacity:.6", "other processes"),
    "limit": ("width:2px;height:10px;background:currentColor", "free memory of a device"),
}
"""Overlay of a bar -> its style in the legend, and its label."""


def _key(bars: Iterable[Sequence[MemoryPart]], **marks: bool) -> str:
    """Legend of the colours and of the given overlays."""
    used = {part["part"] for bar in bars for part in bar}
    shown = [
        (f"width:10px;height:10px;background:{color}", part)
        for part, color in COLORS.items()
        if part in used
    ]
    shown += [_MARKS[name] for name, is_shown in marks.items() if is_shown]
    items = "".join(
        f"<span style='white-space:nowrap;margin-right:12px'><span style='display:inline-block;"
        f"{style}'></span> {label}</span> "
        for style, label in shown
    )
    return f"<div>{items}</div>" if items else ""


# ---------------------------------------------------------------------------- strategies


def _strategies(state: PanelState) -> str:
    strategies = state["strategies"]
    note = f"<div>{escape(strategies['note'])}</div>" if strategies["note"] else ""
    rows = strategies["rows"]
    if not rows:
        return note
    free = rows[0]["capacity_bytes"]
    top = max(free, min(max(row["device_bytes"] for row in rows), 2 * free), 1)
    head = _row(["", "memory per device", "peak", "tokens/s", "why"], tag="th")
    body = "".join(_strategy(row, top) for row in rows)
    key = _key([row["parts"] for row in rows], limit=free > 0)
    return f"{_table(head + body)}{key}{note}"


def _strategy(row: StrategyRow, top: int) -> str:
    labels = [row["words"]]
    labels += ["current"] if row["current"] else []
    labels += ["recommended"] if row["recommended"] else []
    label = f"{row['words']}: {panel_units.format_bytes(row['device_bytes'])}"
    cells = [
        escape(" \N{MIDDLE DOT} ".join(labels)),
        _bar(row["parts"], top, label=label, limit=row["capacity_bytes"]),
        panel_units.format_bytes(row["device_bytes"]),
        panel_units.format_tokens_per_s(row["tokens_per_s"]),
        escape(panel_units.plan_reason_text(row["why"], fits=row["fits"])) + _command(row),
    ]
    return _row(cells)


def _command(row: StrategyRow) -> str:
    """The switch command, since a static page has no buttons."""
    shown = row["command"] and not row["current"]
    return f"<div><code>{escape(row['command'])}</code></div>" if shown else ""


# ---------------------------------------------------------------------------- curves


def _curves(curves: Mapping[str, Points], marks: Sequence[EventMarkView]) -> str:
    shown = panel_units.sort_curve_names(name for name in curves if len(curves[name]))
    pieces = [_curve(name, curves[name], marks) for name in shown[:MAX_CURVES]]
    num_hidden = len(shown) - MAX_CURVES
    if num_hidden > 0:
        pieces.append(f"<div>and {num_hidden} more: nbdist.session().metrics</div>")
    return "".join(pieces)


def _curve(name: str, points: Points, marks: Sequence[EventMarkView]) -> str:
    from nbdist.panel.curves import downsample

    steps, _, values = downsample(points, _POINTS).T.tolist()
    last = f"{name}: {values[-1]:.6g} at step {steps[-1]:.0f}"
    drawing = _svg(steps, values, [mark["step"] for mark in marks])
    picture = base64.b64encode(drawing.encode()).decode()
    return (
        "<div style='display:inline-block;margin-right:16px'>"
        f"<div>{escape(last)}</div>"
        f"<img width='{WIDTH}' height='{HEIGHT}' alt='{escape(f'curve of {last}')}'"
        f" src='data:image/svg+xml;base64,{picture}'>"
        f"{f'<div>{key}</div>' if (key := panel_units.non_finite_legend(values)) else ''}</div>"
    )


def _svg(steps: Sequence[float], values: Sequence[float], marks: Sequence[float]) -> str:
    """A curve as SVG, with symbols for non-finite values. Contains no user text."""
    numbers = [value for value in values if math.isfinite(value)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if low == high:
        low, high = low - abs(low or 1) / 10, high + abs(high or 1) / 10
    first, last = steps[0], steps[-1]

    def across(step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * panel_units.relative_position(first, step, last)

    def down(value: float) -> float:
        return (
            HEIGHT
            - _BOTTOM
            - (HEIGHT - _TOP - _BOTTOM) * panel_units.relative_position(low, value, high)
        )

    path, signs, pen = [], [], "M"
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            path.append(f"{pen}{across(step):.1f} {down(value):.1f}")
            pen = "L"
        else:
            signs.append(_sign(across(step), value))
            pen = "M"
    lines = "".join(
        f"<path d='M{across(mark):.1f} {_TOP}V{HEIGHT - _BOTTOM}' stroke='{MUTED_COLOR}'"
        " stroke-dasharray='3 3' fill='none'/>"
        for mark in marks
        if first <= mark <= last
    )
    text = f"font-family='sans-serif' font-size='10' fill='{MUTED_COLOR}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}'>"
        f"<rect x='{_LEFT}' y='{_TOP}' width='{WIDTH - _LEFT - _RIGHT}'"
        f" height='{HEIGHT - _TOP - _BOTTOM}' fill='none' stroke='{MUTED_COLOR}'"
        f" stroke-opacity='.5'/>{lines}"
        f"<path d='{''.join(path)}' fill='none' stroke='{CURVE_COLOR}' stroke-width='1.5'/>"
        f"<path d='{''.join(signs)}' fill='none' stroke='{NON_FINITE_COLOR}' stroke-width='1.5'/>"
        f"<text x='{_LEFT - 4}' y='{_TOP + 8}' text-anchor='end' {text}>{high:.4g}</text>"
        f"<text x='{_LEFT - 4}' y='{HEIGHT - _BOTTOM}' text-anchor='end' {text}>{low:.4g}</text>"
        f"<text x='{_LEFT}' y='{HEIGHT - 5}' {text}>{first:.0f}</text>"
        f"<text x='{WIDTH - _RIGHT}' y='{HEIGHT - 5}' text-anchor='end' {text}>{last:.0f}</text>"
        "</svg>"
    )


def _sign(x: float, value: float) -> str:
    """Path of a cross for NaN, or of a triangle that points towards an infinite value."""
    bottom, top = HEIGHT - _BOTTOM - 4, _TOP + 4
    if math.isnan(value):
        return f"M{x - 3:.1f} {bottom - 3}l6 6m0 -6l-6 6"
    if value > 0:
        return f"M{x - 3:.1f} {top + 3}h6l-3 -6z"
    return f"M{x - 3:.1f} {bottom - 3}h6l-3 6z"


# ---------------------------------------------------------------------------- tables


def _ranks(ranks: Sequence[RankView]) -> str:
    head = _row(["rank", "state", "pid", "device", "at", "last line"], tag="th")
    names = dict.fromkeys(rank["node"] for rank in ranks)
    headings = {name: _heading(f"<b>{escape(name)}</b>") for name in names if name}
    rows = _grouped(ranks, headings, _rank)
    return f"<details><summary>{len(ranks)} ranks</summary>{_table(head + rows)}</details>"


def _rank(rank: RankView) -> str:
    return _row(
        [
            str(rank["rank"]),
            rank["state"],
            "-" if rank["pid"] is None else str(rank["pid"]),
            escape(rank["device"]),
            escape(rank["where"]),
            f"<code>{escape(rank['line'])}</code>" if rank["line"] else "",
        ]
    )


def _checkpoints(checkpoints: Sequence[CheckpointView], now: float) -> str:
    if not checkpoints:
        return ""
    head = _row(["name", "step", "size", "backend", "saved", ""], tag="th")
    rows = "".join(
        _row(
            [
                escape(checkpoint["name"]),
                "-" if checkpoint["step"] is None else str(checkpoint["step"]),
                panel_units.format_bytes(checkpoint["size_bytes"])
                if checkpoint["state"] == "done"
                else "-",
                escape(checkpoint["backend"]),
                f"{panel_units.format_age(now - checkpoint['saved'])} ago",
                escape(_checkpoint_note(checkpoint)),
            ]
        )
        for checkpoint in reversed(checkpoints)
    )
    return _table(head + rows)


def _checkpoint_note(checkpoint: CheckpointView) -> str:
    if checkpoint["state"] == "failed":
        return f"failed: {checkpoint['problem']}"
    return "being written" if checkpoint["state"] == "running" else ""


def _marks(marks: Sequence[EventMarkView]) -> str:
    items = "".join(
        f"<li>step {mark['step']}: {escape(mark['kind'])}: {escape(mark['text'])}</li>"
        for mark in marks
    )
    return f"<ul style='margin:0'>{items}</ul>" if items else ""


def _grouped(
    views: Sequence[_OnNode], headings: Mapping[str, str], row: Callable[[_OnNode], str]
) -> str:
    """Rows below the headings of their nodes.

    Args:
        views: views in node order.
        headings: heading row by node name.
        row: formats a view as a row.
    """
    groups = groupby(views, key=itemgetter("node"))
    return "".join(headings.get(name, "") + "".join(map(row, group)) for name, group in groups)


def _heading(words_of: str) -> str:
    """A row with one cell that spans the table. The argument is HTML."""
    return f"<tr><th colspan='7' scope='colgroup' style='{_GROUP}'>{words_of}</th></tr>"


def _table(rows: str) -> str:
    return f"<table style='border-collapse:collapse;margin:2px 0;font-size:inherit'>{rows}</table>"


def _row(cells: Sequence[str], *, tag: str = "td") -> str:
    """A table row. The cells are HTML."""
    scope = " scope='col'" if tag == "th" else ""
    body = "".join(
        f"<{tag}{scope} style='{_NUMBER if _is_figure(cell) else _CELL}'>{cell}</{tag}>"
        for cell in cells
    )
    return f"<tr>{body}</tr>"


def _is_figure(cell: str) -> bool:
    """Return whether a cell is a number with a unit, or "-"."""
    return cell == "-" or (cell[:1].isdigit() and cell.count(" ") <= 1)
