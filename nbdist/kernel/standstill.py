"""Who waits for whom in a cell that does not get on, in words; pure.

Runs in the notebook's kernel. "rank 0 raised ValueError at line 3; ranks 1-3 have waited 4 s in
all_reduce at line 4."
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist import ranks as rank_names
from nbdist.kernel.ansi import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.wire import RankError, WhereReply

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


def standstill(
    ranks: Sequence[int],
    *,
    answers: Mapping[int, WhereReply],
    pending: Sequence[int],
    errors: Mapping[int, RankError],
) -> Standstill | None:
    """Look whether ranks of a cell wait for others; None where they do not, or not for long.

    Args:
        ranks: those that run the cell.
        answers: where each rank of the session is.
        pending: those whose code has not ended.
        errors: of those whose code has raised.
    """
    alike = _alike(answers)
    waits = {rank: _wait(rank, answers, alike) for rank in pending if rank in answers}
    waiting = {rank: wait for rank, wait in waits.items() if wait and wait[1] >= WAITED_S}
    if not waiting:
        return None
    missing = {other for _, _, others in waiting.values() for other in others} - waiting.keys()
    said = [
        *(_raised(errors[rank]) for rank in sorted(errors)),
        *_waited(waiting),
        *(_elsewhere(rank, ranks, pending, answers) for rank in sorted(missing - errors.keys())),
    ]
    return Standstill(
        waiting=tuple(sorted(waiting)), missing=tuple(sorted(missing)), words="; ".join(said)
    )


def _wait(
    rank: int, answers: Mapping[int, WhereReply], alike: Mapping[_Counts, Sequence[int]]
) -> tuple[str, float, tuple[int, ...]] | None:
    """What a rank waits in, for how many seconds, and for whom; None where it gets on."""
    here = answers[rank]
    standing = here["standing"]
    if standing["waits_for"]:
        return place(here), standing["still_s"], tuple(standing["missing"])
    if not standing["idle"]:
        return None
    behind = tuple(
        other
        for counts, others in alike.items()
        if _is_behind(dict(counts), standing["counts"])
        for other in others
    )
    if not behind and not here["collective"]:
        return None
    return place(here), standing["still_s"], behind


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


def _waited(waiting: Mapping[int, tuple[str, float, tuple[int, ...]]]) -> list[str]:
    """Say it once for ranks that wait at the same place."""
    places: dict[str, list[int]] = {}
    for rank, (what, _, _) in sorted(waiting.items()):
        places.setdefault(what, []).append(rank)
    said = []
    for what, ranks in places.items():
        longest = max(waiting[rank][1] for rank in ranks)
        has = "has" if len(ranks) == 1 else "have"
        said.append(f"{rank_names.words(ranks)} {has} waited {longest:.0f} s in {what}")
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
