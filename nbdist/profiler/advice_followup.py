"""What the advice of one profile has brought by the next: recognised, measured; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.display.profile_units import faster

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.profiler.advice import Advice
    from nbdist.profiler.report import Profile


def gained(before: Profile, now: Profile) -> str:
    """What advice of the profile before was taken, what it promised and what it brought."""
    taken = [one for one in before.advice if _taken(one, now)]
    if not taken or not _alike(before, now, taken):
        return ""
    was, is_now = _speed(before), _speed(now)
    predicted = 1.0
    for one in taken:
        predicted *= 1 + one.gain.faster
    together = " together" if len(taken) > 1 else ""
    titles = " and ".join(one.title for one in taken)
    promised, measured = faster(predicted - 1), faster(is_now / was - 1)
    if promised.endswith(" faster") and measured.endswith(" faster"):
        measured = measured.removesuffix(" faster")
    return f"{titles}{together}: predicted {promised}, measured {measured}"


def _alike(before: Profile, now: Profile, taken: Sequence[Advice]) -> bool:
    """Whether both profiles are of one training, but for what was advised."""
    was, is_now = before.model, now.model
    if was is None or is_now is None or len(before.ranks) != len(now.ranks):
        return False
    same = (was.params, was.seq_len) == (is_now.params, is_now.seq_len)
    return same and (
        was.samples == is_now.samples or any("micro_batch" in one.change for one in taken)
    )


def _speed(profile: Profile) -> float:
    """Samples a second, or steps where samples are not known."""
    return profile.samples_per_s or 1 / profile.step_s


def _taken(one: Advice, now: Profile) -> bool:
    """Whether the profile now shows the change."""
    return any(_RECOGNISED[name](value, now) for name, value in one.change.items())


def _options_taken(wanted: dict[str, Any], now: Profile) -> bool:
    options = now.options.to_json()
    return all(options[name] == value for name, value in wanted.items())


def _micro_batch_taken(wanted: int, now: Profile) -> bool:
    return now.model is not None and now.model.samples == wanted


def _workers_taken(wanted: int, now: Profile) -> bool:
    return now.loader is not None and now.loader.num_workers >= wanted


def _pinning_taken(_wanted: bool, now: Profile) -> bool:  # noqa: FBT001 - a value of `change`
    return now.loader is not None and now.loader.pin_memory


def _units_taken(wanted: int, now: Profile) -> bool:
    return now.model is not None and 0 < now.model.largest_unit <= wanted


_RECOGNISED: dict[str, Callable[[Any, Profile], bool]] = {
    "options": _options_taken,
    "micro_batch": _micro_batch_taken,
    "num_workers": _workers_taken,
    "pin_memory": _pinning_taken,
    "largest_unit": _units_taken,
}
"""Key of `Advice.change` -> whether the profile after shows it."""
