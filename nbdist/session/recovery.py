"""Resynchronizes the ranks after an interrupt or an error; runs in the notebook's kernel.

If one rank has begun a collective and another has not, their process group is out of sync: the
next collective would be matched with it. The ranks' counts are compared, and if they differ, or a
connection was lost, new groups are created. Backends that were interrupted during a training step
are rebuilt too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from nbdist.errors import CellInterrupted, RankDied, SessionError, SwitchError
from nbdist.output import tracebacks
from nbdist.output.status_line import StatusLine
from nbdist.protocol import messages
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.hang_detection import have_collectives_diverged
from nbdist.session.interrupt import Stage, release_request

if TYPE_CHECKING:
    from nbdist.session.interrupt import InterruptEscalation
    from nbdist.session.worker_group import WorkerGroup

ANSWER_S = 10.0
"""Timeout for a rank's control thread; only a stopped rank, or one that holds the GIL, is slow."""
_eras = itertools.count(1)


def resync_ranks(
    escalation: InterruptEscalation, workers: WorkerGroup, *, world_size: int, midway: bool = True
) -> str:
    """Resynchronize the ranks if needed. Returns an error message, or "".

    Args:
        escalation: escalation of the cell or request.
        workers: the worker group.
        world_size: number of ranks.
        midway: also rebuild a backend that was interrupted during a training step.

    Raises:
        RankDied: a rank ended.
        SessionError: a rank does not reply.
    """
    work = escalation.work
    stopped = escalation.stage is not Stage.RUNNING
    if work.failure is not None or not (work.errors or stopped):
        return ""
    broken = escalation.stage is Stage.ABORTED or any(
        group.kind == "secondary" for group in tracebacks.group_errors(list(work.errors.values()))
    )
    answers = workers.request_all(
        range(world_size), messages.RANK_ACTIVITY, {}, channel="control", patience_s=ANSWER_S
    ).values()
    broken = broken or have_collectives_diverged(answers)
    if not broken and not (midway and any(answer["standing"]["midway"] for answer in answers)):
        return ""
    return rebuild_models(workers, world_size=world_size, groups=broken)


def rebuild_models(workers: WorkerGroup, *, world_size: int, groups: bool) -> str:
    """Rebuild the prepared models of all ranks, and with `groups` the process groups.

    Returns an error message, or "". On failure cells still run, without collectives, so that
    variables can be saved.
    """
    with StatusLine() as line:
        line.show("nbdist: recovering the ranks")
        request: Any = messages.RebuildModelsRequest(era=next(_eras), groups=groups)
        collective_request = CollectiveRequest(
            workers,
            range(world_size),
            messages.REBUILD_MODELS,
            raises=SwitchError,
            stoppable=False,
            show=lambda text: line.show(f"nbdist: recovering the ranks: {text}"),
        )
        try:
            if groups:
                # On all ranks first: under NCCL an unmatched collective would block the stream
                # on which the new group is tested.
                abort_groups(workers, world_size)
            replies = collective_request.send_and_wait(request)
        except RankDied:
            raise
        except (SessionError, SwitchError, CellInterrupted) as error:
            if not groups and not collective_request.detached and _is_broken(collective_request):
                return rebuild_models(workers, world_size=world_size, groups=True)
            why = str(error).removesuffix(".")
            problem = (
                f"the ranks could not be recovered: {why}. Plain variables are kept; use %nbdist"
                " restart to start new ranks and %nbdist load to load the last checkpoint"
            )
            line.show(f"nbdist: {problem}")
            return problem
        line.show(f"nbdist: {_in_words(replies[0]['report'], groups=groups)}")
        return ""


def abort_groups(workers: WorkerGroup, world_size: int) -> None:
    """Abort the process groups of all ranks; safe to repeat.

    Raises:
        RankDied: a rank ended.
        SessionError: a rank failed to, or does not reply.
    """
    ranks, request = range(world_size), release_request(workers)
    workers.request_all(
        ranks, messages.ABORT_COLLECTIVES, request, channel="control", patience_s=ANSWER_S
    )


def _is_broken(request: CollectiveRequest) -> bool:
    """Return whether the process group failed: a SwitchError is raised by ranks in agreement."""
    return bool(request.errors) and all(
        error.ename not in {"SwitchError", "KeyboardInterrupt"} for error in request.errors.values()
    )


class TransactionalRequest(CollectiveRequest):
    """A save, load, switch or export; after a failure the ranks are resynchronized."""

    def _problem(self) -> str:
        running = self.escalation.stage is Stage.RUNNING
        if self._alone or (running and not self.errors):
            return ""
        if self.errors:
            first = tracebacks.group_errors(list(self.errors.values()))[0]
            if running and first.ranks == self.ranks and first.kind == "cause":
                return ""  # all ranks raised it in agreement
        try:
            return resync_ranks(
                self.escalation, self.worker_group, world_size=len(self.ranks), midway=False
            )
        except RankDied:
            raise
        except SessionError as error:
            return f"{error} Use %nbdist restart to start new ranks"


def _in_words(report: dict[str, Any], *, groups: bool) -> str:
    parts = []
    if groups:
        parts += [f"new process group created and tested in {report['seconds']:.1f} s"]
    if report["bound"]:
        parts += [f"{', '.join(report['bound'])} rebuilt"]
    if report["stale"]:
        parts += [f"{', '.join(report['stale'])} use the old process group: create them again"]
    return "; ".join(parts) or "the ranks are ready"
