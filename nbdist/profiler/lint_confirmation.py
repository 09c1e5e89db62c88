"""What the profile says to the remarks on a cell's text; pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.profiler.lint_finding import Evidence, Remark
    from nbdist.profiler.measurements import Part, RankFigures

SMALL = 0.02
"""Of a step: less is not worth a change."""
_WAITED = 0.10
"""The same of a loader, which healthy loops wait for a little too; just under what the verdict
blames."""


def confirmed(
    remarks: Sequence[Remark], figures: Sequence[RankFigures], *, bf16: bool = True
) -> list[Remark]:
    """Remarks that hold, the dearest first and those that cost nothing here last.

    What the profile refutes is left out.

    Without a profile those stay that the text alone shows.

    Args:
        remarks: of `lint.remarks`.
        figures: of all ranks; empty where there is no profile.
        bf16: the hardware computes in bf16.
    """
    kept = []
    for one in remarks:
        if one.kind == "fp16" and not bf16:
            continue
        judged = _JUDGES[one.evidence](one, figures) if figures and one.evidence else _alone(one)
        if judged is not None:
            kept.append(judged)
    return sorted(kept, key=lambda one: (bool(figures) and _for_nothing(one), -one.seconds))


def _for_nothing(one: Remark) -> bool:
    """Whether it is on a line that took no time."""
    return one.evidence == "line" and not one.seconds


def _alone(one: Remark) -> Remark | None:
    """Without a profile."""
    return None if one.sure == "worth a look" else one


def _data(one: Remark, figures: Sequence[RankFigures]) -> Remark | None:
    seconds = _longest(figures, "data")
    loaders = [loader for rank in figures for loader in rank.loaders]
    if _share(figures, seconds) < _WAITED or (loaders and all(x.num_workers for x in loaders)):
        return None
    reason = f"{one.reason}; {_words(figures, seconds)} waits for batches"
    return replace(one, reason=reason, sure="certain" if loaders else "likely", seconds=seconds)


def _copies(one: Remark, figures: Sequence[RankFigures]) -> Remark | None:
    seconds = _longest(figures, "copies")
    loaders = [loader for rank in figures for loader in rank.loaders]
    on_gpus = all(rank.kind == "cuda" for rank in figures)
    if not on_gpus or _share(figures, seconds) < _WAITED:
        return None
    if loaders and all(loader.pin_memory for loader in loaders):
        return None
    reason = f"{one.reason}; {_words(figures, seconds)} copies batches"
    return replace(one, reason=reason, sure="likely", seconds=seconds)


def _sharded(one: Remark, figures: Sequence[RankFigures]) -> Remark | None:
    loaders = [loader for rank in figures for loader in rank.loaders]
    if len(figures) == 1 or (loaders and all(loader.sharded for loader in loaders)):
        return None
    if any(not loader.sharded for loader in loaders):
        return replace(one, sure="certain")
    return one


def _precision(one: Remark, figures: Sequence[RankFigures]) -> Remark | None:
    used = {rank.model.precision for rank in figures if rank.model is not None}
    if used and "fp16" not in used:
        return None
    return replace(one, sure="certain") if used else one


def _line(one: Remark, figures: Sequence[RankFigures]) -> Remark | None:
    """A wait for the device; its price is that of the pause in which nothing is launched."""
    on_line = max(
        (
            line.seconds
            for rank in figures
            for line in rank.lines
            if (line.cell, line.line) == (one.cell, one.line)
        ),
        default=0.0,
    )
    if all(rank.kind == "cpu" for rank in figures):
        seconds = on_line if _share(figures, on_line) >= SMALL else 0.0
        told = f"{_words(figures, seconds)} is on this line" if seconds else "nothing on CPU ranks"
        return replace(one, reason=f"{one.reason}; here: {told}", seconds=seconds)
    idle = max(one.parts.get("idle", 0.0) + one.parts.get("python", 0.0) for one in figures)
    if _share(figures, idle) < SMALL:
        return None
    seconds = min(idle, on_line) if on_line else idle
    return replace(
        one, reason=f"{one.reason}; {_words(figures, idle)} the device idles", seconds=seconds
    )


def _training(one: Remark, figures: Sequence[RankFigures]) -> Remark | None:
    modes = {rank.model.training for rank in figures if rank.model is not None}
    if modes == {True}:
        return None
    return replace(one, sure="certain") if modes == {False} else one


_JUDGES: Mapping[Evidence, Callable[[Remark, Sequence[RankFigures]], Remark | None]] = {
    "data": _data,
    "copies": _copies,
    "sharded": _sharded,
    "precision": _precision,
    "line": _line,
    "training": _training,
}


def _longest(figures: Sequence[RankFigures], part: Part) -> float:
    """Of the rank that has most of it."""
    return max(rank.parts.get(part, 0.0) for rank in figures)


def _share(figures: Sequence[RankFigures], seconds: float) -> float:
    """Of the longest step."""
    step = max(rank.step_s for rank in figures)
    return seconds / step if step > 0 else 0.0


def _words(figures: Sequence[RankFigures], seconds: float) -> str:
    return f"{_share(figures, seconds):.0%} of the step ({seconds * 1e3:.0f} ms)"
