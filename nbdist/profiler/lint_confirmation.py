"""Confirmation of lint findings by a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.profiler.lint_finding import Evidence, LintFinding
    from nbdist.profiler.measurements import RankProfile, StepPart

MIN_STEP_SHARE = 0.02
"""Share of the step below which a finding is not reported."""
_WAITED = 0.10
"""The same for data loading, which every loop waits for a little. Slightly lower than the
threshold of the verdict."""


def confirm_findings(
    remarks: Sequence[LintFinding], figures: Sequence[RankProfile], *, bf16: bool = True
) -> list[LintFinding]:
    """Filter findings by a profile and sort them by cost, most expensive first.

    Findings that the profile refutes are removed. Without a profile, only those that do not
    depend on one remain.

    Args:
        remarks: findings of ``lint_cells``.
        figures: measurements of all ranks; empty without a profile.
        bf16: whether the hardware supports bf16.
    """
    kept = []
    for finding in remarks:
        if finding.kind == "fp16" and not bf16:
            continue
        if figures and finding.evidence:
            result = _JUDGES[finding.evidence](finding, figures)
        else:
            result = _alone(finding)
        if result is not None:
            kept.append(result)
    return sorted(kept, key=lambda item: (bool(figures) and _for_nothing(item), -item.seconds))


def _for_nothing(finding: LintFinding) -> bool:
    """Return whether the finding is on a line that took no time."""
    return finding.evidence == "line" and not finding.seconds


def _alone(finding: LintFinding) -> LintFinding | None:
    """Filter a finding without a profile."""
    return None if finding.sure == "worth a look" else finding


def _data(finding: LintFinding, figures: Sequence[RankProfile]) -> LintFinding | None:
    seconds = _longest(figures, "data")
    loaders = [loader for rank in figures for loader in rank.loaders]
    if _share(figures, seconds) < _WAITED or (loaders and all(x.num_workers for x in loaders)):
        return None
    reason = f"{finding.reason}. Waiting for batches takes {_words(figures, seconds)}"
    return replace(finding, reason=reason, sure="certain" if loaders else "likely", seconds=seconds)


def _copies(finding: LintFinding, figures: Sequence[RankProfile]) -> LintFinding | None:
    seconds = _longest(figures, "copies")
    loaders = [loader for rank in figures for loader in rank.loaders]
    on_gpus = all(rank.kind == "cuda" for rank in figures)
    if not on_gpus or _share(figures, seconds) < _WAITED:
        return None
    if loaders and all(loader.pin_memory for loader in loaders):
        return None
    reason = f"{finding.reason}. Copying batches takes {_words(figures, seconds)}"
    return replace(finding, reason=reason, sure="likely", seconds=seconds)


def _sharded(finding: LintFinding, figures: Sequence[RankProfile]) -> LintFinding | None:
    loaders = [loader for rank in figures for loader in rank.loaders]
    if len(figures) == 1 or (loaders and all(loader.sharded for loader in loaders)):
        return None
    if any(not loader.sharded for loader in loaders):
        return replace(finding, sure="certain")
    return finding


def _precision(finding: LintFinding, figures: Sequence[RankProfile]) -> LintFinding | None:
    used = {rank.model.precision for rank in figures if rank.model is not None}
    if used and "fp16" not in used:
        return None
    return replace(finding, sure="certain") if used else finding


def _line(finding: LintFinding, figures: Sequence[RankProfile]) -> LintFinding | None:
    """Check a synchronization with the device. Its cost is the time without kernel launches."""
    on_line = max(
        (
            line.seconds
            for rank in figures
            for line in rank.lines
            if (line.cell, line.line) == (finding.cell, finding.line)
        ),
        default=0.0,
    )
    if all(rank.kind == "cpu" for rank in figures):
        seconds = on_line if _share(figures, on_line) >= MIN_STEP_SHARE else 0.0
        cost = f"takes {_words(figures, seconds)}" if seconds else "costs nothing on CPU ranks"
        return replace(finding, reason=f"{finding.reason}. Here the line {cost}", seconds=seconds)
    idle = max(rank.parts.get("idle", 0.0) + rank.parts.get("python", 0.0) for rank in figures)
    if _share(figures, idle) < MIN_STEP_SHARE:
        return None
    seconds = min(idle, on_line) if on_line else idle
    return replace(
        finding,
        reason=f"{finding.reason}. The device is idle for {_words(figures, idle)}",
        seconds=seconds,
    )


def _training(finding: LintFinding, figures: Sequence[RankProfile]) -> LintFinding | None:
    modes = {rank.model.training for rank in figures if rank.model is not None}
    if modes == {True}:
        return None
    return replace(finding, sure="certain") if modes == {False} else finding


_JUDGES: Mapping[Evidence, Callable[[LintFinding, Sequence[RankProfile]], LintFinding | None]] = {
    "data": _data,
    "copies": _copies,
    "sharded": _sharded,
    "precision": _precision,
    "line": _line,
    "training": _training,
}


def _longest(figures: Sequence[RankProfile], part: StepPart) -> float:
    """Return the maximum over the ranks."""
    return max(rank.parts.get(part, 0.0) for rank in figures)


def _share(figures: Sequence[RankProfile], seconds: float) -> float:
    """Return a duration as a share of the longest step."""
    step = max(rank.step_s for rank in figures)
    return seconds / step if step > 0 else 0.0


def _words(figures: Sequence[RankProfile], seconds: float) -> str:
    return f"{_share(figures, seconds):.0%} of the step ({seconds * 1e3:.0f} ms)"
