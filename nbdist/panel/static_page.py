"""The panel without widgets: as text for terminals and scripts, as static HTML for saved notebooks.

Both are rendered from the same sections. A block of a section is a line of text, a table, or a
`Rich` that differs in HTML and text.
"""

from __future__ import annotations

import base64
import math
import time
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from nbdist.display import (
    MEMORY_COLORS,
    MUTED_COLOR,
    PAGE_STYLE,
    STEP_COLORS,
    Html,
    Rich,
    Table,
    element,
    html_bar,
    join,
    legend,
    lines,
    text_bar,
)
from nbdist.number_formatting import (
    NON_FINITE_SYMBOLS,
    format_age,
    format_bytes,
    format_clock,
    format_duration,
    format_tokens_per_s,
    non_finite_kind,
    non_finite_legend,
    precision_label,
    relative_position,
    sort_curve_names,
)
from nbdist.output.ansi import replace_invalid_chars, strip_ansi
from nbdist.panel.curves import downsample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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

    Block = str | Rich | Table

_OnNode = TypeVar("_OnNode", "DeviceView", "RankView")

CURVE_COLOR = "#2b6fb3"
NON_FINITE_COLOR = "#c2410c"
"""Colour of the symbols for non-finite values."""
MAX_PICTURES, MAX_SPARKLINES = 8, 12
"""Maximum number of curves in HTML and in a text."""
MAX_ROWS = 20
"""Maximum number of checkpoints and marks."""
WIDTH, HEIGHT = 460, 130
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 8, 18
_POINTS = 300
_BAR_CHARS = 24
_STEP_BAR_CHARS = 40
STEP_PART_LETTERS = {
    "data": "d",
    "copies": "h",
    "forward": "F",
    "backward": "B",
    "optimizer": "O",
    "communication": "C",
    "waiting": "w",
    "offload": "x",
    "python": "p",
    "idle": "-",
}
"""Part of a step -> its letter in a text bar, whose description has the same order."""
_SPARKS = (
    "\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}"
    "\N{LOWER HALF BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}"
    "\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
_SPARK_CHARS = 40


def render_html(state: PanelState, curves: Mapping[str, Points]) -> str:
    """Return the page as HTML.

    Args:
        state: the panel state.
        curves: downsampled points by name.
    """
    now = time.time()
    first, *others = header_lines(state, now)
    body = [element("div", element("b", first)), lines(others)]
    for title, blocks in _sections(state, curves, now):
        body.append(element("div", title, style="font-weight:600;margin:10px 0 2px"))
        body.append(blocks_html(blocks))
    return element("div", *body, style=PAGE_STYLE)


def render_text(state: PanelState, curves: Mapping[str, Points]) -> str:
    """Return the page as text, without a trailing newline; arguments as for `render_html`."""
    now = time.time()
    shown = header_lines(state, now)
    for title, blocks in _sections(state, curves, now):
        shown += [title, *(f"  {line}" for line in blocks_text(blocks))]
    return "\n".join(strip_ansi(replace_invalid_chars(line)).rstrip() for line in shown)


def blocks_html(blocks: Iterable[Block]) -> Html:
    """Return the blocks of a section as HTML."""
    return join(lines([block]) if isinstance(block, str) else block.html for block in blocks)


def blocks_text(blocks: Iterable[Block]) -> list[str]:
    """Return the blocks of a section as lines of text."""
    return [
        line
        for block in blocks
        for line in (block if isinstance(block, str) else block.text).splitlines()
    ]


def _sections(
    state: PanelState, curves: Mapping[str, Points], now: float
) -> Iterator[tuple[str, list[Block]]]:
    """Yield title and blocks of each section that is not empty."""
    sections = {
        "Memory": _devices(state["devices"], state["nodes"]),
        "Strategies (%nbdist switch NAME changes to another one)": _strategies(state["strategies"]),
        "Profile": profile_blocks(state["profile"]),
        "Curves": _curves(curves, state["marks"]),
        "Ranks": _ranks(state["ranks"]),
        "Checkpoints": _checkpoints(state["checkpoints"], now),
        "Marks": _marks(state["marks"]),
    }
    yield from ((title, blocks) for title, blocks in sections.items() if any(blocks))


def header_lines(state: PanelState, now: float) -> list[str]:
    """Return the strategy, the state, the age of the page, and what is going on."""
    head, progress, notice = state["header"], state["progress"], state["notice"]
    strategy = [head["backend"], precision_label(head["precision"])]
    strategy += [f"offload {head['offload']}"] if head["offload"] != "none" else []
    strategy += [head["options"]] if head["options"] else []
    description = head["description"]
    if head["state_since"] is not None:
        description += f" since {format_clock(now - head['state_since'])}"
    if head["started_at"] is not None:
        description += f"; session {format_clock(now - head['started_at'])} old"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    shown = [f"{', '.join(strategy)} on {head['place']}", description]
    shown += [f"as of {stamp}; nbdist {head['version']}"]
    if progress is not None:
        share = "" if progress["fraction_done"] is None else f", {progress['fraction_done']:.0%}"
        shown.append(f"{progress['text']}{share}")
    shown += [f"queued: {waiting['text']}" for waiting in state["queue"]]
    if notice is not None:
        shown += f"{notice['kind']}: {notice['text']}".splitlines()
    return shown


def _rows_by_node(
    views: Sequence[_OnNode],
    headings: Mapping[str, str],
    row: Callable[[_OnNode], list[str | Rich]],
) -> list[list[str | Rich] | str]:
    """Return rows below the headings of their nodes. The views are in the order of the nodes."""
    rows: list[list[str | Rich] | str] = []
    for name, group in groupby(views, key=itemgetter("node")):
        rows += [headings[name]] if name else []
        rows += map(row, group)
    return rows


# ---------------------------------------------------------------------------- memory


def _devices(devices: Sequence[DeviceView], nodes: Sequence[NodeView]) -> list[Block]:
    if not devices:
        return []
    headings = {}
    for node in nodes:
        used, total = format_bytes(node["host_used_bytes"]), format_bytes(node["host_bytes"])
        name = node["name"]
        headings[name] = f"{name}: {node['description']}, host memory {used} of {total}"
    key = legend(
        MEMORY_COLORS,
        _parts(device["predicted"] for device in devices),
        {
            "used": any(device["used_bytes"] for device in devices),
            "peak": any(device["peak_bytes"] for device in devices),
            "others": any(device["others_bytes"] for device in devices),
        },
    )
    table = Table(
        header=["device", "predicted and used memory", "used", "peak", "predicted", "of", "now"],
        rows=_rows_by_node(devices, headings, _device),
        text_columns={0, 1, 6},
    )
    notes = []
    for device in devices:
        notes += [f"{device['name']}: {device['note']}"] if device["note"] else []
        if device["other_processes"]:
            held, others = format_bytes(device["others_bytes"]), device["other_processes"]
            notes.append(f"{device['name']}: {held} are held by {', '.join(others)}")
    return [table, Rich(key, ""), *notes]


def _device(device: DeviceView) -> list[str | Rich]:
    used, capacity = device["used_bytes"], device["capacity_bytes"]
    peak, predicted = device["peak_bytes"], device["predicted_bytes"]
    others = device["others_bytes"]
    bar = _memory_bar(
        device["predicted"],
        used or 0,
        max(capacity or 0, predicted or 0, peak or 0, (used or 0) + others, 1),
        label=(
            f"{device['name']}: {format_bytes(used)} used, predicted {format_bytes(predicted)},"
            f" of {format_bytes(capacity)}"
        ),
        overlays={"used": used, "others": others, "peak": peak},
    )
    ranks = f"rank {', '.join(map(str, device['ranks']))}"
    name = device["name"] if device["name"].endswith(ranks) else f"{device['name']} ({ranks})"
    readings = [f"others {format_bytes(others)}"] if others else []
    if device["utilization"] is not None:
        readings.append(f"{device['utilization']:.0%} busy")
    if device["power_w"] is not None:
        limit = f" of {device['power_limit_w']:.0f}" if device["power_limit_w"] is not None else ""
        readings.append(f"{device['power_w']:.0f}{limit} W")
    if device["temperature_c"] is not None:
        readings.append(f"{device['temperature_c']:.0f} \N{DEGREE SIGN}C")
    for link, tx, rx in (
        ("PCIe", device["pcie_tx"], device["pcie_rx"]),
        ("NVLink", device["nvlink_tx"], device["nvlink_rx"]),
    ):
        if tx is not None and rx is not None:
            readings.append(f"{link} {format_bytes(tx)}/s out, {format_bytes(rx)}/s in")
    return [
        Rich(element("div", name, style="white-space:nowrap"), name),
        bar,
        *map(format_bytes, (used, peak, predicted, capacity)),
        ", ".join(readings),
    ]


def _memory_bar(
    parts: Sequence[MemoryPart],
    amount: float,
    top: float,
    *,
    label: str,
    overlays: Mapping[str, float | None],
) -> Rich:
    """Return a bar of the parts; as text a bar of the amount."""
    pieces = [
        (part["part"], part["bytes"], f"{part['part']} {format_bytes(part['bytes'])}")
        for part in parts
    ]
    html = html_bar(pieces, MEMORY_COLORS, top, label=label, overlays=overlays)
    return Rich(html, text_bar(amount, top, _BAR_CHARS))


def _parts(bars: Iterable[Sequence[MemoryPart]]) -> set[str]:
    return {part["part"] for bar in bars for part in bar}


def _strategies(strategies: StrategiesView) -> list[Block]:
    rows, note = strategies["rows"], strategies["note"]
    if not rows:
        return [note]
    free = rows[0]["capacity_bytes"]
    top = max(free, min(max(row["device_bytes"] for row in rows), 2 * free), 1)
    table = Table(
        header=["", "memory per device", "peak", "tokens/s", "why"],
        rows=[_strategy(row, top) for row in rows],
        text_columns={0, 1, 4},
    )
    key = legend(MEMORY_COLORS, _parts(row["parts"] for row in rows), {"limit": free > 0})
    return [table, Rich(key, ""), note]


def _strategy(row: StrategyRow, top: int) -> list[str | Rich]:
    labels = [row["label"]]
    labels += ["current"] if row["current"] else []
    labels += ["recommended"] if row["recommended"] else []
    size = format_bytes(row["device_bytes"])
    bar = _memory_bar(
        row["parts"],
        row["device_bytes"],
        top,
        label=f"{row['label']}: {size}",
        overlays={"limit": row["capacity_bytes"]},
    )
    is_complete = row["fits"] or row["why"].startswith("does not fit")
    reason = row["why"] if is_complete else f"does not fit; {row['why']}"
    # A static page has no buttons.
    command = [element("code", row["command"])] if row["command"] and not row["current"] else []
    return [
        " \N{MIDDLE DOT} ".join(labels),
        bar,
        size,
        format_tokens_per_s(row["tokens_per_s"]),
        Rich(join([reason, lines(command)]), reason),
    ]


# ---------------------------------------------------------------------------- profile


def profile_blocks(profile: ProfileView) -> list[Block]:
    """Return the blocks of the profile; none before the first profile."""
    if not profile["verdict"]:
        return []
    ranks, top = profile["ranks"], max((rank["step_s"] for rank in profile["ranks"]), default=0.0)
    table = Table(
        rows=[_profiled_rank(rank, top) for rank in ranks],
        text_columns={0, 2},
        wide_column=2,
        style="width:100%",
    )
    used = {span["part"] for rank in ranks for span in rank["parts"]}
    bars: list[Block] = [table, Rich(legend(STEP_COLORS, used), "")]
    return [
        Rich(element("div", element("b", profile["verdict"])), profile["verdict"]),
        profile["facts"],
        profile["outcome"],
        *(bars if ranks else []),
        _list(map(_advice, profile["advice"])),
        *profile["notes"],
    ]


def _profiled_rank(rank: ProfiledRank, top: float) -> list[str | Rich]:
    name = f"rank {rank['rank']}{' (slowest)' if rank['straggler'] else ''}"
    step_s = rank["step_s"]
    pieces, words, letters = [], [], ""
    shown_s = 0.0
    for span in rank["parts"]:
        part, seconds = span["part"], min(span["seconds"], step_s - shown_s)
        shown_s += seconds
        pieces.append((part, seconds, f"{part} {format_duration(seconds)}"))
        words.append(f"{part} {span['seconds'] / step_s:.0%}" if step_s else f"{part} -")
        num_letters = min(_STEP_BAR_CHARS, round(_STEP_BAR_CHARS * shown_s / top)) if top else 0
        letters += STEP_PART_LETTERS.get(part, "?") * (num_letters - len(letters))
    # The parts are also listed as text, since their colours alone do not tell them apart.
    text = "; ".join(filter(None, (", ".join(words), rank["figures"])))
    bar = html_bar(pieces, STEP_COLORS, top, label=f"{name}: {text}")
    below = element("div", text, style="font-size:12px;margin:0 0 4px")
    text_cell = f"[{letters.ljust(_STEP_BAR_CHARS, '.')}] {text}"
    return [name, format_duration(step_s), Rich(join([bar, below]), text_cell)]


def _advice(advice: AdviceView) -> Rich:
    title, text, command = advice["title"], advice["text"], advice["command"]
    code = [element("code", command)] if command else []
    html = join([element("b", title), f": {text}", lines(code)])
    return Rich(html, "\n  ".join([f"{title}: {text}", *command.splitlines()]))


def _list(items: Iterable[str | Rich]) -> Rich:
    shown = [item if isinstance(item, Rich) else Rich(join([item]), item) for item in items]
    html = element("ul", *(element("li", item.html) for item in shown), style="margin:4px 0")
    return Rich(html if shown else Html(), "\n".join(f"- {item.text}" for item in shown))


# ---------------------------------------------------------------------------- curves


def _curves(curves: Mapping[str, Points], marks: Sequence[EventMarkView]) -> list[Block]:
    shown = sort_curve_names(name for name in curves if len(curves[name]))
    blocks: list[Block] = []
    for index, name in enumerate(shown[:MAX_SPARKLINES]):
        curve = _curve(name, curves[name], marks)
        blocks.append(curve if index < MAX_PICTURES else replace(curve, html=Html()))
    pictures, sparklines = (
        f"and {len(shown) - number} more: nbdist.session().metrics" if len(shown) > number else ""
        for number in (MAX_PICTURES, MAX_SPARKLINES)
    )
    return [*blocks, Rich(lines([pictures]), sparklines)] if blocks else []


def _curve(name: str, points: Points, marks: Sequence[EventMarkView]) -> Rich:
    steps, _, values = downsample(points, _POINTS).T.tolist()
    last, key = f"{values[-1]:.6g} at step {steps[-1]:.0f}", non_finite_legend(values)
    drawing = _svg(steps, values, [mark["step"] for mark in marks])
    picture = base64.b64encode(drawing.encode()).decode()
    image = element(
        "img",
        width=WIDTH,
        height=HEIGHT,
        alt=f"curve of {name}: {last}",
        src=f"data:image/svg+xml;base64,{picture}",
    )
    html = element(
        "div",
        element("div", f"{name}: {last}"),
        image,
        lines([key]),
        style="display:inline-block;margin-right:16px",
    )
    sparks = _sparkline(points[:, 2].tolist())
    return Rich(html, f"{name:<14} {sparks} {last}{f' ({key})' if key else ''}")


def _svg(steps: Sequence[float], values: Sequence[float], marks: Sequence[float]) -> str:
    """Return a curve as SVG, with symbols for non-finite values. Contains no user text."""
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
    """Return the path of a cross for NaN, or of a triangle towards an infinite value."""
    bottom, top = HEIGHT - _BOTTOM - 4, _TOP + 4
    if math.isnan(value):
        return f"M{x - 3:.1f} {bottom - 3}l6 6m0 -6l-6 6"
    if value > 0:
        return f"M{x - 3:.1f} {top + 3}h6l-3 -6z"
    return f"M{x - 3:.1f} {bottom - 3}h6l-3 6z"


def _sparkline(values: list[float]) -> str:
    """Return a curve as one line of block characters, with symbols for non-finite values."""
    stride = max(1, math.ceil(len(values) / _SPARK_CHARS))
    stretches = [values[begin : begin + stride] for begin in range(0, len(values), stride)]
    # A non-finite value is shown even if its stretch has finite ones.
    shown = [next(filter(non_finite_kind, stretch), stretch[0]) for stretch in stretches]
    numbers = [value for value in shown if math.isfinite(value)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
    top = len(_SPARKS) - 1
    return "".join(
        NON_FINITE_SYMBOLS[non_finite_kind(value)]
        if non_finite_kind(value)
        else _SPARKS[round(top * relative_position(low, value, high))]
        for value in shown
    )


# ---------------------------------------------------------------------------- tables


def _ranks(ranks: Sequence[RankView]) -> list[Block]:
    if not ranks:
        return []
    headings = {rank["node"]: f"node {rank['node']}" for rank in ranks}
    table = Table(
        header=["rank", "state", "pid", "device", "at", "last line"],
        rows=_rows_by_node(ranks, headings, _rank),
        text_columns={1, 3, 4, 5},
    )
    texts: list[str] = []
    for node, group in groupby(ranks, key=itemgetter("node")):
        texts += [headings[node]] if node else []
        for rank in group:
            pid = "" if rank["pid"] is None else f", pid {rank['pid']}"
            where = f", {rank['current_line']}" if rank["current_line"] else ""
            line = f": {rank['last_line']}" if rank["last_line"] else ""
            texts.append(f"rank {rank['rank']} ({rank['state']}{pid}{where}){line}")
    summary = element("summary", f"{len(ranks)} ranks")
    return [Rich(element("details", summary, table.html), "\n".join(texts))]


def _rank(rank: RankView) -> list[str | Rich]:
    line = rank["last_line"]
    return [
        str(rank["rank"]),
        rank["state"],
        "-" if rank["pid"] is None else str(rank["pid"]),
        rank["device"],
        rank["current_line"],
        Rich(element("code", line), line) if line else "",
    ]


def _checkpoints(checkpoints: Sequence[CheckpointView], now: float) -> list[Block]:
    if not checkpoints:
        return []
    rows = []
    for checkpoint in reversed(checkpoints[-MAX_ROWS:]):
        state = checkpoint["state"]
        notes = {"failed": f"failed: {checkpoint['error']}", "running": "being written"}
        rows.append(
            [
                checkpoint["name"],
                "-" if checkpoint["step"] is None else str(checkpoint["step"]),
                format_bytes(checkpoint["size_bytes"] if state == "done" else None),
                checkpoint["backend"],
                f"{format_age(now - checkpoint['saved_at'])} ago",
                notes.get(state, ""),
            ]
        )
    header = ["name", "step", "size", "backend", "saved", ""]
    num_hidden = len(checkpoints) - MAX_ROWS
    return [
        Table(header=header, rows=rows, text_columns={0, 3, 4, 5}),
        *([f"and {num_hidden} older: %nbdist checkpoints"] if num_hidden > 0 else []),
    ]


def _marks(marks: Sequence[EventMarkView]) -> list[Block]:
    shown = [f"step {mark['step']}: {mark['kind']}: {mark['text']}" for mark in marks[-MAX_ROWS:]]
    return [_list(shown)] if shown else []
