"""After a cell that was stopped or failed: are the ranks still in step? Runs in the kernel.

A collective that one rank has begun and another has not leaves their group out of step: the
next one would pair with it. So the ranks' counts are compared, and where they differ, or where
a connection was lost, the groups are made anew. An engine that was cut short in a pass is made
anew too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from nbdist.errors import CellInterrupted, RankDied, SessionError, SwitchError
from nbdist.output import tracebacks
from nbdist.output.status_line import StatusLine
from nbdist.protocol import messages
from nbdist.session.collective_request import Joint
from nbdist.session.hang_detection import apart
from nbdist.session.interrupt import Stage, release_request

if TYPE_CHECKING:
    from nbdist.session.interrupt import Ladder
    from nbdist.session.worker_group import Gang

ANSWER_S = 10.0
"""For a rank's control thread to answer; only one that is stopped or holds the GIL takes long."""
_eras = itertools.count(1)


def settle(ladder: Ladder, gang: Gang, *, world_size: int, midway: bool = True) -> str:
    """See that the ranks are in step, or make them so; returns what went wrong with it.

    Args:
        ladder: of the cell or request.
        gang: the ranks.
        world_size: their number.
        midway: whether an engine that is in the middle of a pass is made anew too.

    Raises:
        RankDied: a rank ended.
        SessionError: a rank does not answer.
    """
    work = ladder.work
    stopped = ladder.stage is not Stage.RUNNING
    if work.death is not None or not (work.errors or stopped):
        return ""
    broken = ladder.stage is Stage.ABORTED or any(
        group.kind == "secondary" for group in tracebacks.grouped(list(work.errors.values()))
    )
    answers = gang.ask(
        range(world_size), messages.WHERE, {}, channel="control", patience_s=ANSWER_S
    ).values()
    broken = broken or apart(answers)
    if not broken and not (midway and any(one["standing"]["midway"] for one in answers)):
        return ""
    return renew(gang, world_size=world_size, groups=broken)


def renew(gang: Gang, *, world_size: int, groups: bool) -> str:
    """Make the prepared models of all ranks anew, and the process groups where asked.

    Returns what went wrong; "" where all is ready.

    Where that does not work, cells run on without collectives: their variables can be saved.

    Groups that are to be made anew are aborted first, on all ranks: under NCCL what is left of an
    unmatched collective would hold up the stream on which the new group is proven.
    """
    with StatusLine() as line:
        line.show("nbdist: making the ranks ready again")
        request: Any = messages.RenewRequest(era=next(_eras), groups=groups)
        joint = Joint(
            gang,
            range(world_size),
            messages.RENEW,
            raises=SwitchError,
            stoppable=False,
            show=lambda text: line.show(f"nbdist: making the ranks ready again: {text}"),
        )
        try:
            if groups:
                abort_groups(gang, world_size)
            replies = joint.ask(request)
        except RankDied:
            raise
        except (SessionError, SwitchError, CellInterrupted) as error:
            if not groups and not joint.detached and _is_broken(joint):
                return renew(gang, world_size=world_size, groups=True)
            why = str(error).removesuffix(".")
            problem = (
                f"the ranks could not be made ready again: {why}. Plain variables are still there;"
                " %nbdist restart takes new ranks, and %nbdist load the last checkpoint"
            )
            line.show(f"nbdist: {problem}")
            return problem
        line.show(f"nbdist: {_in_words(replies[0]['report'], groups=groups)}")
        return ""


def abort_groups(gang: Gang, world_size: int) -> None:
    """Have all ranks abort their process groups; once more does no harm.

    Raises:
        RankDied: a rank ended.
        SessionError: a rank could not, or does not answer.
    """
    ranks, request = range(world_size), release_request(gang)
    gang.ask(ranks, messages.RELEASE, request, channel="control", patience_s=ANSWER_S)


def _is_broken(joint: Joint) -> bool:
    """Whether it was the group that did not work: a SwitchError comes from ranks that agree."""
    return bool(joint.errors) and all(
        error.ename not in {"SwitchError", "KeyboardInterrupt"} for error in joint.errors.values()
    )


class Transaction(Joint):
    """A save, a load, a switch, an export: after a failure the ranks are in step again."""

    def _problem(self) -> str:
        """Have the ranks in step again where they may not be; what went wrong with that."""
        running = self.ladder.stage is Stage.RUNNING
        if self._alone or (running and not self.errors):
            return ""
        if self.errors:
            first = tracebacks.grouped(list(self.errors.values()))[0]
            if running and first.ranks == self.ranks and first.kind == "cause":
                return ""  # they have agreed on it
        try:
            return settle(self.ladder, self.gang, world_size=len(self.ranks), midway=False)
        except RankDied:
            raise
        except SessionError as error:
            return f"{error} %nbdist restart takes new ranks"


def _in_words(report: dict[str, Any], *, groups: bool) -> str:
    said = []
    if groups:
        said += [f"the process group was made anew and proven in {report['seconds']:.1f} s"]
    if report["bound"]:
        said += [f"{', '.join(report['bound'])} can be used again"]
    if report["stale"]:
        said += [f"{', '.join(report['stale'])}: of the old group, make them again"]
    return "; ".join(said) or "the ranks are ready again"
