"""The picture as text: for a terminal, a script, and wherever HTML is not shown."""

from __future__ import annotations

import math
import time
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from nbdist.display import panel_profile_html, panel_units
from nbdist.display.profile_units import time as time_of
from nbdist.output.ansi import clean, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.panel.curves import Points
    from nbdist.panel.protocol import (
        CheckpointView,
        DeviceView,
        NodeView,
        Picture,
        ProfiledRank,
        ProfileView,
        RankView,
        StrategyRow,
    )

_BAR = 24
_WIDE_BAR = 40
LETTERS = {
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
"""Part of a step -> what it is drawn with; the words beside the bar are in the same order."""
_SPARKS = (
    "\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}"
    "\N{LOWER HALF BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}"
    "\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
_SPARK_WIDTH = 40
_MOST = 12
"""Curves, checkpoints and marks that are listed."""


def page(picture: Picture, curves: Mapping[str, Points]) -> str:
    """The whole page, without a newline at its end."""
    return "\n".join(plain(clean(line)).rstrip() for line in _lines(picture, curves))


def _lines(picture: Picture, curves: Mapping[str, Points]) -> Iterator[str]:
    now = time.time()
    yield from _head(picture, now)
    yield from _memory(picture)
    rows = picture["strategies"]["rows"]
    if rows:
        yield "strategies, bytes of one device (* runs, > recommended; %nbdist switch changes):"
        yield from map(_strategy, rows)
    if picture["strategies"]["note"]:
        yield f"  {picture['strategies']['note']}"
    yield from of_profile(picture["profile"])
    shown = panel_units.in_order(name for name in curves if len(curves[name][0]))
    for name in shown[:_MOST]:
        steps, _, values = curves[name]
        key = panel_units.key_of_odd(values)
        last = f"{values[-1]:.6g} at step {steps[-1]:.0f}{f' ({key})' if key else ''}"
        yield f"  {name:<14} {_spark(list(values))} {last}"
    if len(shown) > _MOST:
        yield f"  and {len(shown) - _MOST} more: nbdist.session().metrics"
    for name, ranks in groupby(picture["ranks"], key=itemgetter("node")):
        if name:
            yield f"ranks of node {name}:"
        yield from map(_rank, ranks)
    for one in picture["checkpoints"][-_MOST:]:
        yield _checkpoint(one, now)
    for mark in picture["marks"][-_MOST:]:
        yield f"  at step {mark['step']}: {mark['kind']}: {mark['text']}"


def _head(picture: Picture, now: float) -> Iterator[str]:
    head = picture["header"]
    strategy = [head["backend"], panel_units.precision(head["precision"])]
    strategy += [f"offload {head['offload']}"] if head["offload"] != "none" else []
    strategy += [head["options"]] if head["options"] else []
    since = "" if head["since"] is None else f" since {panel_units.clock(now - head['since'])}"
    age = (
        ""
        if head["started"] is None
        else f"; session {panel_units.clock(now - head['started'])} old"
    )
    yield f"{', '.join(strategy)} on {head['place']}"
    yield f"{head['words']}{since}{age}"
    yield panel_units.as_of(now, head["version"])
    if (progress := picture["progress"]) is not None:
        share = "" if progress["share"] is None else f", {panel_units.share(progress['share'])}"
        yield f"{progress['text']}{share}"
    for waiting in picture["queue"]:
        yield f"waits: {waiting['text']}"
    if (notice := picture["notice"]) is not None:
        yield from f"{notice['kind']}: {notice['text']}".splitlines()


def _node(node: NodeView) -> str:
    return f"node {node['name']}: {node['words']}, {panel_units.host_memory(node)}"


def _memory(picture: Picture) -> Iterator[str]:
    """The devices, below their nodes where there are some."""
    headings = {node["name"]: _node(node) for node in picture["nodes"]}
    for name, devices in groupby(picture["devices"], key=itemgetter("node")):
        if name:
            yield headings[name]
        notes = []
        for device in devices:
            yield _device(device)
            notes += [f"    {device['name']}: {note}" for note in panel_units.notes(device)]
        yield from notes


def _device(device: DeviceView) -> str:
    capacity = device["capacity_bytes"] or 0
    used, peak = device["used_bytes"] or 0, device["peak_bytes"] or 0
    bar = _bar(used, max(capacity, peak, device["predicted_bytes"] or 0))
    predicted = (
        ""
        if device["predicted_bytes"] is None
        else f", predicted {panel_units.size(device['predicted_bytes'])}"
    )
    doing = panel_units.doing(device)
    others = (
        f", others {panel_units.size(device['others_bytes'])}" if device["others_bytes"] else ""
    )
    return (
        f"  {device['name']:<22} {bar} {panel_units.size(device['used_bytes'])} of"
        f" {panel_units.size(device['capacity_bytes'])}, peak"
        f" {panel_units.size(device['peak_bytes'])}"
        f"{predicted}{others}{', ' if doing else ''}{doing}"
    )


def _rank(rank: RankView) -> str:
    at = f", {rank['where']}" if rank["where"] else ""
    line = f": {rank['line']}" if rank["line"] else ""
    pid = "" if rank["pid"] is None else f", pid {rank['pid']}"
    return f"  rank {rank['rank']} ({rank['state']}{pid}{at}){line}"


def _checkpoint(one: CheckpointView, now: float) -> str:
    state = {"done": "", "running": ", being written", "failed": f", failed: {one['problem']}"}
    size = f", {panel_units.size(one['size_bytes'])}" if one["state"] == "done" else ""
    step = "" if one["step"] is None else f", step {one['step']}"
    age = panel_units.age(now - one["saved"])
    return f"  checkpoint {one['name']}{step}{size}, {age} ago{state[one['state']]}"


def _strategy(row: StrategyRow) -> str:
    mark = ("*" if row["current"] else " ") + (">" if row["recommended"] else " ")
    why = panel_units.why(row["why"], fits=row["fits"])
    bar = _bar(row["device_bytes"], row["capacity_bytes"])
    size = panel_units.size(row["device_bytes"])
    speed = f"{panel_units.speed(row['tokens_per_s']):>6} tokens/s"
    return f"{mark} {row['words']:<44} {bar} {size:>9} {speed}  {why}"


def of_profile(profile: ProfileView) -> Iterator[str]:
    """The lines of the profile; none before the first."""
    if not profile["verdict"]:
        return
    yield f"profile: {profile['verdict']}"
    yield from (f"  {profile[key]}" for key in ("facts", "gained") if profile[key])
    top = max((one["step_s"] for one in profile["ranks"]), default=0.0)
    for one in profile["ranks"]:
        slowest = " (slowest)" if one["straggler"] else ""
        more = f"; {one['figures']}" if one["figures"] else ""
        yield (
            f"  rank {one['rank']}{slowest:<10} [{_stacked(one, top)}] {time_of(one['step_s'])}:"
            f" {panel_profile_html.in_words(one)}{more}"
        )
    for number, advice in enumerate(profile["advice"], 1):
        yield f"  {number}. {advice['title']}: {advice['text']}"
        yield from (f"     {line}" for line in advice["command"].splitlines())
    yield from (f"  {note}" for note in profile["notes"])


def _stacked(one: ProfiledRank, top: float) -> str:
    """A bar of its parts' letters."""
    drawn, seconds = "", 0.0
    for span in one["parts"]:
        seconds += span["seconds"]
        filled = min(_WIDE_BAR, round(_WIDE_BAR * seconds / top)) if top else 0
        drawn += LETTERS.get(span["part"], "?") * (filled - len(drawn))
    return drawn.ljust(_WIDE_BAR, ".")


def _bar(part: float, whole: float) -> str:
    filled = min(_BAR, round(_BAR * part / whole)) if whole else 0
    return "#" * filled + "." * (_BAR - filled)


def _spark(values: list[float]) -> str:
    """The values as a line of blocks, with a sign for what is no number."""
    stride = max(1, math.ceil(len(values) / _SPARK_WIDTH))
    stretches = [values[begin : begin + stride] for begin in range(0, len(values), stride)]
    # What is no number is not to be missed because it lies between two that are shown.
    shown = [next(filter(panel_units.odd, one), one[0]) for one in stretches]
    numbers = [value for value in shown if math.isfinite(value)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
    top = len(_SPARKS) - 1
    return "".join(
        panel_units.ODD[panel_units.odd(value)]
        if panel_units.odd(value)
        else _SPARKS[round(top * panel_units.between(low, value, high))]
        for value in shown
    )
