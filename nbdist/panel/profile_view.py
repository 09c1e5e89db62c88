"""The latest profile as the panel shows it.

A profile computes its verdict and advice on first access, so its view is cached.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.display.profile import shown_ranks
from nbdist.display.units import (
    format_bytes,
    format_duration,
    format_percent,
    format_tokens_per_s,
    truncate,
)
from nbdist.output.ansi import replace_invalid_chars
from nbdist.panel import plan_view
from nbdist.panel.commands import ARGUMENTS
from nbdist.panel.protocol import AdviceView, ProfiledRank, ProfileView, StepPartTime
from nbdist.profiler.measurements import STEP_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.profiler.advice import Advice
    from nbdist.profiler.measurements import RankProfile
    from nbdist.profiler.report import Profile
    from nbdist.session.session import Session
    from nbdist.strategies import Options

log = logging.getLogger(__name__)

MAX_COLLECTIVES = 3
"""Maximum number of collectives that are listed per rank."""
MAX_CHARS = 1000
EMPTY_PROFILE_VIEW = ProfileView(
    verdict="", facts="", gained="", ranks=[], advice=[], notes=[], time=None, refused=""
)


class ProfileViewCache:
    """Cached view of the latest profile of a session."""

    def __init__(self) -> None:
        self._seen: tuple[Profile, Options] | None = None
        self._view = EMPTY_PROFILE_VIEW

    def current_view(self, session: Session) -> ProfileView:
        """Return the latest profile, and why no new one can be started, if so."""
        profiles = session.profiles
        if not profiles:
            self._seen, self._view = None, EMPTY_PROFILE_VIEW
        elif self._seen is None or not self._holds(profiles[-1], session.options):
            self._seen = profiles[-1], session.options
            try:
                self._view = view_from_profile(*self._seen)
            except Exception as error:  # an error in one profile must not end the panel
                log.exception("the profile could not be shown")
                verdict = f"Cannot show the profile ({type(error).__name__}: {error})."
                self._view = ProfileView(**{**EMPTY_PROFILE_VIEW, "verdict": verdict})
        return ProfileView(**{**self._view, "refused": session.why_no_profile()})

    def _holds(self, profile: Profile, options: Options) -> bool:
        return self._seen is not None and self._seen[0] is profile and self._seen[1] == options


def view_from_profile(profile: Profile, options: Options) -> ProfileView:
    """Convert a profile.

    Args:
        profile: a profile of any session.
        options: current options of the session. Advice that they already follow gets no button.
    """
    return ProfileView(
        verdict=_text(profile.verdict),
        facts=_text(", ".join(_facts(profile))),
        gained=_text(profile.advice_outcome),
        ranks=[
            ProfiledRank(
                rank=int(rank.rank),
                step_s=_finite(rank.step_s),
                parts=_parts(rank.parts),
                straggler=rank.rank == profile.straggler,
                figures=_text("; ".join(_figures(rank))),
            )
            for rank in shown_ranks(profile)
        ],
        advice=[_advice(advice, options) for advice in profile.advice],
        notes=[_text(note) for note in (*profile.notes, *_left_out(profile))],
        time=max((rank.ends[-1] for rank in profile.ranks if rank.ends), default=None),
        refused="",
    )


def _text(text: str) -> str:
    return truncate(replace_invalid_chars(text), MAX_CHARS)


def _finite(number: float) -> float:
    """A duration that JSON and a bar can represent."""
    return number if math.isfinite(number) and number > 0 else 0.0


def _left_out(profile: Profile) -> list[str]:
    """Note on the ranks without a bar."""
    more = len(profile.ranks) - len(shown_ranks(profile))
    return [f"and {more} more ranks: nbdist.session().profiles[-1].ranks"] if more else []


def _parts(parts: Mapping[Any, float]) -> list[StepPartTime]:
    """The parts of the step that are not zero, in the order of the bar."""
    return [
        StepPartTime(part=part, seconds=_finite(parts[part]))
        for part in STEP_PARTS
        if _finite(parts.get(part, 0.0))
    ]


def _facts(profile: Profile) -> Iterator[str]:
    """Facts about all ranks together."""
    number = profile.num_steps
    yield f"{number} step{'s' * (number != 1)} of {format_duration(profile.step_s)}"
    yield f"p50 {format_duration(profile.p50_s)}"
    yield f"p90 {format_duration(profile.p90_s)}"
    if profile.tokens_per_s > 0:
        unit = "tokens" if profile.model is not None and profile.model.seq_len > 1 else "samples"
        yield f"{format_tokens_per_s(profile.tokens_per_s)} {unit}/s"
    if profile.mfu is not None and profile.peak_flops:
        yield f"MFU {format_percent(profile.mfu)} of {profile.peak_flops / 1e12:.0f} TFLOP/s"


def _figures(rank: RankProfile) -> Iterator[str]:
    """Measurements of one rank that its bar does not show."""
    steps = sorted(rank.steps)
    if steps:
        yield f"p90 {format_duration(steps[math.ceil(0.9 * len(steps)) - 1])}"
    for kind in sorted(rank.traffic, key=lambda kind: -kind.seconds)[:MAX_COLLECTIVES]:
        speed = f", {kind.bandwidth / 1e9:.1f} GB/s" if kind.bandwidth > 0 else ""
        size, duration = format_bytes(kind.bytes), format_duration(kind.seconds)
        yield f"{kind.name} {size} in {duration}{speed}"
    if rank.hidden_s > 0:
        yield f"{format_duration(rank.hidden_s)} of communication overlap with computation"
    if rank.memory is not None and rank.memory.parts:
        largest = sorted(rank.memory.parts.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
        yield f"peak memory: {parts}"


def _advice(advice: Advice, now: Options) -> AdviceView:
    arguments = _arguments(advice.changes, now)
    return AdviceView(
        title=_text(advice.title),
        text=_text(f"{advice.gain_text}. {advice.why}"),
        command=_text(advice.line),
        does=plan_view.describe_switch(now, replace(now, **arguments)) if arguments else "",
        arguments=arguments,
    )


def _arguments(changes: Mapping[str, Any], now: Options) -> dict[str, Any]:
    """Arguments of the switch button; empty if a switch cannot, or need not, apply the advice."""
    allowed = ARGUMENTS["switch"]
    for name, value in changes.items():
        if not hasattr(now, name) or name not in allowed or not allowed[name].check(value):
            return {}
    return {name: value for name, value in changes.items() if getattr(now, name) != value}
