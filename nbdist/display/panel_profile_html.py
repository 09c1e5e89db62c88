"""The profile as HTML without script: the verdict, a bar for each rank, the advice.

Front ends keep no patterns of notebooks that are not trusted, so each bar has its parts in words
below it.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.display import panel_units
from nbdist.display.profile import COLORS
from nbdist.display.profile_units import time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.panel.protocol import AdviceView, ProfiledRank, ProfileView

_COLORS: Mapping[str, str] = {str(part): color for part, color in COLORS.items()}
"""For any name, also one that is no part."""
_TRACK = (
    "width:100%;min-width:140px;height:14px;border-radius:2px;"
    "background:rgba(124,134,148,.22);overflow:hidden"
)
_MUTED = "font-size:12px;margin:0 0 4px"
_CELL = "padding:2px 8px 2px 0;text-align:left;vertical-align:top;white-space:nowrap"
_WIDE = "padding:2px 8px 2px 0;text-align:left;width:100%"


def body(profile: ProfileView) -> str:
    """What stands under the title; empty before the first profile."""
    if not profile["verdict"]:
        return ""
    top = max((one["step_s"] for one in profile["ranks"]), default=0.0)
    rows = "".join(_rank(one, top) for one in profile["ranks"])
    lines = [f"<div><b>{escape(profile['verdict'])}</b></div>"]
    lines += [f"<div>{escape(profile[key])}</div>" for key in ("facts", "gained") if profile[key]]
    if rows:
        style = "border-collapse:collapse;margin:2px 0;font-size:inherit;width:100%"
        lines.append(f"<table style='{style}'>{rows}</table>{_key(profile)}")
    if profile["advice"]:
        lines.append(f"<ul style='margin:4px 0'>{''.join(map(_advice, profile['advice']))}</ul>")
    lines += [f"<div>{escape(note)}</div>" for note in profile["notes"]]
    return "".join(lines)


def _rank(one: ProfiledRank, top: float) -> str:
    name = f"rank {one['rank']}{' (slowest)' if one['straggler'] else ''}"
    pieces = "".join(
        f"<div title='{escape(f'{part} {time(seconds)}')}' style='float:left;height:100%;"
        f"width:{100 * seconds / top if top else 0:.2f}%;"
        f"background:{_COLORS.get(part, COLORS['idle'])}'></div>"
        for part, seconds in _spans(one)
    )
    told = "; ".join(filter(None, (in_words(one), one["figures"])))
    label = escape(f"{name}: {told}")
    bar = f"<div role='img' aria-label='{label}' style='{_TRACK}'>{pieces}</div>"
    return (
        f"<tr><td style='{_CELL}'>{name}</td>"
        f"<td style='{_WIDE}'>{bar}<div style='{_MUTED}'>{escape(told)}</div></td>"
        f"<td style='{_CELL}'>{time(one['step_s'])}</td></tr>"
    )


def _spans(one: ProfiledRank) -> Iterator[tuple[str, float]]:
    """Its parts, none of them wider than what is left of the step."""
    left = one["step_s"]
    for span in one["parts"]:
        seconds = min(span["seconds"], left)
        left -= seconds
        yield span["part"], seconds


def in_words(one: ProfiledRank) -> str:
    """The bar in words: "forward 18 %, backward 31 %"."""
    step = one["step_s"]
    return ", ".join(
        f"{span['part']} {panel_units.share(span['seconds'] / step if step else None)}"
        for span in one["parts"]
    )


def _key(profile: ProfileView) -> str:
    """What the colours stand for."""
    used = {span["part"] for one in profile["ranks"] for span in one["parts"]}
    items = "".join(
        f"<span style='white-space:nowrap;margin-right:12px'><span style='display:inline-block;"
        f"width:10px;height:10px;background:{color}'></span> {part}</span> "
        for part, color in COLORS.items()
        if part in used
    )
    return f"<div>{items}</div>"


def _advice(one: AdviceView) -> str:
    line = f"<div><code>{escape(one['command'])}</code></div>" if one["command"] else ""
    return f"<li><b>{escape(one['title'])}</b>: {escape(one['text'])}{line}</li>"
