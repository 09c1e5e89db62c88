"""The profile as static HTML: verdict, one bar per rank, advice.

Front ends strip background patterns from untrusted notebooks, so the parts of each bar are also
listed as text below it.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.display import panel_units
from nbdist.display.profile import COLORS
from nbdist.display.profile_units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.panel.protocol import AdviceView, ProfiledRank, ProfileView

_COLORS: Mapping[str, str] = {str(part): color for part, color in COLORS.items()}
"""Accepts any name, also unknown parts."""
_TRACK = (
    "width:100%;min-width:140px;height:14px;border-radius:2px;"
    "background:rgba(124,134,148,.22);overflow:hidden"
)
_MUTED = "font-size:12px;margin:0 0 4px"
_CELL = "padding:2px 8px 2px 0;text-align:left;vertical-align:top;white-space:nowrap"
_WIDE = "padding:2px 8px 2px 0;text-align:left;width:100%"


def render_profile(profile: ProfileView) -> str:
    """Return the HTML below the section title; empty before the first profile."""
    if not profile["verdict"]:
        return ""
    top = max((rank["step_s"] for rank in profile["ranks"]), default=0.0)
    rows = "".join(_rank(rank, top) for rank in profile["ranks"])
    lines = [f"<div><b>{escape(profile['verdict'])}</b></div>"]
    lines += [f"<div>{escape(profile[key])}</div>" for key in ("facts", "gained") if profile[key]]
    if rows:
        style = "border-collapse:collapse;margin:2px 0;font-size:inherit;width:100%"
        lines.append(f"<table style='{style}'>{rows}</table>{_key(profile)}")
    if profile["advice"]:
        lines.append(f"<ul style='margin:4px 0'>{''.join(map(_advice, profile['advice']))}</ul>")
    lines += [f"<div>{escape(note)}</div>" for note in profile["notes"]]
    return "".join(lines)


def _rank(rank: ProfiledRank, top: float) -> str:
    name = f"rank {rank['rank']}{' (slowest)' if rank['straggler'] else ''}"
    pieces = "".join(
        f"<div title='{escape(f'{part} {format_duration(seconds)}')}' style='float:left;"
        f"height:100%;width:{100 * seconds / top if top else 0:.2f}%;"
        f"background:{_COLORS.get(part, COLORS['idle'])}'></div>"
        for part, seconds in _spans(rank)
    )
    description = "; ".join(filter(None, (step_parts_text(rank), rank["figures"])))
    label = escape(f"{name}: {description}")
    bar = f"<div role='img' aria-label='{label}' style='{_TRACK}'>{pieces}</div>"
    return (
        f"<tr><td style='{_CELL}'>{name}</td>"
        f"<td style='{_WIDE}'>{bar}<div style='{_MUTED}'>{escape(description)}</div></td>"
        f"<td style='{_CELL}'>{format_duration(rank['step_s'])}</td></tr>"
    )


def _spans(rank: ProfiledRank) -> Iterator[tuple[str, float]]:
    """The parts of a rank's step, limited to the length of the step."""
    remaining = rank["step_s"]
    for span in rank["parts"]:
        seconds = min(span["seconds"], remaining)
        remaining -= seconds
        yield span["part"], seconds


def step_parts_text(rank: ProfiledRank) -> str:
    """Return the parts of a bar as text: "forward 18 %, backward 31 %"."""
    step = rank["step_s"]
    return ", ".join(
        f"{span['part']} {panel_units.format_percent(span['seconds'] / step if step else None)}"
        for span in rank["parts"]
    )


def _key(profile: ProfileView) -> str:
    """Legend of the colours."""
    used = {span["part"] for rank in profile["ranks"] for span in rank["parts"]}
    items = "".join(
        f"<span style='white-space:nowrap;margin-right:12px'><span style='display:inline-block;"
        f"width:10px;height:10px;background:{color}'></span> {part}</span> "
        for part, color in COLORS.items()
        if part in used
    )
    return f"<div>{items}</div>"


def _advice(advice: AdviceView) -> str:
    line = f"<div><code>{escape(advice['command'])}</code></div>" if advice["command"] else ""
    return f"<li><b>{escape(advice['title'])}</b>: {escape(advice['text'])}{line}</li>"
