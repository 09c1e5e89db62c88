"""`%nbdist doctor --run`: what is wrong with this run, from its profile, options and errors.

Each symptom is one rule, which gives the engine's own option for it as a line to paste. Nothing
is asked of the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from nbdist.doctor import training_checks_fsdp, training_checks_zero
from nbdist.doctor.evidence import LESS_MEMORY, NO_MEMORY, Case, last_errors
from nbdist.doctor.finding import LEVELS, note, ok, problem
from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.doctor.finding import Finding
    from nbdist.profiler.measurements import RankFigures
    from nbdist.session.session import Session
    from nbdist.strategies import Options

    Rule = Callable[[Case], Finding | None]

TOPIC = "run"


class Setting(Protocol):
    """What was profiled."""

    @property
    def options(self) -> Options:
        """Of the session, then."""


class Profiled(Protocol):
    """A profile, as far as it is needed here."""

    @property
    def ranks(self) -> Sequence[RankFigures]:
        """Of all ranks that took part."""

    @property
    def setting(self) -> Setting:
        """What was profiled."""


def findings(profile: Profiled | None, session: Session | None) -> tuple[Finding, ...]:
    """Say what is recognised, problems first; one sentence where there is nothing to go by.

    Args:
        profile: the last one; None where the run was not profiled.
        session: None where none was started.
    """
    if session is None:
        return (note(TOPIC, "no session was started", "start one with a %%distribute cell"),)
    errors, frames = last_errors(session)
    before = profile.setting.options if profile is not None else session.options
    older = _engine(before) != _engine(session.options)
    case = Case(
        figures=profile.ranks if profile is not None and not older else (),
        options=session.options,
        hardware=session.hardware,
        errors=errors,
        frames=frames,
        host_bytes=discovery.host_bytes(),
    )
    if older:
        return (*recognised(case), _older(before, session.options))
    return (*recognised(case), *_unseen(case))


def _engine(options: Options) -> Options:
    """What decides how the engine lays the model out and moves it."""
    return replace(options, accumulate=1, precision=None)


def _older(before: Options, now: Options) -> Finding:
    """The figures are those of another engine."""
    was, is_now = before.describe(), now.describe()
    words = (
        f"{was}, and the engine is now {is_now}" if was != is_now else f"{was} with other config"
    )
    says = f"the last profile is of {words}: only the options and last errors were looked at"
    return note(TOPIC, says, "%nbdist profile, then %nbdist doctor --run")


def recognised(case: Case) -> tuple[Finding, ...]:
    """All symptoms of a run, problems first."""
    rules = (*_RULES[case.options.strategy.engine], missing_keys, out_of_memory)
    found = [one for rule in rules if (one := rule(case)) is not None]
    if {one.topic for one in found} & {"all_gather", "pinned memory"}:
        found = [one for one in found if one.topic != "memory"]
    return tuple(sorted(found, key=lambda one: LEVELS.index(one.level)))


def missing_keys(case: Case) -> Finding | None:
    """Names in the checkpoint that are not the model's; no option of an engine mends that."""
    said = case.error(
        r"Missing key\(s\)|Unexpected key\(s\)|size mismatch for|Error\(s\) in loading state_dict"
    )
    if not said:
        return None
    return problem(
        "loading",
        f"checkpoint and model do not fit together: {said}",
        "load before accelerator.prepare(), or %nbdist load PATH after it: it takes away what"
        " wrappers put before names (module., _fsdp_wrapped_module., _orig_mod.)",
    )


def out_of_memory(case: Case) -> Finding | None:
    """Memory ended outside of a gather."""
    said = case.error(NO_MEMORY)
    if not said:
        return None
    return problem("memory", said, LESS_MEMORY)


def _unseen(case: Case) -> list[Finding]:
    """What could not be looked at, or that all was well."""
    if not case.figures:
        says = "this run was not profiled: only its options and last errors were looked at"
        return [note(TOPIC, says, "%nbdist profile, then %nbdist doctor --run")]
    if recognised(case):
        return []
    return [ok(TOPIC, f"nothing of {case.options.describe()} stands out in the profile")]


_RULES: Mapping[str, Sequence[Rule]] = {
    "ddp": (),
    "fsdp": training_checks_fsdp.RULES,
    "deepspeed": training_checks_zero.RULES,
}
