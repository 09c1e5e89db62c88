"""`%nbdist doctor --run`: checks of a training run, from its profile, options and errors.

Each symptom has one rule, which returns a finding with the engine option that fixes it, as a
command to paste. No request is sent to the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from nbdist.doctor import training_checks_fsdp, training_checks_zero
from nbdist.doctor.evidence import (
    OUT_OF_MEMORY_ADVICE,
    OUT_OF_MEMORY_PATTERN,
    RunEvidence,
    last_errors,
)
from nbdist.doctor.finding import LEVELS, note, ok, problem
from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.doctor.finding import Finding
    from nbdist.profiler.measurements import RankProfile
    from nbdist.session.session import Session
    from nbdist.strategies import Options

    Rule = Callable[[RunEvidence], Finding | None]

TOPIC = "run"


class ProfiledConfigLike(Protocol):
    """Setting in which a profile was recorded."""

    @property
    def options(self) -> Options:
        """Options of the session at the time of the profile."""


class ProfileLike(Protocol):
    """The attributes of a profile that the rules use."""

    @property
    def ranks(self) -> Sequence[RankProfile]:
        """Measurements of all ranks that took part."""

    @property
    def setting(self) -> ProfiledConfigLike:
        """Setting in which the profile was recorded."""


def check_training(profile: ProfileLike | None, session: Session | None) -> tuple[Finding, ...]:
    """Return the symptoms of a run, worst first, or one finding if there is nothing to check.

    Args:
        profile: the last profile; None if the run was not profiled.
        session: None if no session was started.
    """
    if session is None:
        return (note(TOPIC, "no session was started", "run a %%distribute cell to start one"),)
    errors, frames = last_errors(session)
    profiled = profile.setting.options if profile is not None else session.options
    older = _engine(profiled) != _engine(session.options)
    case = RunEvidence(
        rank_profiles=profile.ranks if profile is not None and not older else (),
        options=session.options,
        hardware=session.hardware,
        errors=errors,
        traceback_frames=frames,
        host_bytes=discovery.host_memory_bytes(),
    )
    if older:
        return (*match_symptoms(case), _older(profiled, session.options))
    return (*match_symptoms(case), *_unseen(case))


def _engine(options: Options) -> Options:
    """The options without those that do not affect the engine's sharding and communication."""
    return replace(options, accumulate=1, precision=None)


def _older(before: Options, now: Options) -> Finding:
    """Note that the profile belongs to another engine."""
    was, is_now = before.describe(), now.describe()
    subject = (
        f"{was}, and the engine is now {is_now}" if was != is_now else f"{was} with other config"
    )
    says = f"the last profile is of {subject}: only options and last errors were checked"
    return note(TOPIC, says, "%nbdist profile, then %nbdist doctor --run")


def match_symptoms(case: RunEvidence) -> tuple[Finding, ...]:
    """Return all symptoms of a run, worst first."""
    rules = (*_RULES[case.options.strategy.engine], check_missing_keys, check_out_of_memory)
    findings = [finding for rule in rules if (finding := rule(case)) is not None]
    if {finding.topic for finding in findings} & {"all_gather", "pinned memory"}:
        findings = [finding for finding in findings if finding.topic != "memory"]
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def check_missing_keys(case: RunEvidence) -> Finding | None:
    """Report checkpoint keys that the model does not have, or vice versa."""
    error = case.find_error(
        r"Missing key\(s\)|Unexpected key\(s\)|size mismatch for|Error\(s\) in loading state_dict"
    )
    if not error:
        return None
    return problem(
        "loading",
        f"the checkpoint does not match the model: {error}",
        "load it before accelerator.prepare(), or after it with %nbdist load PATH, which removes"
        " the prefixes of wrappers (module., _fsdp_wrapped_module., _orig_mod.)",
    )


def check_out_of_memory(case: RunEvidence) -> Finding | None:
    """Report an out-of-memory error outside of an all-gather."""
    error = case.find_error(OUT_OF_MEMORY_PATTERN)
    if not error:
        return None
    return problem("memory", error, OUT_OF_MEMORY_ADVICE)


def _unseen(case: RunEvidence) -> list[Finding]:
    """Note that there is no profile, or that no symptom was found."""
    if not case.rank_profiles:
        says = "this run was not profiled: only its options and last errors were checked"
        return [note(TOPIC, says, "%nbdist profile, then %nbdist doctor --run")]
    if match_symptoms(case):
        return []
    return [ok(TOPIC, f"no symptom of {case.options.describe()} in the profile")]


_RULES: Mapping[str, Sequence[Rule]] = {
    "ddp": (),
    "fsdp": training_checks_fsdp.FSDP_CHECKS,
    "deepspeed": training_checks_zero.ZERO_CHECKS,
}
