"""Detects that ranks of a cell block each other, and describes it; pure.

Runs in the notebook's kernel. Example: "rank 0 raised ValueError at line 3; ranks 1-3 have waited
4 s in all_reduce at line 4."
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist import rank_sets
from nbdist.output.ansi import strip_ansi

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.protocol.messages import RankActivityReply, RankError
    from nbdist.session.worker_group import State

HANG_AFTER_S = 3.0
"""Minimum waiting time before a hang is reported."""

_Counts = frozenset[tuple[str, int]]
"""Number of collectives begun, by process group."""
_LINE = re.compile(r"Cell In\[\d+\], line (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A hang: ranks of a cell that wait for others."""

    waiting_ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    """Ranks that are waited for, as far as known."""
    description: str


@dataclass(frozen=True, slots=True)
class _WaitingRank:
    """A waiting rank."""

    place: str
    seconds: float
    missing: tuple[int, ...]
    """Ranks that it waits for, as far as known."""
    known: bool = True
    """False if it only stays at one line while others have failed."""


def detect_hang(
    ranks: Sequence[int],
    *,
    answers: Mapping[int, RankActivityReply],
    pending: Sequence[int],
    errors: Mapping[int, RankError],
    waited_s: float | None = None,
) -> Hang | None:
    """Detect ranks of a cell that wait for others; return None if there is no hang.

    A rank waits if it stays at the same line and others have begun fewer collectives of a shared
    process group, or have failed, or if the line is inside a collective. CPU time is not a
    criterion: `cudaStreamSynchronize` spins while NCCL runs.

    Args:
        ranks: ranks that run the cell.
        answers: last reply of each rank of the session.
        pending: ranks whose code has not finished.
        errors: errors of the ranks that failed.
        waited_s: minimum waiting time. Default: `HANG_AFTER_S`.
    """
    alike = _group_by_counts(answers)
    waited_s = HANG_AFTER_S if waited_s is None else waited_s
    waits = {
        rank: _find_wait(rank, answers, alike, errors)
        for rank in pending
        if rank in answers and rank not in errors
    }
    waiting = {rank: wait for rank, wait in waits.items() if wait and wait.seconds >= waited_s}
    if not waiting:
        return None
    missing = {other for wait in waiting.values() for other in wait.missing} - waiting.keys()
    parts = [
        *(_describe_error(errors[rank]) for rank in sorted(errors)),
        *_describe_waits(waiting),
        *(
            _describe_peer(rank, ranks, pending, answers)
            for rank in sorted(missing - errors.keys())
        ),
    ]
    return Hang(
        waiting_ranks=tuple(sorted(waiting)),
        missing_ranks=tuple(sorted(missing)),
        description="; ".join(parts),
    )


def _find_wait(
    rank: int,
    answers: Mapping[int, RankActivityReply],
    alike: Mapping[_Counts, Sequence[int]],
    errors: Mapping[int, RankError],
) -> _WaitingRank | None:
    """Return where, how long and for which ranks a rank waits; None if nothing indicates a wait."""
    here = answers[rank]
    standing = here["standing"]
    if standing["waits_for"]:
        return _WaitingRank(
            describe_position(here), standing["still_s"], tuple(standing["missing"])
        )
    behind = tuple(
        other
        for counts, others in alike.items()
        if _is_behind(dict(counts), standing["counts"])
        for other in others
    )
    if behind or here["collective"]:
        return _WaitingRank(describe_position(here), standing["still_s"], behind)
    if errors:
        return _WaitingRank(
            describe_position(here), standing["still_s"], tuple(errors), known=False
        )
    return None


def _group_by_counts(answers: Mapping[int, RankActivityReply]) -> dict[_Counts, list[int]]:
    """Group ranks by their collective counts; usually most ranks are in one group."""
    groups: dict[_Counts, list[int]] = {}
    for rank, answer in answers.items():
        groups.setdefault(frozenset(answer["standing"]["counts"].items()), []).append(rank)
    return groups


def describe_position(here: RankActivityReply) -> str:
    """Describe the position of a rank: "all_reduce at line 4"."""
    what = here["collective"] or here["called"] or here["source"]
    line = f"line {here['line']}" if here["line"] else ""
    return " at ".join(part for part in (what, line) if part) or "code outside the cell"


def _is_behind(peer_counts: Mapping[str, int], counts: Mapping[str, int]) -> bool:
    """Return whether a rank has begun fewer collectives of a group than another rank."""
    return any(peer_counts[name] < counts[name] for name in peer_counts.keys() & counts.keys())


def have_collectives_diverged(answers: Iterable[RankActivityReply]) -> bool:
    """Return whether ranks have begun different numbers of collectives of a group."""
    distinct = {frozenset(answer["standing"]["counts"].items()) for answer in answers}
    counts = [dict(items) for items in distinct]
    return any(_is_behind(theirs, ours) for theirs in counts for ours in counts)


def _describe_error(error: RankError) -> str:
    lines = [int(number) for item in error.traceback for number in _LINE.findall(strip_ansi(item))]
    where = f" at line {lines[-1]}" if lines else ""
    return f"rank {error.rank} raised {error.ename}{where}"


def _describe_waits(waiting: Mapping[int, _WaitingRank]) -> list[str]:
    """Describe waiting ranks, grouped by position."""
    places: dict[tuple[str, bool], list[int]] = {}
    for rank, wait in sorted(waiting.items()):
        places.setdefault((wait.place, wait.known), []).append(rank)
    parts = []
    for (where, known), ranks in places.items():
        longest = max(waiting[rank].seconds for rank in ranks)
        has = f"{rank_sets.describe_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"
        waited, been = f"waited {longest:.0f} s in {where}", f"been in {where} for {longest:.0f} s"
        parts.append(f"{has} {waited if known else been}")
    return parts


def _describe_peer(
    rank: int,
    ranks: Sequence[int],
    pending: Sequence[int],
    answers: Mapping[int, RankActivityReply],
) -> str:
    """Describe the position of a rank that others wait for."""
    if rank not in ranks:
        return f"rank {rank} does not run this cell"
    if rank not in pending:
        return f"rank {rank} has finished it"
    if rank not in answers:
        return f"the position of rank {rank} is unknown"
    return f"rank {rank} is in {describe_position(answers[rank])}"


_SAYS: dict[str, tuple[str, str]] = {
    "stopped": ("is stopped (SIGSTOP, state T)", "are stopped (SIGSTOP, state T)"),
    "running": ("holds the GIL and spins", "hold the GIL and spin"),
    "sleeping": ("holds the GIL and sleeps in C", "hold the GIL and sleep in C"),
    "": ("holds the GIL in C, or is stopped", "hold the GIL in C, or are stopped"),
}


def described(
    ranks: Sequence[int],
    *,
    answers: Mapping[int, RankActivityReply],
    silent: Mapping[int, float],
    states: Mapping[int, State],
) -> str:
    """Describe for each rank whether it spins, sleeps, holds the GIL or is stopped, and where.

    Args:
        ranks: ranks to describe.
        answers: last reply of each rank.
        silent: seconds since a rank should have replied.
        states: states of the processes that do not reply.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        if rank in silent:
            verbs = _SAYS[states.get(rank, "")]
            where = f", last seen in {describe_position(answers[rank])}" if rank in answers else ""
            key = (*verbs, f" and has not answered for {silent[rank]:.0f} s{where}")
        elif rank not in answers:
            continue
        else:
            standing, where = answers[rank]["standing"], f" in {describe_position(answers[rank])}"
            if standing["still_s"] < HANG_AFTER_S:
                key = ("is", "are", where)
            elif standing["sleeps"]:
                key = ("sleeps", "sleep", where)
            else:
                key = ("spins", "spin", where)
        groups.setdefault(key, []).append(rank)
    parts = []
    for (alone, several, where), members in groups.items():
        verb = alone if len(members) == 1 else several
        parts.append(f"{rank_sets.describe_ranks(members)} {verb}{where}")
    return "; ".join(parts)
