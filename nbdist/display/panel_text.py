"""The panel as plain text, for terminals, scripts and front ends without HTML."""

from __future__ import annotations

import math
import time
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from nbdist.display.elements import text_bar
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.panel.curves import Points
    from nbdist.panel.protocol import (
        CheckpointView,
        DeviceView,
        NodeView,
        PanelState,
        ProfiledRank,
        ProfileView,
        RankView,
        StrategyRow,
    )

_BAR = 24
_WIDE_BAR = 40
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
"""Part of a step -> its letter in the bar. The description beside the bar uses the same order."""
_SPARKS = (
    "\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}"
    "\N{LOWER HALF BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}"
    "\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
_SPARK_WIDTH = 40
_MAX_ROWS = 12
"""Maximum number of curves, checkpoints and marks."""


def render_page(state: PanelState, curves: Mapping[str, Points]) -> str:
    """Return the whole page, without a trailing newline."""
    return "\n".join(
        strip_ansi(replace_invalid_chars(line)).rstrip() for line in _lines(state, curves)
    )


def _lines(state: PanelState, curves: Mapping[str, Points]) -> Iterator[str]:
    now = time.time()
    yield from header_lines(state, now)
    headings = {node["name"]: node_text(node) for node in state["nodes"]}
    for name, devices in groupby(state["devices"], key=itemgetter("node")):
        if name:
            yield f"node {headings[name]}"
        notes = []
        for device in devices:
            yield _device(device)
            notes += [f"    {device['name']}: {note}" for note in device_notes(device)]
        yield from notes
    rows = state["strategies"]["rows"]
    if rows:
        yield "strategies, memory per device (* current, > recommended; to change: %nbdist switch):"
        yield from map(_strategy, rows)
    if state["strategies"]["note"]:
        yield f"  {state['strategies']['note']}"
    yield from render_profile(state["profile"])
    yield from _curves(curves)
    for name, ranks in groupby(state["ranks"], key=itemgetter("node")):
        if name:
            yield f"ranks of node {name}:"
        yield from map(_rank, ranks)
    for checkpoint in state["checkpoints"][-_MAX_ROWS:]:
        yield _checkpoint(checkpoint, now)
    for mark in state["marks"][-_MAX_ROWS:]:
        yield f"  at step {mark['step']}: {mark['kind']}: {mark['text']}"


def _curves(curves: Mapping[str, Points]) -> Iterator[str]:
    shown = sort_curve_names(name for name in curves if len(curves[name]))
    for name in shown[:_MAX_ROWS]:
        steps, _, values = curves[name].T.tolist()
        key = non_finite_legend(values)
        last = f"{values[-1]:.6g} at step {steps[-1]:.0f}{f' ({key})' if key else ''}"
        yield f"  {name:<14} {_sparkline(values)} {last}"
    if len(shown) > _MAX_ROWS:
        yield f"  and {len(shown) - _MAX_ROWS} more: nbdist.session().metrics"


def _device(device: DeviceView) -> str:
    capacity, predicted = device["capacity_bytes"], device["predicted_bytes"]
    used, peak = device["used_bytes"], device["peak_bytes"]
    bar = text_bar(used or 0, max(capacity or 0, peak or 0, predicted or 0), _BAR)
    parts = [
        f"{bar} {format_bytes(used)} of {format_bytes(capacity)}",
        f"peak {format_bytes(peak)}",
    ]
    if predicted is not None:
        parts.append(f"predicted {format_bytes(predicted)}")
    if device["others_bytes"]:
        parts.append(f"others {format_bytes(device['others_bytes'])}")
    parts += device_readings(device)
    return f"  {device['name']:<22} {', '.join(parts)}"


def _rank(rank: RankView) -> str:
    at = f", {rank['where']}" if rank["where"] else ""
    line = f": {rank['line']}" if rank["line"] else ""
    pid = "" if rank["pid"] is None else f", pid {rank['pid']}"
    return f"  rank {rank['rank']} ({rank['state']}{pid}{at}){line}"


def _checkpoint(checkpoint: CheckpointView, now: float) -> str:
    is_done, note = checkpoint["state"] == "done", checkpoint_note(checkpoint)
    parts = [
        f"  checkpoint {checkpoint['name']}",
        "" if checkpoint["step"] is None else f"step {checkpoint['step']}",
        format_bytes(checkpoint["size_bytes"]) if is_done else "",
        f"{format_age(now - checkpoint['saved'])} ago",
        note,
    ]
    return ", ".join(filter(None, parts))


def _strategy(row: StrategyRow) -> str:
    mark = ("*" if row["current"] else " ") + (">" if row["recommended"] else " ")
    bar = text_bar(row["device_bytes"], row["capacity_bytes"], _BAR)
    size = format_bytes(row["device_bytes"])
    speed = f"{format_tokens_per_s(row['tokens_per_s']):>6} tokens/s"
    return f"{mark} {row['words']:<44} {bar} {size:>9} {speed}  {strategy_reason(row)}"


def render_profile(profile: ProfileView) -> Iterator[str]:
    """Yield the lines of the profile; none before the first profile."""
    if not profile["verdict"]:
        return
    yield f"profile: {profile['verdict']}"
    yield from (f"  {line}" for line in (profile["facts"], profile["gained"]) if line)
    top = max((rank["step_s"] for rank in profile["ranks"]), default=0.0)
    for rank in profile["ranks"]:
        slowest = " (slowest)" if rank["straggler"] else ""
        figures = f"; {rank['figures']}" if rank["figures"] else ""
        yield (
            f"  rank {rank['rank']}{slowest:<10} [{_letter_bar(rank, top)}]"
            f" {format_duration(rank['step_s'])}: {step_parts_text(rank)}{figures}"
        )
    for number, advice in enumerate(profile["advice"], 1):
        yield f"  {number}. {advice['title']}: {advice['text']}"
        yield from (f"     {line}" for line in advice["command"].splitlines())
    yield from (f"  {note}" for note in profile["notes"])


def _letter_bar(rank: ProfiledRank, top: float) -> str:
    """A bar of the letters of a rank's step parts."""
    drawn, seconds = "", 0.0
    for span in rank["parts"]:
        seconds += span["seconds"]
        filled = min(_WIDE_BAR, round(_WIDE_BAR * seconds / top)) if top else 0
        drawn += STEP_PART_LETTERS.get(span["part"], "?") * (filled - len(drawn))
    return drawn.ljust(_WIDE_BAR, ".")


def _sparkline(values: list[float]) -> str:
    """A curve as one line of block characters, with symbols for non-finite values."""
    stride = max(1, math.ceil(len(values) / _SPARK_WIDTH))
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


# ---------------------------------------------------------------------------- shared with HTML


def header_lines(state: PanelState, now: float) -> list[str]:
    """Return the strategy, the state, the age of the page, and what is going on."""
    head, progress, notice = state["header"], state["progress"], state["notice"]
    strategy = [head["backend"], precision_label(head["precision"])]
    strategy += [f"offload {head['offload']}"] if head["offload"] != "none" else []
    strategy += [head["options"]] if head["options"] else []
    words = head["words"]
    if head["since"] is not None:
        words += f" since {format_clock(now - head['since'])}"
    if head["started"] is not None:
        words += f"; session {format_clock(now - head['started'])} old"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    shown = [f"{', '.join(strategy)} on {head['place']}", words]
    shown += [f"as of {stamp}; nbdist {head['version']}"]
    if progress is not None:
        share = "" if progress["share"] is None else f", {progress['share']:.0%}"
        shown.append(f"{progress['text']}{share}")
    shown += [f"queued: {waiting['text']}" for waiting in state["queue"]]
    if notice is not None:
        shown += f"{notice['kind']}: {notice['text']}".splitlines()
    return shown


def node_text(node: NodeView) -> str:
    """Return the name, devices and host memory of a node."""
    used, total = format_bytes(node["host_used_bytes"]), format_bytes(node["host_bytes"])
    return f"{node['name']}: {node['words']}, host memory {used} of {total}"


def device_readings(device: DeviceView) -> list[str]:
    """Return utilization, power, temperature and traffic of a device, as far as they are known."""
    parts = []
    if device["utilization"] is not None:
        parts.append(f"{device['utilization']:.0%} busy")
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
    return parts


def device_notes(device: DeviceView) -> list[str]:
    """Return the notes on a device, and the processes of others that hold its memory."""
    notes = [device["note"]] if device["note"] else []
    if device["holders"]:
        holders = ", ".join(device["holders"])
        notes.append(f"{format_bytes(device['others_bytes'])} are held by {holders}")
    return notes


def strategy_reason(row: StrategyRow) -> str:
    """Return the reason of a plan row, marked if the row does not fit."""
    is_complete = row["fits"] or row["why"].startswith("does not fit")
    return row["why"] if is_complete else f"does not fit; {row['why']}"


def step_parts_text(rank: ProfiledRank) -> str:
    """Return the parts of a step: "forward 18%, backward 31%"."""
    step_s = rank["step_s"]
    parts = []
    for span in rank["parts"]:
        share = f"{span['seconds'] / step_s:.0%}" if step_s else "-"
        parts.append(f"{span['part']} {share}")
    return ", ".join(parts)


def checkpoint_note(checkpoint: CheckpointView) -> str:
    """Return why a checkpoint is not complete; empty if it is."""
    if checkpoint["state"] == "failed":
        return f"failed: {checkpoint['problem']}"
    return "being written" if checkpoint["state"] == "running" else ""
