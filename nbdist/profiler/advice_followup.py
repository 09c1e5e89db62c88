"""Comparison of the predicted with the measured speedup after advice was followed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.display.units import format_speedup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbdist.profiler.advice import Advice
    from nbdist.profiler.profile_data import ProfileData


def advice_outcome(advice: Iterable[Advice], before: ProfileData, now: ProfileData) -> str:
    """Describe which advice was followed, its predicted and its measured speedup.

    Returns:
        One line such as "zero2: predicted 35 % faster, measured 31 %". Empty if no advice was
        followed or the profiles cannot be compared.
    """
    taken = [change for change in advice if _taken(change, now)]
    if not taken or not _alike(before, now, taken):
        return ""
    speedup = 1.0
    for change in taken:
        speedup *= 1 + change.gain.faster
    together = " together" if len(taken) > 1 else ""
    titles = " and ".join(change.title for change in taken)
    predicted, measured = (
        format_speedup(speedup - 1),
        format_speedup(_speed(now) / _speed(before) - 1),
    )
    if predicted.endswith(" faster") and measured.endswith(" faster"):
        measured = measured.removesuffix(" faster")
    return f"{titles}{together}: predicted {predicted}, measured {measured}"


def _alike(before: ProfileData, now: ProfileData, followed: Sequence[Advice]) -> bool:
    """Return whether both profiles are of the same training, except for the advised changes."""
    old, new = before.model, now.model
    if old is None or new is None or len(before.ranks) != len(now.ranks):
        return False
    same = (old.params, old.seq_len) == (new.params, new.seq_len)
    return same and (
        old.samples == new.samples or any("micro_batch" in advice.change for advice in followed)
    )


def _speed(profile: ProfileData) -> float:
    """Return samples per second, or steps per second if the samples are unknown."""
    return profile.samples_per_s or 1 / profile.step_s


def _taken(advice: Advice, now: ProfileData) -> bool:
    """Return whether the new profile shows the change."""
    return any(_RECOGNISED[name](value, now) for name, value in advice.change.items())


def _options_taken(wanted: dict[str, Any], now: ProfileData) -> bool:
    options = now.options.to_json()
    return all(options[name] == value for name, value in wanted.items())


def _micro_batch_taken(wanted: int, now: ProfileData) -> bool:
    return now.model is not None and now.model.samples == wanted


def _workers_taken(wanted: int, now: ProfileData) -> bool:
    return now.loader is not None and now.loader.num_workers >= wanted


def _pinning_taken(_wanted: bool, now: ProfileData) -> bool:  # noqa: FBT001 - a value of `change`
    return now.loader is not None and now.loader.pin_memory


def _units_taken(wanted: int, now: ProfileData) -> bool:
    return now.model is not None and 0 < now.model.largest_unit <= wanted


_RECOGNISED: dict[str, Callable[[Any, ProfileData], bool]] = {
    "options": _options_taken,
    "micro_batch": _micro_batch_taken,
    "num_workers": _workers_taken,
    "pin_memory": _pinning_taken,
    "largest_unit": _units_taken,
}
"""Key of `Advice.change` -> check whether the next profile shows the change."""
