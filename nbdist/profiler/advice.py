"""A recommendation: the change, its predicted speedup, and the speedup measured afterwards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.number_formatting import format_bytes, format_percent, format_speedup
from nbdist.planner import prediction_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.profiler.lint import LintFinding
    from nbdist.profiler.profile_data import ProfileData

MIN_GAIN = 0.05
"""Minimum predicted speedup of a recommendation. Repeated runs differ by as much."""
_UNCERTAIN = 0.25
"""Relative uncertainty of each part that changes, before it is scaled to measured errors."""
_REPEATED = {"cuda": 0.02, "cpu": 0.2}
"""Relative difference of the speeds of two runs of the same loop, by the kind of the devices."""
_SHORTEST = 0.01
"""Lower bound of the predicted step time, as a share of the measured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Predicted change of the throughput, with a range."""

    faster: float
    """Relative speedup; 0.35 is 35 % more samples per second."""
    low: float
    high: float
    uncertainty: float = 0.0
    """Uncertainty by the parts that change, relative to the larger of the two times."""

    @property
    def at_least(self) -> float:
        """Speedup if the parts that change take longer by their uncertainty, without noise."""
        return (1 + self.faster) / (1 + self.uncertainty) - 1

    @classmethod
    def from_times(cls, kind: str, before_s: float, after_s: float, changed_s: float) -> Speedup:
        """Create from times for the same samples.

        Args:
            kind: kind of the devices.
            before_s: measured time.
            after_s: predicted time.
            changed_s: part of the time that changes, which is uncertain.
        """
        after_s = max(after_s, _SHORTEST * before_s)
        factor = before_s / after_s
        uncertainty = _UNCERTAIN * changed_s / max(before_s, after_s)
        error = prediction_errors.interval("gain", kind, uncertainty + _REPEATED[kind])
        return cls(
            faster=factor - 1,
            low=factor * error.low - 1,
            high=factor * error.high - 1,
            uncertainty=uncertainty,
        )


def speedup_without(profile: ProfileData, seconds: float) -> Speedup:
    """Return the speedup if every step takes so many seconds less (more, if negative)."""
    step = profile.step_s
    saved = min(seconds, step)
    return Speedup.from_times(profile.kind, step, step - saved, abs(saved))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A recommended change."""

    title: str
    """Short name, such as "num_workers=4" or "switch to zero2"."""
    why: str
    """Explanation in one or two sentences."""
    line: str
    """Code to paste, or a comment if the change depends on the user's code."""
    gain: Speedup
    change: dict[str, Any] = field(default_factory=dict)
    """Expected difference in the next profile: {"options": {...}}, {"micro_batch": 8},
    {"num_workers": 4}, {"pin_memory": True} or {"largest_unit": 1000}. Empty if the next profile
    cannot show whether the change was made."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Session.switch` that apply it; empty if the cell itself must change."""
    saves_bytes: int = 0
    """Reduction of the peak memory."""

    @property
    def is_worthwhile(self) -> bool:
        """True if the predicted speedup is large enough, even at its lower bound."""
        return self.gain.faster >= MIN_GAIN and self.gain.at_least >= MIN_GAIN / 2

    @property
    def text(self) -> str:
        """Title, predicted speedup with its range, and explanation."""
        return f"{self.title}: {self.gain_text}. {self.why}"

    @property
    def gain_text(self) -> str:
        """Predicted speedup, as "about 35 % faster (28 to 43 %)", or the memory it saves."""
        gain = self.gain
        if gain.faster < MIN_GAIN:
            costs = (
                f", and is about {format_speedup(gain.faster)}" if gain.faster <= -MIN_GAIN else ""
            )
            return f"reduces the peak memory by {format_bytes(self.saves_bytes)}{costs}"
        if gain.faster >= 1:
            return (
                f"about {format_speedup(gain.faster)} ({1 + gain.low:.1f} to {1 + gain.high:.1f})"
            )
        low, high = max(0.0, gain.low), format_percent(gain.high)
        return f"about {format_speedup(gain.faster)} ({100 * low:.0f} to {high})"

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `text`."""
        return {**asdict(self), "text": self.text}


def remarks_without_advice(
    remarks: Iterable[LintFinding], all_advice: Sequence[Advice]
) -> list[LintFinding]:
    """Return the remarks on the cell that no advice covers, by the same option or the same line."""
    return [
        remark
        for remark in remarks
        if not any(
            remark.kind in advice.change or advice.line.endswith(f": {remark.change}")
            for advice in all_advice
        )
    ]


def advice_outcome(advice: Iterable[Advice], before: ProfileData, now: ProfileData) -> str:
    """Describe which advice was followed, its predicted and its measured speedup.

    Returns:
        One line such as "zero2: predicted 35 % faster, measured 31 %". Empty if no advice was
        followed or the profiles cannot be compared.
    """
    followed = [item for item in advice if _is_followed(item, now)]
    old, new = before.model, now.model
    if not followed or old is None or new is None or len(before.ranks) != len(now.ranks):
        return ""
    if (old.params, old.seq_len) != (new.params, new.seq_len):
        return ""
    if old.samples != new.samples and not any("micro_batch" in item.change for item in followed):
        return ""
    predicted_factor = 1.0
    for item in followed:
        predicted_factor *= 1 + item.gain.faster
    predicted = format_speedup(predicted_factor - 1)
    measured = format_speedup(_speed(now) / _speed(before) - 1)
    if predicted.endswith(" faster"):
        measured = measured.removesuffix(" faster")
    together = " together" if len(followed) > 1 else ""
    titles = " and ".join(item.title for item in followed)
    return f"{titles}{together}: predicted {predicted}, measured {measured}"


def _speed(profile: ProfileData) -> float:
    """Return samples per second, or steps per second if the samples are unknown."""
    return profile.samples_per_s or 1 / profile.step_s


def _is_followed(advice: Advice, now: ProfileData) -> bool:
    model, loader, options = now.model, now.loader, now.options.to_json()
    for name, value in advice.change.items():
        match name:
            case "options":
                shown = all(options[key] == wanted for key, wanted in value.items())
            case "micro_batch":
                shown = model is not None and model.samples == value
            case "num_workers":
                shown = loader is not None and loader.num_workers >= value
            case "pin_memory":
                shown = loader is not None and loader.pin_memory
            case _:  # largest_unit
                shown = model is not None and 0 < model.largest_unit <= value
        if shown:
            return True
    return False
