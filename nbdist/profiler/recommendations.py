"""Which changes to advise: at most three, the one that gains most first; pure.

A change is proposed only where it shortens what the verdict blames, or the computing itself:
those of the cell here, those of the engine in `engine`. Each one's gain comes from `gains`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.display.profile_units import source, time
from nbdist.profiler import backend_recommendations, speedup
from nbdist.profiler.advice import CHEAP, Advice
from nbdist.profiler.dataloader_calls import made_anew
from nbdist.profiler.lint_dataloaders import OF_TRAINER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.profiler.bottleneck import Blame
    from nbdist.profiler.lint_finding import Remark
    from nbdist.profiler.measurements import Line
    from nbdist.profiler.rank_comparison import Straggler
    from nbdist.profiler.report import Profile

MOST = 3
_DIVIDED = (
    " An IterableDataset has to divide its samples among them (torch.utils.data.get_worker_info)."
)
_TRAINS = re.compile(r"\b(?:step|backward|model)\(")
"""A line that no training can do less often."""


def best(profile: Profile) -> list[Advice]:
    """At most three changes, the one that gains most first."""
    kinds = {blame.kind for blame in profile.blamed}
    found: list[Advice] = []
    for blame in profile.blamed:
        found += _OF_CELL.get(blame.kind, _nothing)(profile, blame)
    planner = profile.planner
    if planner is not None:
        found += backend_recommendations.changes(profile, planner, kinds)
    worth = sorted(
        (one for one in found if _gains(one) or _frees_much(profile, one)),
        key=lambda one: -one.gain.faster,
    )
    # What removes the cause has its place, although it may gain memory alone.
    causes = [one for one in worth if "largest_unit" in one.change]
    others = [one for one in worth if one not in causes]
    shown = [*causes, *others[: MOST - len(causes)]]
    return sorted(shown, key=lambda one: -one.gain.faster)


def _gains(one: Advice) -> bool:
    """Whether it is cheap to take, and gains something even where the planner is wrong."""
    return one.gain.faster >= CHEAP and one.gain.low >= CHEAP / 2


def _frees_much(profile: Profile, one: Advice) -> bool:
    memories = [rank.memory for rank in profile.ranks if rank.memory]
    peak = max((sum(memory.parts.values()) for memory in memories), default=0)
    return "largest_unit" in one.change and one.saves_bytes > CHEAP * peak


# ------------------------------------------------------------------- changes of the cell


def _nothing(_profile: Profile, _blame: Blame) -> Iterator[Advice]:
    yield from ()


def _input(profile: Profile, blame: Blame) -> Iterator[Advice]:
    """More workers, or page-locked batches."""
    loader = profile.loader
    if "copies" in blame.parts:
        if profile.kind == "cuda" and loader is not None and not loader.pin_memory:
            yield Advice(
                title="pin_memory=True",
                why="Copies from page-locked memory take about half as long.",
                line=made_anew(profile.loader_text, pin_memory=True),
                gain=speedup.pinned(profile),
                change={"pin_memory": True},
            )
        return
    found = speedup.workers(profile)
    if loader is None or found is None:
        return
    count, gain = found
    told = _of_kind(profile, "num_workers")
    line = (
        f"# {told.cell}, line {told.line}: TrainingArguments(...,"
        f" {OF_TRAINER}={count}, dataloader_persistent_workers=True)"
        if told and told.change.startswith(OF_TRAINER)
        else made_anew(profile.loader_text, num_workers=count, persistent_workers=True)
    )
    now = f"{loader.num_workers} workers" if loader.num_workers else "the main thread"
    yield Advice(
        title=f"num_workers={count}",
        why=(
            f"Batches are made by {now} and a step waits {time(profile.data_s)} for them;"
            f" {count} workers make them while the ranks compute{_at(profile, 'num_workers')}."
            f"{_more_than_cores(profile, count)}{_DIVIDED if profile.reader else ''}"
        ),
        line=line,
        gain=gain,
        change={"num_workers": count},
    )


def _more_than_cores(profile: Profile, count: int) -> str:
    """Why so many are advised although torch itself warns of more workers than cores."""
    cores, loader = profile.setting.cluster.num_cpus, profile.loader
    if not cores or count <= cores or loader is None or not loader.fetch_s:
        return ""
    return f" They wait more than they compute, so {count} do no harm on {cores} cores."


def _straggler(profile: Profile, blame: Blame) -> Iterator[Advice]:
    """Make the slow rank as fast as the others."""
    slow = profile.slowest
    if slow is None:
        return
    line = _own_line(profile, slow)
    here = (
        f"{line.cell}, line {line.line}: {source(line)}"
        if line
        else "see what else runs on its device, and whether its batches are larger"
    )
    yield Advice(
        title=f"rank {slow.rank} as fast as the others",
        why=(
            f"It takes {time(slow.lost_s)} longer than they do, most of it in {slow.where}; {here}."
        ),
        line="%nbdist doctor",
        gain=speedup.without(profile, min(slow.lost_s, blame.share * profile.step_s)),
    )


def _own_line(profile: Profile, slow: Straggler) -> Line | None:
    """The line on which the slow rank alone loses at least half of its time."""
    theirs = {
        (line.cell, line.line): line.seconds
        for one in profile.ranks
        if one.rank != slow.rank
        for line in one.lines
    }
    mine = next(one for one in profile.ranks if one.rank == slow.rank)
    for line in mine.lines:
        if line.seconds - theirs.get((line.cell, line.line), 0.0) >= slow.lost_s / 2:
            return line
    return None


def _host(profile: Profile, blame: Blame) -> Iterator[Advice]:
    """Do a line less often; never as code, for what stands around the line is not known here."""
    line = blame.line
    if line is None:
        return
    told = _remark(profile, "sync", line.cell, line.line)
    lost = min(line.seconds, blame.share * profile.step_s)
    where = f"{line.cell}, line {line.line}"
    instead = (
        "put what is slow on a line of its own and profile again"
        if _TRAINS.search(line.source)
        else "do this less often or outside of the loop; batches can be made by the workers of a"
        " DataLoader"
    )
    yield Advice(
        title=where,
        why=(
            told.reason if told else f"`{source(line)}` takes {time(line.seconds)} of every step."
        ),
        line=f"# {where}: {told.change if told else instead}",
        gain=speedup.without(profile, lost),
    )


_OF_CELL: dict[str, Callable[[Profile, Blame], Iterator[Advice]]] = {
    "input": _input,
    "straggler": _straggler,
    "host": _host,
}


def _at(profile: Profile, kind: str) -> str:
    """Where the cell's text has it."""
    told = _of_kind(profile, kind)
    return f" ({told.cell}, line {told.line})" if told else ""


def _of_kind(profile: Profile, kind: str) -> Remark | None:
    """What the lint says of a loader."""
    return next((one for one in profile.remarks if one.kind == kind), None)


def _remark(profile: Profile, kind: str, cell: str, line: int) -> Remark | None:
    """What the lint says of a line."""
    return next(
        (one for one in profile.remarks if (one.kind, one.cell, one.line) == (kind, cell, line)),
        None,
    )
