"""After a cell that was stopped or failed: are the ranks still in step? Runs in the kernel.

A collective that one rank has begun and another has not leaves their group out of step: the
next one would pair with it. So the ranks' counts are compared, and where they differ, or where
a connection was lost, the groups are made anew.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from nbdist import wire
from nbdist.kernel import tracebacks
from nbdist.kernel.standstill import apart
from nbdist.kernel.status_line import StatusLine

if TYPE_CHECKING:
    from nbdist.kernel.gang import Gang
    from nbdist.kernel.ladder import Ladder

_eras = itertools.count(1)


def settle(ladder: Ladder, gang: Gang, *, world_size: int) -> str:
    """See that the ranks are in step, or make their groups anew; returns what was done, in words.

    Raises:
        RankDied: a rank ended.
        SessionError: a rank does not answer.
    """
    cell = ladder.cell
    if world_size == 1 or cell.death is not None or not (cell.errors or ladder.rung != "none"):
        return ""
    broken = ladder.rung == "freed" or any(
        group.kind == "secondary" for group in tracebacks.grouped(list(cell.errors.values()))
    )
    ranks = range(world_size)
    if not broken:
        broken = apart(gang.ask(ranks, wire.WHERE, {}, channel="control").values())
    return renew(gang, world_size=world_size) if broken else ""


def renew(gang: Gang, *, world_size: int) -> str:
    """Make the process groups of all ranks anew, and the prepared models on them.

    Where that does not work, cells run on without collectives: their variables can be saved.
    """
    with StatusLine() as line:
        line.show("nbdist: making the process group anew")
        request: Any = wire.RenewRequest(era=next(_eras))
        replies = gang.ask(range(world_size), wire.RENEW, request, all_or_error=True)
        failed = {rank: one["error"] for rank, one in replies.items() if one["status"] == "error"}
        if failed:
            why = " / ".join(dict.fromkeys(failed.values())).removesuffix(".")
            said = (
                f"the process group is broken and could not be made anew: {why}. Variables are"
                " still there; %nbdist restart takes new ranks"
            )
        else:
            said = _in_words(replies[0]["report"])
        line.show(f"nbdist: {said}")
    return said


def _in_words(report: dict[str, Any]) -> str:
    said = [f"the process group was made anew and proven in {report['seconds']:.1f} s"]
    if report["bound"]:
        said += [f"{', '.join(report['bound'])} can be used again"]
    if report["stale"]:
        said += [f"{', '.join(report['stale'])}: of the old group, make them again"]
    return "; ".join([*said, *report["notes"]])
