"""The panel as static HTML, for front ends without widgets and for saved notebooks."""

from __future__ import annotations

import base64
import math
import time
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from nbdist.display import panel_text
from nbdist.display.elements import (
    MEMORY_COLORS,
    MUTED_COLOR,
    PAGE_STYLE,
    STEP_COLORS,
    Html,
    element,
    html_bar,
    html_row,
    html_table,
    join,
    legend,
    lines,
)
from nbdist.number_formatting import (
    format_age,
    format_bytes,
    format_duration,
    format_tokens_per_s,
    non_finite_legend,
    relative_position,
    sort_curve_names,
)
from nbdist.panel.curves import downsample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nbdist.panel.curves import Points
    from nbdist.panel.protocol import (
        AdviceView,
        CheckpointView,
        DeviceView,
        EventMarkView,
        MemoryPart,
        NodeView,
        PanelState,
        ProfiledRank,
        ProfileView,
        RankView,
        StrategiesView,
        StrategyRow,
    )

_OnNode = TypeVar("_OnNode", "DeviceView", "RankView")

CURVE_COLOR = "#2b6fb3"
NON_FINITE_COLOR = "#c2410c"
"""Colour of the symbols for non-finite values."""
MAX_CURVES = 8
WIDTH, HEIGHT = 460, 130
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 8, 18
_POINTS = 300
_HEADING = "padding:8px 8px 2px 0;text-align:left;font-weight:normal"
_DEVICE_TEXT = (0, 1, 6)
_STRATEGY_TEXT = (0, 1, 4)
_RANK_TEXT = (1, 3, 4, 5)
_CHECKPOINT_TEXT = (0, 3, 4, 5)
"""Indices of the columns that hold text."""


def render_page(state: PanelState, curves: Mapping[str, Points]) -> str:
    """Return the whole page.

    Args:
        state: the panel state.
        curves: downsampled points by name.
    """
    now = time.time()
    first, *others = panel_text.header_lines(state, now)
    marks = [f"step {mark['step']}: {mark['kind']}: {mark['text']}" for mark in state["marks"]]
    return element(
        "div",
        element("div", element("b", first)),
        lines(others),
        _section("Memory", _devices(state["devices"], state["nodes"])),
        _section("Strategies", _strategies(state["strategies"])),
        _section("Profile", render_profile(state["profile"])),
        _section("Curves", _curves(curves, state["marks"])),
        _section("Ranks", _ranks(state["ranks"])),
        _section("Checkpoints", _checkpoints(state["checkpoints"], now)),
        _section("Marks", _list(marks)),
        style=PAGE_STYLE,
    )


def _section(title: str, body: Html) -> Html:
    if not body:
        return body
    return join([element("div", title, style="font-weight:600;margin:10px 0 2px"), body])


# ---------------------------------------------------------------------------- memory


def _devices(devices: Sequence[DeviceView], nodes: Sequence[NodeView]) -> Html:
    if not devices:
        return Html()
    headings = {node["name"]: panel_text.node_text(node) for node in nodes}
    header = ["device", "predicted and used memory", "used", "peak", "predicted", "of", "now"]
    key = legend(
        MEMORY_COLORS,
        _parts(device["predicted"] for device in devices),
        {
            "used": any(device["used_bytes"] for device in devices),
            "peak": any(device["peak_bytes"] for device in devices),
            "others": any(device["others_bytes"] for device in devices),
        },
    )
    return join([html_table(header, _rows_by_node(devices, headings, _device), _DEVICE_TEXT), key])


def _device(device: DeviceView) -> Html:
    used, capacity = device["used_bytes"], device["capacity_bytes"]
    peak, predicted = device["peak_bytes"], device["predicted_bytes"]
    others = device["others_bytes"]
    bar = _memory_bar(
        device["predicted"],
        max(capacity or 0, predicted or 0, peak or 0, (used or 0) + others, 1),
        label=(
            f"{device['name']}: {format_bytes(used)} used, predicted {format_bytes(predicted)},"
            f" of {format_bytes(capacity)}"
        ),
        overlays={"used": used, "others": others, "peak": peak},
    )
    ranks = f"rank {', '.join(map(str, device['ranks']))}"
    name = device["name"] if device["name"].endswith(ranks) else f"{device['name']} ({ranks})"
    cells = [
        element("div", name, style="white-space:nowrap"),
        bar,
        *map(format_bytes, (used, peak, predicted, capacity)),
        ", ".join(panel_text.device_readings(device)),
    ]
    notes = (element("td", note, colspan=7) for note in panel_text.device_notes(device))
    return join([html_row(cells, _DEVICE_TEXT), *(element("tr", note) for note in notes)])


def _memory_bar(
    parts: Sequence[MemoryPart], top: float, *, label: str, overlays: Mapping[str, float | None]
) -> Html:
    pieces = [
        (part["part"], part["bytes"], f"{part['part']} {format_bytes(part['bytes'])}")
        for part in parts
    ]
    return html_bar(pieces, MEMORY_COLORS, top, label=label, overlays=overlays)


def _parts(bars: Iterable[Sequence[MemoryPart]]) -> set[str]:
    return {part["part"] for bar in bars for part in bar}


def _strategies(strategies: StrategiesView) -> Html:
    rows, note = strategies["rows"], lines([strategies["note"]])
    if not rows:
        return note
    free = rows[0]["capacity_bytes"]
    top = max(free, min(max(row["device_bytes"] for row in rows), 2 * free), 1)
    header = ["", "memory per device", "peak", "tokens/s", "why"]
    table = html_table(header, [_strategy(row, top) for row in rows], _STRATEGY_TEXT)
    key = legend(MEMORY_COLORS, _parts(row["parts"] for row in rows), {"limit": free > 0})
    return join([table, key, note])


def _strategy(row: StrategyRow, top: int) -> Html:
    labels = [row["words"]]
    labels += ["current"] if row["current"] else []
    labels += ["recommended"] if row["recommended"] else []
    size = format_bytes(row["device_bytes"])
    overlays = {"limit": row["capacity_bytes"]}
    # A static page has no buttons.
    command = "" if row["current"] else row["command"]
    cells = [
        " \N{MIDDLE DOT} ".join(labels),
        _memory_bar(row["parts"], top, label=f"{row['words']}: {size}", overlays=overlays),
        size,
        format_tokens_per_s(row["tokens_per_s"]),
        join([panel_text.strategy_reason(row), lines([element("code", command)] * bool(command))]),
    ]
    return html_row(cells, _STRATEGY_TEXT)


# ---------------------------------------------------------------------------- profile


def render_profile(profile: ProfileView) -> Html:
    """Return the HTML below the section title; empty before the first profile."""
    if not profile["verdict"]:
        return Html()
    top = max((rank["step_s"] for rank in profile["ranks"]), default=0.0)
    rows = [_profiled_rank(rank, top) for rank in profile["ranks"]]
    used = {span["part"] for rank in profile["ranks"] for span in rank["parts"]}
    bars = [html_table([], rows, style="width:100%"), legend(STEP_COLORS, used)]
    return join(
        [
            element("div", element("b", profile["verdict"])),
            lines([profile["facts"], profile["gained"]]),
            *(bars if rows else []),
            _list(map(_advice, profile["advice"])),
            lines(profile["notes"]),
        ]
    )


def _profiled_rank(rank: ProfiledRank, top: float) -> Html:
    name = f"rank {rank['rank']}{' (slowest)' if rank['straggler'] else ''}"
    pieces = []
    remaining = rank["step_s"]
    for span in rank["parts"]:
        seconds = min(span["seconds"], remaining)
        remaining -= seconds
        pieces.append((span["part"], seconds, f"{span['part']} {format_duration(seconds)}"))
    # The parts are also listed as text, since their colours alone do not tell them apart.
    words = "; ".join(filter(None, (panel_text.step_parts_text(rank), rank["figures"])))
    bar = html_bar(pieces, STEP_COLORS, top, label=f"{name}: {words}")
    below = element("div", words, style="font-size:12px;margin:0 0 4px")
    cells = [name, join([bar, below]), format_duration(rank["step_s"])]
    return html_row(cells, {1}, wide_column=1)


def _advice(advice: AdviceView) -> Html:
    command = [element("code", advice["command"])] if advice["command"] else []
    return join([element("b", advice["title"]), f": {advice['text']}", lines(command)])


# ---------------------------------------------------------------------------- curves


def _curves(curves: Mapping[str, Points], marks: Sequence[EventMarkView]) -> Html:
    shown = sort_curve_names(name for name in curves if len(curves[name]))
    pieces = [_curve(name, curves[name], marks) for name in shown[:MAX_CURVES]]
    num_hidden = len(shown) - MAX_CURVES
    hidden_note = f"and {num_hidden} more: nbdist.session().metrics" if num_hidden > 0 else ""
    return join([*pieces, lines([hidden_note])])


def _curve(name: str, points: Points, marks: Sequence[EventMarkView]) -> Html:
    steps, _, values = downsample(points, _POINTS).T.tolist()
    last = f"{name}: {values[-1]:.6g} at step {steps[-1]:.0f}"
    drawing = _svg(steps, values, [mark["step"] for mark in marks])
    picture = base64.b64encode(drawing.encode()).decode()
    image = element(
        "img",
        width=WIDTH,
        height=HEIGHT,
        alt=f"curve of {last}",
        src=f"data:image/svg+xml;base64,{picture}",
    )
    return element(
        "div",
        element("div", last),
        image,
        lines([non_finite_legend(values)]),
        style="display:inline-block;margin-right:16px",
    )


def _svg(steps: Sequence[float], values: Sequence[float], marks: Sequence[float]) -> str:
    """A curve as SVG, with symbols for non-finite values. Contains no user text."""
    numbers = [value for value in values if math.isfinite(value)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if low == high:
        low, high = low - abs(low or 1) / 10, high + abs(high or 1) / 10
    first, last = steps[0], steps[-1]
    width, height, bottom = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM, HEIGHT - _BOTTOM

    def across(step: float) -> float:
        return _LEFT + width * relative_position(first, step, last)

    path, signs, pen = [], [], "M"
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            down = bottom - height * relative_position(low, value, high)
            path.append(f"{pen}{across(step):.1f} {down:.1f}")
            pen = "L"
        else:
            signs.append(_marker_path(across(step), value))
            pen = "M"
    dashed = "".join(
        f"<path d='M{across(mark):.1f} {_TOP}V{bottom}' stroke='{MUTED_COLOR}'"
        " stroke-dasharray='3 3' fill='none'/>"
        for mark in marks
        if first <= mark <= last
    )
    text = f"font-family='sans-serif' font-size='10' fill='{MUTED_COLOR}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}'>"
        f"<rect x='{_LEFT}' y='{_TOP}' width='{width}' height='{height}' fill='none'"
        f" stroke='{MUTED_COLOR}' stroke-opacity='.5'/>{dashed}"
        f"<path d='{''.join(path)}' fill='none' stroke='{CURVE_COLOR}' stroke-width='1.5'/>"
        f"<path d='{''.join(signs)}' fill='none' stroke='{NON_FINITE_COLOR}' stroke-width='1.5'/>"
        f"<text x='{_LEFT - 4}' y='{_TOP + 8}' text-anchor='end' {text}>{high:.4g}</text>"
        f"<text x='{_LEFT - 4}' y='{bottom}' text-anchor='end' {text}>{low:.4g}</text>"
        f"<text x='{_LEFT}' y='{HEIGHT - 5}' {text}>{first:.0f}</text>"
        f"<text x='{WIDTH - _RIGHT}' y='{HEIGHT - 5}' text-anchor='end' {text}>{last:.0f}</text>"
        "</svg>"
    )


def _marker_path(x: float, value: float) -> str:
    """Path of a cross for NaN, or of a triangle that points towards an infinite value."""
    bottom, top = HEIGHT - _BOTTOM - 4, _TOP + 4
    if math.isnan(value):
        return f"M{x - 3:.1f} {bottom - 3}l6 6m0 -6l-6 6"
    if value > 0:
        return f"M{x - 3:.1f} {top + 3}h6l-3 -6z"
    return f"M{x - 3:.1f} {bottom - 3}h6l-3 6z"


# ---------------------------------------------------------------------------- tables


def _ranks(ranks: Sequence[RankView]) -> Html:
    header = ["rank", "state", "pid", "device", "at", "last line"]
    headings = {rank["node"]: rank["node"] for rank in ranks}
    table = html_table(header, _rows_by_node(ranks, headings, _rank), _RANK_TEXT)
    return element("details", element("summary", f"{len(ranks)} ranks"), table)


def _rank(rank: RankView) -> Html:
    line = element("code", rank["line"]) if rank["line"] else ""
    pid = "-" if rank["pid"] is None else str(rank["pid"])
    cells = [str(rank["rank"]), rank["state"], pid, rank["device"], rank["where"], line]
    return html_row(cells, _RANK_TEXT)


def _rows_by_node(
    views: Sequence[_OnNode], headings: Mapping[str, str], row: Callable[[_OnNode], Html]
) -> list[Html]:
    """Rows below the headings of their nodes. The views are in the order of the nodes."""
    rows = []
    for name, group in groupby(views, key=itemgetter("node")):
        if name:
            heading = element("th", headings[name], colspan=7, scope="colgroup", style=_HEADING)
            rows.append(element("tr", heading))
        rows += map(row, group)
    return rows


def _checkpoints(checkpoints: Sequence[CheckpointView], now: float) -> Html:
    if not checkpoints:
        return Html()
    rows = []
    for checkpoint in reversed(checkpoints):
        is_done = checkpoint["state"] == "done"
        cells = [
            checkpoint["name"],
            "-" if checkpoint["step"] is None else str(checkpoint["step"]),
            format_bytes(checkpoint["size_bytes"] if is_done else None),
            checkpoint["backend"],
            f"{format_age(now - checkpoint['saved'])} ago",
            panel_text.checkpoint_note(checkpoint),
        ]
        rows.append(html_row(cells, _CHECKPOINT_TEXT))
    header = ["name", "step", "size", "backend", "saved", ""]
    return html_table(header, rows, _CHECKPOINT_TEXT)


def _list(items: Iterable[str]) -> Html:
    shown = [element("li", item) for item in items]
    return element("ul", *shown, style="margin:4px 0") if shown else Html()
