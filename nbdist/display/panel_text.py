"""The panel as plain text, for terminals, scripts and front ends without HTML."""

from __future__ import annotations

import math
import time
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from nbdist.display import panel_profile_html, panel_units
from nbdist.display.profile_units import format_duration as time_of
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
    yield from _head(state, now)
    yield from _memory(state)
    rows = state["strategies"]["rows"]
    if rows:
        yield "strategies, memory per device (* current, > recommended; to change: %nbdist switch):"
        yield from map(_strategy, rows)
    if state["strategies"]["note"]:
        yield f"  {state['strategies']['note']}"
    yield from render_profile(state["profile"])
    shown = panel_units.sort_curve_names(name for name in curves if len(curves[name]))
    for name in shown[:_MAX_ROWS]:
        steps, _, values = curves[name].T.tolist()
        key = panel_units.non_finite_legend(values)
        last = f"{values[-1]:.6g} at step {steps[-1]:.0f}{f' ({key})' if key else ''}"
        yield f"  {name:<14} {_spark(values)} {last}"
    if len(shown) > _MAX_ROWS:
        yield f"  and {len(shown) - _MAX_ROWS} more: nbdist.session().metrics"
    for name, ranks in groupby(state["ranks"], key=itemgetter("node")):
        if name:
            yield f"ranks of node {name}:"
        yield from map(_rank, ranks)
    for checkpoint in state["checkpoints"][-_MAX_ROWS:]:
        yield _checkpoint(checkpoint, now)
    for mark in state["marks"][-_MAX_ROWS:]:
        yield f"  at step {mark['step']}: {mark['kind']}: {mark['text']}"


def _head(state: PanelState, now: float) -> Iterator[str]:
    head = state["header"]
    strategy = [head["backend"], panel_units.precision_label(head["precision"])]
    strategy += [f"offload {head['offload']}"] if head["offload"] != "none" else []
    strategy += [head["options"]] if head["options"] else []
    since = (
        "" if head["since"] is None else f" since {panel_units.format_clock(now - head['since'])}"
    )
    age = (
        ""
        if head["started"] is None
        else f"; session {panel_units.format_clock(now - head['started'])} old"
    )
    yield f"{', '.join(strategy)} on {head['place']}"
    yield f"{head['words']}{since}{age}"
    yield panel_units.snapshot_note(now, head["version"])
    if (progress := state["progress"]) is not None:
        share = (
            ""
            if progress["share"] is None
            else f", {panel_units.format_percent(progress['share'])}"
        )
        yield f"{progress['text']}{share}"
    for waiting in state["queue"]:
        yield f"queued: {waiting['text']}"
    if (notice := state["notice"]) is not None:
        yield from f"{notice['kind']}: {notice['text']}".splitlines()


def _node(node: NodeView) -> str:
    return f"node {node['name']}: {node['words']}, {panel_units.host_memory_text(node)}"


def _memory(state: PanelState) -> Iterator[str]:
    """Lines of the devices, below a heading for each node."""
    headings = {node["name"]: _node(node) for node in state["nodes"]}
    for name, devices in groupby(state["devices"], key=itemgetter("node")):
        if name:
            yield headings[name]
        notes = []
        for device in devices:
            yield _device(device)
            notes += [f"    {device['name']}: {note}" for note in panel_units.device_notes(device)]
        yield from notes


def _device(device: DeviceView) -> str:
    capacity = device["capacity_bytes"] or 0
    used, peak = device["used_bytes"] or 0, device["peak_bytes"] or 0
    bar = _bar(used, max(capacity, peak, device["predicted_bytes"] or 0))
    predicted = (
        ""
        if device["predicted_bytes"] is None
        else f", predicted {panel_units.format_bytes(device['predicted_bytes'])}"
    )
    activity = panel_units.device_activity_text(device)
    others = (
        f", others {panel_units.format_bytes(device['others_bytes'])}"
        if device["others_bytes"]
        else ""
    )
    return (
        f"  {device['name']:<22} {bar} {panel_units.format_bytes(device['used_bytes'])} of"
        f" {panel_units.format_bytes(device['capacity_bytes'])}, peak"
        f" {panel_units.format_bytes(device['peak_bytes'])}"
        f"{predicted}{others}{', ' if activity else ''}{activity}"
    )


def _rank(rank: RankView) -> str:
    at = f", {rank['where']}" if rank["where"] else ""
    line = f": {rank['line']}" if rank["line"] else ""
    pid = "" if rank["pid"] is None else f", pid {rank['pid']}"
    return f"  rank {rank['rank']} ({rank['state']}{pid}{at}){line}"


def _checkpoint(checkpoint: CheckpointView, now: float) -> str:
    state = {
        "done": "",
        "running": ", being written",
        "failed": f", failed: {checkpoint['problem']}",
    }
    size = (
        f", {panel_units.format_bytes(checkpoint['size_bytes'])}"
        if checkpoint["state"] == "done"
        else ""
    )
    step = "" if checkpoint["step"] is None else f", step {checkpoint['step']}"
    age = panel_units.format_age(now - checkpoint["saved"])
    return f"  checkpoint {checkpoint['name']}{step}{size}, {age} ago{state[checkpoint['state']]}"


def _strategy(row: StrategyRow) -> str:
    mark = ("*" if row["current"] else " ") + (">" if row["recommended"] else " ")
    reason = panel_units.plan_reason_text(row["why"], fits=row["fits"])
    bar = _bar(row["device_bytes"], row["capacity_bytes"])
    size = panel_units.format_bytes(row["device_bytes"])
    speed = f"{panel_units.format_tokens_per_s(row['tokens_per_s']):>6} tokens/s"
    return f"{mark} {row['words']:<44} {bar} {size:>9} {speed}  {reason}"


def render_profile(profile: ProfileView) -> Iterator[str]:
    """Yield the lines of the profile; none before the first profile."""
    if not profile["verdict"]:
        return
    yield f"profile: {profile['verdict']}"
    yield from (f"  {profile[key]}" for key in ("facts", "gained") if profile[key])
    top = max((rank["step_s"] for rank in profile["ranks"]), default=0.0)
    for rank in profile["ranks"]:
        slowest = " (slowest)" if rank["straggler"] else ""
        more = f"; {rank['figures']}" if rank["figures"] else ""
        yield (
            f"  rank {rank['rank']}{slowest:<10} [{_stacked(rank, top)}] {time_of(rank['step_s'])}:"
            f" {panel_profile_html.step_parts_text(rank)}{more}"
        )
    for number, advice in enumerate(profile["advice"], 1):
        yield f"  {number}. {advice['title']}: {advice['text']}"
        yield from (f"     {line}" for line in advice["command"].splitlines())
    yield from (f"  {note}" for note in profile["notes"])


def _stacked(rank: ProfiledRank, top: float) -> str:
    """A bar of the letters of a rank's step parts."""
    drawn, seconds = "", 0.0
    for span in rank["parts"]:
        seconds += span["seconds"]
        filled = min(_WIDE_BAR, round(_WIDE_BAR * seconds / top)) if top else 0
        drawn += STEP_PART_LETTERS.get(span["part"], "?") * (filled - len(drawn))
    return drawn.ljust(_WIDE_BAR, ".")


def _bar(part: float, whole: float) -> str:
    filled = min(_BAR, round(_BAR * part / whole)) if whole else 0
    return "#" * filled + "." * (_BAR - filled)


def _spark(values: list[float]) -> str:
    """A curve as one line of block characters, with symbols for non-finite values."""
    stride = max(1, math.ceil(len(values) / _SPARK_WIDTH))
    stretches = [values[begin : begin + stride] for begin in range(0, len(values), stride)]
    # A non-finite value is shown even if its stretch has finite ones.
    shown = [
        next(filter(panel_units.non_finite_kind, stretch), stretch[0]) for stretch in stretches
    ]
    numbers = [value for value in shown if math.isfinite(value)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
    top = len(_SPARKS) - 1
    return "".join(
        panel_units.NON_FINITE_SYMBOLS[panel_units.non_finite_kind(value)]
        if panel_units.non_finite_kind(value)
        else _SPARKS[round(top * panel_units.relative_position(low, value, high))]
        for value in shown
    )
