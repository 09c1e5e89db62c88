"""Who waits for whom in a cell that does not get on, in words; pure.

Runs in the notebook's kernel. "rank 0 raised ValueError at line 3; ranks 1-3 have waited 4 s in
all_reduce at line 4."
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nbdist import rank_sets as rank_names
from nbdist.output.ansi import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.protocol.messages import RankError, WhereReply

WAITED_S = 3.0
"""Ranks may wait for one another for so long without a word about it."""

_Counts = frozenset[tuple[str, int]]
"""Collectives that have begun, by process group."""
_LINE = re.compile(r"Cell In\[\d+\], line (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A cell in which ranks wait for others."""

    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks that are waited for, as far as it is known."""
    words: str


@dataclass(frozen=True, slots=True)
class _Wait:
    """One rank that waits."""

    place: str
    seconds: float
    missing: tuple[int, ...]
    """Ranks that it waits for, as far as it is known."""
    known: bool = True
    """Whether it waits for sure: else others have failed, and it stays at one line."""


def standstill(
    ranks: Sequence[int],
    *,
    answers: Mapping[int, WhereReply],
    pending: Sequence[int],
    errors: Mapping[int, RankError],
    waited_s: float | None = None,
) -> Standstill | None:
    """Look whether ranks of a cell wait for others; None where they do not, or not for long.

    A rank waits if it stays at the same line and others have begun fewer collectives of a group
    that they share, or have failed, or if the line is inside a collective. How much CPU time it
    uses says nothing: while NCCL works, `cudaStreamSynchronize` spins.

    Args:
        ranks: those that run the cell.
        answers: where each rank of the session is.
        pending: those whose code has not ended.
        errors: of those that have failed.
        waited_s: how long they have waited at least. Default: `WAITED_S`.
    """
    alike = _alike(answers)
    waited_s = WAITED_S if waited_s is None else waited_s
    waits = {
        rank: _wait(rank, answers, alike, errors)
        for rank in pending
        if rank in answers and rank not in errors
    }
    waiting = {rank: wait for rank, wait in waits.items() if wait and wait.seconds >= waited_s}
    if not waiting:
        return None
    missing = {other for wait in waiting.values() for other in wait.missing} - waiting.keys()
    said = [
        *(_raised(errors[rank]) for rank in sorted(errors)),
        *_waited(waiting),
        *(_elsewhere(rank, ranks, pending, answers) for rank in sorted(missing - errors.keys())),
    ]
    return Standstill(
        waiting=tuple(sorted(waiting)), missing=tuple(sorted(missing)), words="; ".join(said)
    )


def _wait(
    rank: int,
    answers: Mapping[int, WhereReply],
    alike: Mapping[_Counts, Sequence[int]],
    errors: Mapping[int, RankError],
) -> _Wait | None:
    """What a rank waits in, for how long, and for whom; None where nothing says that it waits."""
    here = answers[rank]
    standing = here["standing"]
    if standing["waits_for"]:
        return _Wait(place(here), standing["still_s"], tuple(standing["missing"]))
    behind = tuple(
        other
        for counts, others in alike.items()
        if _is_behind(dict(counts), standing["counts"])
        for other in others
    )
    if behind or here["collective"]:
        return _Wait(place(here), standing["still_s"], behind)
    if errors:
        return _Wait(place(here), standing["still_s"], tuple(errors), known=False)
    return None


def _alike(answers: Mapping[int, WhereReply]) -> dict[_Counts, list[int]]:
    """Ranks that have begun the same collectives: of a thousand most have."""
    found: dict[_Counts, list[int]] = {}
    for rank, one in answers.items():
        found.setdefault(frozenset(one["standing"]["counts"].items()), []).append(rank)
    return found


def place(here: WhereReply) -> str:
    """Where a rank is: "all_reduce at line 4"."""
    what = here["collective"] or here["called"] or here["source"]
    line = f"line {here['line']}" if here["line"] else ""
    return " at ".join(part for part in (what, line) if part) or "code outside of the cell"


def _is_behind(theirs: Mapping[str, int], ours: Mapping[str, int]) -> bool:
    """Whether a rank has begun fewer collectives of a group than another."""
    return any(theirs[name] < ours[name] for name in theirs.keys() & ours.keys())


def apart(answers: Iterable[WhereReply]) -> bool:
    """Whether ranks have begun different numbers of collectives: their group is out of step."""
    counts = [
        dict(one) for one in {frozenset(one["standing"]["counts"].items()) for one in answers}
    ]
    return any(_is_behind(one, other) for one in counts for other in counts)


def _raised(error: RankError) -> str:
    lines = [int(found) for item in error.traceback for found in _LINE.findall(plain(item))]
    where = f" at line {lines[-1]}" if lines else ""
    return f"rank {error.rank} raised {error.ename}{where}"


def _waited(waiting: Mapping[int, _Wait]) -> list[str]:
    """Say it once for ranks that wait at the same place."""
    places: dict[tuple[str, bool], list[int]] = {}
    for rank, wait in sorted(waiting.items()):
        places.setdefault((wait.place, wait.known), []).append(rank)
    said = []
    for (where, known), ranks in places.items():
        longest = max(waiting[rank].seconds for rank in ranks)
        has = f"{rank_names.words(ranks)} {'has' if len(ranks) == 1 else 'have'}"
        waited, been = f"waited {longest:.0f} s in {where}", f"been in {where} for {longest:.0f} s"
        said.append(f"{has} {waited if known else been}")
    return said


def _elsewhere(
    rank: int, ranks: Sequence[int], pending: Sequence[int], answers: Mapping[int, WhereReply]
) -> str:
    """Say where a rank is that others wait for."""
    if rank not in ranks:
        return f"rank {rank} does not run this cell"
    if rank not in pending:
        return f"rank {rank} has finished it"
    if rank not in answers:
        return f"rank {rank} does not say where it is"
    return f"rank {rank} is in {place(answers[rank])}"


State = Literal["stopped", "running", "sleeping", ""]
"""Of a process that does not answer; "" where it is not known, as on another node."""

_SAYS: dict[str, tuple[str, str]] = {
    "stopped": ("is stopped (SIGSTOP, state T)", "are stopped (SIGSTOP, state T)"),
    "running": ("holds the GIL and spins", "hold the GIL and spin"),
    "sleeping": ("holds the GIL and sleeps in C", "hold the GIL and sleep in C"),
    "": ("holds the GIL in C, or is stopped", "hold the GIL in C, or are stopped"),
}


def described(
    ranks: Sequence[int],
    *,
    answers: Mapping[int, WhereReply],
    silent: Mapping[int, float],
    states: Mapping[int, State],
) -> str:
    """Say of each rank whether it spins, sleeps in C, holds the GIL or is stopped, and where.

    Args:
        ranks: those to describe.
        answers: where each rank is, or was when it answered last.
        silent: for how many seconds ranks have not answered.
        states: of the processes that do not answer.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        if rank in silent:
            verbs = _SAYS[states.get(rank, "")]
            where = f", last seen in {place(answers[rank])}" if rank in answers else ""
            key = (*verbs, f" and has not answered for {silent[rank]:.0f} s{where}")
        elif rank not in answers:
            continue
        else:
            standing, where = answers[rank]["standing"], f" in {place(answers[rank])}"
            if standing["still_s"] < WAITED_S:
                key = ("is", "are", where)
            elif standing["sleeps"]:
                key = ("sleeps", "sleep", where)
            else:
                key = ("spins", "spin", where)
        groups.setdefault(key, []).append(rank)
    said = []
    for (alone, several, where), members in groups.items():
        verb = alone if len(members) == 1 else several
        said.append(f"{rank_names.words(members)} {verb}{where}")
    return "; ".join(said)
