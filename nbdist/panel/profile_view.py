"""The latest profile as the panel shows it; pure but for `Profiled`, which looks at a session.

A profile compares, judges and advises when it is first asked to, so its view is made once.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.display import panel_units, profile_tables
from nbdist.display.profile_units import percent, time
from nbdist.output.ansi import clean
from nbdist.panel import plan_view
from nbdist.panel.commands import ARGUMENTS
from nbdist.panel.protocol import AdviceView, ProfiledRank, ProfileView, Span
from nbdist.profiler.measurements import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.profiler.advice import Advice
    from nbdist.profiler.measurements import RankFigures
    from nbdist.profiler.report import Profile
    from nbdist.session.session import Session
    from nbdist.strategies import Options

log = logging.getLogger(__name__)

MAX_TRAFFIC = 3
"""Kinds of collectives that are told of a rank."""
MAX_CHARS = 1000
NOTHING = ProfileView(
    verdict="", facts="", gained="", ranks=[], advice=[], notes=[], time=None, refused=""
)


class Profiled:
    """What a panel knows of its session's profiles."""

    def __init__(self) -> None:
        """Know of none."""
        self._seen: tuple[Profile, Options] | None = None
        self._view = NOTHING

    def now(self, session: Session) -> ProfileView:
        """The latest profile, and whether another one can be asked for."""
        profiles = session.profiles
        if not profiles:
            self._seen, self._view = None, NOTHING
        elif self._seen is None or not self._holds(profiles[-1], session.options):
            self._seen = profiles[-1], session.options
            try:
                self._view = of_profile(*self._seen)
            except Exception as error:  # figures that nobody has met: the panel goes on
                log.exception("the profile could not be read")
                why = f"the profile could not be read ({type(error).__name__}: {error})."
                self._view = ProfileView(**{**NOTHING, "verdict": why})
        return ProfileView(**{**self._view, "refused": session.why_no_profile()})

    def _holds(self, profile: Profile, options: Options) -> bool:
        return self._seen is not None and self._seen[0] is profile and self._seen[1] == options


def of_profile(profile: Profile, options: Options) -> ProfileView:
    """Take over what a profile says.

    Args:
        profile: of any session.
        options: that the session has now; what they are already is not offered.
    """
    return ProfileView(
        verdict=_text(profile.verdict),
        facts=_text(", ".join(_facts(profile))),
        gained=_text(profile.gained),
        ranks=[
            ProfiledRank(
                rank=int(one.rank),
                step_s=_finite(one.step_s),
                parts=_parts(one.parts),
                straggler=one.rank == profile.straggler,
                figures=_text("; ".join(_figures(one))),
            )
            for one in profile_tables.shown(profile)
        ],
        advice=[_advice(one, options) for one in profile.advice],
        notes=[_text(note) for note in (*profile.notes, *_left_out(profile))],
        time=max((one.ends[-1] for one in profile.ranks if one.ends), default=None),
        refused="",
    )


def _text(said: str) -> str:
    return panel_units.cut(clean(said), MAX_CHARS)


def _finite(number: float) -> float:
    """A time that JSON has, and a bar."""
    return number if math.isfinite(number) and number > 0 else 0.0


def _left_out(profile: Profile) -> list[str]:
    """Ranks without a bar."""
    more = len(profile.ranks) - len(profile_tables.shown(profile))
    return [f"and {more} more ranks: nbdist.session().profiles[-1].ranks"] if more else []


def _parts(parts: Mapping[Any, float]) -> list[Span]:
    """The parts that there are, in the order of a bar."""
    return [
        Span(part=part, seconds=_finite(parts[part]))
        for part in PARTS
        if _finite(parts.get(part, 0.0))
    ]


def _facts(profile: Profile) -> Iterator[str]:
    """Of all ranks together."""
    number = profile.num_steps
    yield f"{number} step{'s' * (number != 1)} of {time(profile.step_s)}"
    yield f"p50 {time(profile.p50_s)}"
    yield f"p90 {time(profile.p90_s)}"
    if profile.tokens_per_s > 0:
        unit = "tokens" if profile.model is not None and profile.model.seq_len > 1 else "samples"
        yield f"{panel_units.speed(profile.tokens_per_s)} {unit}/s"
    if profile.mfu is not None and profile.peak_flops:
        yield f"MFU {percent(profile.mfu)} of {profile.peak_flops / 1e12:.0f} TFLOP/s"


def _figures(one: RankFigures) -> Iterator[str]:
    """Of one rank, what its bar does not show."""
    steps = sorted(one.steps)
    if steps:
        yield f"p90 {time(steps[math.ceil(0.9 * len(steps)) - 1])}"
    for kind in sorted(one.traffic, key=lambda kind: -kind.seconds)[:MAX_TRAFFIC]:
        speed = f", {kind.bandwidth / 1e9:.1f} GB/s" if kind.bandwidth > 0 else ""
        yield f"{kind.name} {panel_units.size(kind.bytes)} in {time(kind.seconds)}{speed}"
    if one.hidden_s > 0:
        yield f"{time(one.hidden_s)} of communication are hidden behind computing"
    if one.memory is not None and one.memory.parts:
        largest = sorted(one.memory.parts.items(), key=lambda item: -item[1])
        told = ", ".join(f"{name} {panel_units.size(size)}" for name, size in largest if size)
        yield f"memory at its peak: {told}"


def _advice(one: Advice, now: Options) -> AdviceView:
    arguments = _arguments(one.changes, now)
    return AdviceView(
        title=_text(one.title),
        text=_text(f"{one.gain_words}. {one.why}"),
        command=_text(one.line),
        does=plan_view.does(now, replace(now, **arguments)) if arguments else "",
        arguments=arguments,
    )


def _arguments(changes: Mapping[str, Any], now: Options) -> dict[str, Any]:
    """What a button's switch is to be given; empty where none can do it, or it is done."""
    allowed = ARGUMENTS["switch"]
    for name, value in changes.items():
        if not hasattr(now, name) or name not in allowed or not allowed[name].check(value):
            return {}
    return {name: value for name, value in changes.items() if getattr(now, name) != value}
