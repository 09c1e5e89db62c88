"""After a cell that was stopped or failed: are the ranks still in step? Runs in the kernel.

A collective that one rank has begun and another has not leaves their group out of step: the
next one would pair with it. So the ranks' counts are compared, and where they differ, or where
a connection was lost, the groups are made anew. An engine that was cut short in a pass is made
anew too.
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
    """See that the ranks are in step, or make them so; returns what went wrong with it.

    Raises:
        RankDied: a rank ended.
        SessionError: a rank does not answer.
    """
    cell = ladder.cell
    if cell.death is not None or not (cell.errors or ladder.rung != "none"):
        return ""
    broken = ladder.rung == "freed" or any(
        group.kind == "secondary" for group in tracebacks.grouped(list(cell.errors.values()))
    )
    answers = gang.ask(range(world_size), wire.WHERE, {}, channel="control").values()
    broken = broken or apart(answers)
    if not broken and not any(one["standing"]["midway"] for one in answers):
        return ""
    return renew(gang, world_size=world_size, groups=broken)


def renew(gang: Gang, *, world_size: int, groups: bool) -> str:
    """Make the prepared models of all ranks anew, and the process groups where asked.

    Returns what went wrong; "" where all is ready.

    Where that does not work, cells run on without collectives: their variables can be saved.
    """
    with StatusLine() as line:
        line.show("nbdist: making the ranks ready again")
        request: Any = wire.RenewRequest(era=next(_eras), groups=groups)
        replies = gang.ask(range(world_size), wire.RENEW, request, all_or_error=True)
        failed = {rank: one["error"] for rank, one in replies.items() if one["status"] == "error"}
        if failed and not groups and all(replies[rank]["broken"] for rank in failed):
            return renew(gang, world_size=world_size, groups=True)
        if failed:
            why = " / ".join(dict.fromkeys(failed.values())).removesuffix(".")
            problem = (
                f"the ranks could not be made ready again: {why}. Plain variables are still there;"
                " %nbdist restart takes new ranks, and %nbdist load the last checkpoint"
            )
            line.show(f"nbdist: {problem}")
            return problem
        line.show(f"nbdist: {_in_words(replies[0]['report'], groups=groups)}")
        return ""


def _in_words(report: dict[str, Any], *, groups: bool) -> str:
    said = []
    if groups:
        said += [f"the process group was made anew and proven in {report['seconds']:.1f} s"]
    if report["bound"]:
        said += [f"{', '.join(report['bound'])} can be used again"]
    if report["stale"]:
        said += [f"{', '.join(report['stale'])}: of the old group, make them again"]
    return "; ".join(said) or "the ranks are ready again"
