"""Selection of the recommendations of a profile: at most three, largest speedup first.

A change is recommended only if it shortens a bottleneck or the computation itself. Changes of the
cell are here, changes of the backend in ``backend_recommendations``. Speedups are predicted by
``speedup`` and ``what_if``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.display.units import format_duration, format_source_line
from nbdist.profiler import backend_recommendations, speedup
from nbdist.profiler.advice import MIN_GAIN, Advice
from nbdist.profiler.dataloader_calls import rebuild_instruction
from nbdist.profiler.lint_dataloaders import TRAINER_WORKERS_ARGUMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.profiler.bottleneck import Bottleneck
    from nbdist.profiler.lint_finding import LintFinding
    from nbdist.profiler.measurements import LineProfile
    from nbdist.profiler.profile_data import ProfileData
    from nbdist.profiler.rank_comparison import Straggler
    from nbdist.profiler.what_if import CalibratedPlanner

MAX_RECOMMENDATIONS = 3
_DIVIDED = (
    " An IterableDataset must shard its samples among the workers"
    " (torch.utils.data.get_worker_info)."
)
_TRAINS = re.compile(r"\b(?:step|backward|model)\(")
"""Matches a line that is required in every step."""


def best_recommendations(
    profile: ProfileData, bottlenecks: Sequence[Bottleneck], planner: CalibratedPlanner | None
) -> list[Advice]:
    """Return at most three recommendations, largest speedup first."""
    kinds = {blame.kind for blame in bottlenecks}
    candidates: list[Advice] = []
    for blame in bottlenecks:
        candidates += _OF_CELL.get(blame.kind, _nothing)(profile, blame)
    if planner is not None:
        candidates += backend_recommendations.recommend_backend_changes(profile, planner, kinds)
    worth = sorted(
        (advice for advice in candidates if _gains(advice) or _frees_much(profile, advice)),
        key=lambda advice: -advice.gain.faster,
    )
    # FSDP units remove the cause of a bottleneck, so they are kept even if they only save memory.
    causes = [advice for advice in worth if "largest_unit" in advice.change]
    others = [advice for advice in worth if advice not in causes]
    shown = [*causes, *others[: MAX_RECOMMENDATIONS - len(causes)]]
    return sorted(shown, key=lambda advice: -advice.gain.faster)


def _gains(advice: Advice) -> bool:
    """Return whether the predicted speedup is large enough, even at its lower bound."""
    return advice.gain.faster >= MIN_GAIN and advice.gain.low >= MIN_GAIN / 2


def _frees_much(profile: ProfileData, advice: Advice) -> bool:
    memories = [rank.memory for rank in profile.ranks if rank.memory]
    peak = max((sum(memory.parts.values()) for memory in memories), default=0)
    return "largest_unit" in advice.change and advice.saves_bytes > MIN_GAIN * peak


# ------------------------------------------------------------------- changes of the cell


def _nothing(_profile: ProfileData, _blame: Bottleneck) -> Iterator[Advice]:
    yield from ()


def _input(profile: ProfileData, blame: Bottleneck) -> Iterator[Advice]:
    """Recommend more workers or pinned memory."""
    loader = profile.loader
    if "copies" in blame.parts:
        if profile.kind == "cuda" and loader is not None and not loader.pin_memory:
            yield Advice(
                title="pin_memory=True",
                why="Copies from pinned memory take about half as long.",
                line=rebuild_instruction(profile.loader_text, pin_memory=True),
                gain=speedup.pin_memory_speedup(profile),
                change={"pin_memory": True},
            )
        return
    recommended = speedup.recommend_num_workers(profile)
    if loader is None or recommended is None:
        return
    count, gain = recommended
    finding = _of_kind(profile, "num_workers")
    line = (
        f"# {finding.cell}, line {finding.line}: TrainingArguments(...,"
        f" {TRAINER_WORKERS_ARGUMENT}={count}, dataloader_persistent_workers=True)"
        if finding and finding.change.startswith(TRAINER_WORKERS_ARGUMENT)
        else rebuild_instruction(profile.loader_text, num_workers=count, persistent_workers=True)
    )
    current = f"{loader.num_workers} workers" if loader.num_workers else "the main thread"
    yield Advice(
        title=f"num_workers={count}",
        why=(
            f"Batches are loaded by {current}, and each step waits"
            f" {format_duration(profile.data_s)} for them. {count} workers load them while the"
            f" ranks compute{_at(profile, 'num_workers')}."
            f"{_more_than_cores(profile, count)}{_DIVIDED if profile.reader else ''}"
        ),
        line=line,
        gain=gain,
        change={"num_workers": count},
    )


def _more_than_cores(profile: ProfileData, count: int) -> str:
    """Explain a number of workers above the number of cores, of which torch warns."""
    cores, loader = profile.setting.cluster.num_cpus, profile.loader
    if not cores or count <= cores or loader is None or not loader.fetch_s:
        return ""
    return f" They wait more than they compute, so {count} workers are fine on {cores} cores."


def _straggler(profile: ProfileData, blame: Bottleneck) -> Iterator[Advice]:
    """Recommend a check of the slow rank."""
    slow = profile.straggler_details
    if slow is None:
        return
    line = _own_line(profile, slow)
    here = (
        f"{line.cell}, line {line.line}: {format_source_line(line.source)}"
        if line
        else "check what else runs on its device, and whether its batches are larger"
    )
    yield Advice(
        title=f"rank {slow.rank} as fast as the others",
        why=(
            f"Its steps take {format_duration(slow.lost_s)} longer, mostly in {slow.part_label};"
            f" {here}."
        ),
        line="%nbdist doctor",
        gain=speedup.speedup_without(profile, min(slow.lost_s, blame.step_share * profile.step_s)),
    )


def _own_line(profile: ProfileData, slow: Straggler) -> LineProfile | None:
    """Return the line that explains at least half of the extra time of the slow rank."""
    others = {
        (line.cell, line.line): line.seconds
        for rank in profile.ranks
        if rank.rank != slow.rank
        for line in rank.lines
    }
    straggler = next(rank for rank in profile.ranks if rank.rank == slow.rank)
    for line in straggler.lines:
        if line.seconds - others.get((line.cell, line.line), 0.0) >= slow.lost_s / 2:
            return line
    return None


def _host(profile: ProfileData, blame: Bottleneck) -> Iterator[Advice]:
    """Recommend to execute a line less often."""
    line = blame.line
    if line is None:
        return
    finding = _remark(profile, "sync", line.cell, line.line)
    lost = min(line.seconds, blame.step_share * profile.step_s)
    where = f"{line.cell}, line {line.line}"
    instead = (
        "move the slow part to a separate line and profile again"
        if _TRAINS.search(line.source)
        else "do this less often or outside of the loop; the workers of a DataLoader can prepare"
        " batches"
    )
    yield Advice(
        title=where,
        why=(
            finding.reason
            if finding
            else f"`{format_source_line(line.source)}` takes {format_duration(line.seconds)} of"
            " every step."
        ),
        # A comment rather than code, since the code around the line is unknown.
        line=f"# {where}: {finding.change if finding else instead}",
        gain=speedup.speedup_without(profile, lost),
    )


_OF_CELL: dict[str, Callable[[ProfileData, Bottleneck], Iterator[Advice]]] = {
    "input": _input,
    "straggler": _straggler,
    "host": _host,
}


def _at(profile: ProfileData, kind: str) -> str:
    """Return the source location of the finding of a kind, in parentheses."""
    finding = _of_kind(profile, kind)
    return f" ({finding.cell}, line {finding.line})" if finding else ""


def _of_kind(profile: ProfileData, kind: str) -> LintFinding | None:
    """Return the lint finding of a kind."""
    return next((finding for finding in profile.remarks if finding.kind == kind), None)


def _remark(profile: ProfileData, kind: str, cell: str, line: int) -> LintFinding | None:
    """Return the lint finding of a kind on a line."""
    return next(
        (
            finding
            for finding in profile.remarks
            if (finding.kind, finding.cell, finding.line) == (kind, cell, line)
        ),
        None,
    )
