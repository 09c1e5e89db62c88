"""A request for an operation of all ranks; runs in the notebook's kernel.

Watched like a cell: blocked ranks are reported after a few seconds, ranks that wait for a failed
one are interrupted, and interrupts escalate in stages (`session.interrupt`). Ranks handle an
interrupt at the end of a phase (`worker.operations.collective_phases`); a phase that takes too
long is cut short.

A second interrupt returns the prompt even if the ranks continue. The request is then `detached`:
it stays the worker group's current request, the reader thread watches it, a third interrupt ends
the ranks, and `conclude` handles its end before the ranks are used again.

After an interrupt or an error the ranks are resynchronized. If one rank has begun a collective and
another has not, the next collective would be matched with it. The ranks' counts are compared, and
if they differ, or a connection was lost, new process groups are created. Backends that were
interrupted during a training step are rebuilt too.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Generic

from nbdist import rank_sets
from nbdist.errors import CellInterrupted, RankDied, SessionError, SwitchError
from nbdist.output import tracebacks
from nbdist.protocol import messages, operations
from nbdist.protocol.operations import ReportT, RequestT
from nbdist.session.interrupt import (
    InterruptEscalation,
    Interruptible,
    InterruptStage,
    release_request,
)
from nbdist.session.progress import StatusLine
from nbdist.session.rank_activity import RankActivityPoller, have_collectives_diverged
from nbdist.signal_handling import suppress_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.session.worker_group import WorkerGroup

TICK_S = 0.2
ANSWER_S = 10.0
"""Timeout for a rank's control thread; only a stopped rank, or one that holds the GIL, is slow."""
_eras = itertools.count(1)


class CollectiveRequest(Interruptible, Generic[RequestT, ReportT]):
    """One request to all ranks.

    Args:
        workers: the worker group.
        operation: what the ranks do.
        show: called with the name of each phase, and with a line when ranks block others, or
            after an interrupt; on any thread.
        stoppable: whether the first interrupt has an effect beyond a message.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        operation: operations.Operation[RequestT, ReportT],
        show: Callable[[str], object],
        *,
        stoppable: bool = True,
    ) -> None:
        super().__init__(range(workers.world_size))
        self.detached = False
        """True if the prompt was returned before all ranks had replied."""
        self.late: Callable[[], object] | None = None
        """Called by `conclude` if a detached request succeeded on all ranks."""
        self._workers, self._operation, self._show = workers, operation, show
        self._rank_activity = RankActivityPoller(workers)
        self.escalation = InterruptEscalation(
            self, workers, self._rank_activity, kind="request" if stoppable else "repair"
        )
        self._replies: dict[int, Message] = {}
        self._interrupts: list[bool] = []
        """An item for each interrupt on this thread that was not escalated yet."""

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks that have not replied yet."""
        return tuple(rank for rank in self.ranks if rank not in self._replies)

    @property
    def errors(self) -> dict[int, messages.RankError]:
        """Errors by rank."""
        return {
            rank: messages.RankError.from_message(rank, self._replies[rank])
            for rank in self.ranks
            if rank in self._replies and self._replies[rank]["content"]["status"] == "error"
        }

    def run(self, content: RequestT) -> list[ReportT]:
        """Send the request; return the reports of all ranks, in rank order.

        Raises:
            NbdistError: of type `Operation.raises`: the first error, and its rank.
            CellInterrupted: an interrupt ended the request, or returned the prompt.
            RankDied: a rank ended.
        """
        self._workers.collective_request = self
        try:
            # It may be called while this thread holds any lock: `_wait` escalates the interrupt.
            with suppress_interrupt(lambda: self._interrupts.append(True)):
                self.request_id = self._workers.send_request(
                    self.ranks,
                    "shell",
                    self._operation.message_type,
                    asdict(content),
                    self._on_reply,
                )
                self._wait()
                problem = "" if self.detached else self._resync()
        finally:
            if not self.detached:
                self._drop_requests()
        if self.detached:
            raise CellInterrupted(self.busy_message())
        if self.errors:
            self._raise(problem)
        reports = (self._replies[rank]["content"]["report"] for rank in self.ranks)
        return [self._operation.report(**report) for report in reports]

    def busy_message(self) -> str:
        """Return an error message: the request is still running, and what to do."""
        where = self.escalation.where() or f"{rank_sets.describe_ranks(self.pending)} did not stop"
        return (
            f"The {self._operation.name} is still running: {where}. The ranks are busy until it"
            " ends. Use %nbdist interrupt to end the ranks, or %nbdist restart to start new ones"
            " and %nbdist load to load the last checkpoint."
        )

    def conclude(self) -> None:
        """Handle the end of a detached request; resynchronize the ranks if needed."""
        self._drop_requests()
        self._resync()
        if not self.errors and self.late is not None:
            self.late()

    def show_progress(self, text: str) -> None:
        """Show a progress text of rank 0; on the reader thread."""
        if not self.detached:
            self._show(text)

    def _wait(self) -> None:
        """Return when all ranks have replied, or when a second interrupt returns the prompt."""
        shown = ""
        while not self.finished.wait(TICK_S):
            self._workers.cancel_unanswerable(self._operation.message_type)
            while self._interrupts:
                self._interrupts.pop()
                self.escalation.escalate()
            self._workers.wake()  # lets the reader thread tick
            if self.notice and self.notice != shown:
                shown = self.notice
                self._show(shown)
            if self.escalation.returns_prompt:
                self.detached = True
                return

    def _drop_requests(self) -> None:
        self._workers.drop_requests({self.request_id})
        self._rank_activity.clear()
        if self._workers.collective_request is self:
            self._workers.collective_request = None

    def _on_reply(self, rank: int, channel: Channel, message: Message) -> None:
        if channel != "shell":
            return
        self._replies[rank] = message
        if not self.pending or (self._operation.fails_alone and self.errors):
            self.finished.set()

    def _resync(self) -> str:
        """Resynchronize the ranks after a failure. Returns an error message, or ""."""
        running = self.escalation.stage is InterruptStage.RUNNING
        if not self._operation.resync or (running and not self.errors):
            return ""
        if self.errors:
            first = tracebacks.group_errors(list(self.errors.values()))[0]
            if running and first.ranks == self.ranks and first.kind == "cause":
                return ""  # all ranks raised it in agreement
        try:
            return resync_ranks(self.escalation, self._workers, midway=False)
        except RankDied:
            raise
        except SessionError as error:
            return f"{error} Use %nbdist restart to start new ranks"

    def _raise(self, problem: str) -> None:
        """Raise the first error; others are usually its consequence."""
        first = tracebacks.group_errors(list(self.errors.values()))[0].error
        words = f"rank {first.rank}: {first.evalue}"
        if {error.evalue for error in self.errors.values()} == {first.evalue}:
            words = first.evalue
        if first.is_interrupt:
            words = f"The {self._operation.name} was interrupted"
        if problem:
            words = f"{words.removesuffix('.')}; {problem}"
        if self.escalation.num_interrupts and threading.current_thread() is threading.main_thread():
            raise CellInterrupted(words)
        raise self._operation.raises(words)


def resync_ranks(
    escalation: InterruptEscalation, workers: WorkerGroup, *, midway: bool = True
) -> str:
    """Resynchronize the ranks if needed. Returns an error message, or "".

    Args:
        escalation: escalation of the cell or request.
        workers: the worker group.
        midway: also rebuild a backend that was interrupted during a training step.

    Raises:
        RankDied: a rank ended.
        SessionError: a rank does not reply.
    """
    work = escalation.work
    stopped = escalation.stage is not InterruptStage.RUNNING
    if work.failure is not None or not (work.errors or stopped):
        return ""
    broken = escalation.stage is InterruptStage.ABORTED or any(
        group.kind == "secondary" for group in tracebacks.group_errors(list(work.errors.values()))
    )
    answers = workers.request_all(
        range(workers.world_size),
        messages.RANK_ACTIVITY,
        {},
        channel="control",
        patience_s=ANSWER_S,
    ).values()
    broken = broken or have_collectives_diverged(answers)
    if not broken and not (midway and any(answer["standing"]["midway"] for answer in answers)):
        return ""
    return rebuild_models(workers, groups=broken)


def rebuild_models(workers: WorkerGroup, *, groups: bool) -> str:
    """Rebuild the prepared models of all ranks, and with `groups` the process groups.

    Returns an error message, or "". On failure cells still run, without collectives, so that
    variables can be saved.
    """
    with StatusLine() as line:
        line.show("recovering the ranks")
        request = CollectiveRequest(
            workers,
            operations.REBUILD_MODELS,
            lambda text: line.show(f"recovering the ranks: {text}"),
            stoppable=False,
        )
        try:
            if groups:
                # On all ranks first: under NCCL an unmatched collective would block the stream
                # on which the new group is tested. Aborting twice is safe.
                workers.request_all(
                    range(workers.world_size),
                    messages.ABORT_COLLECTIVES,
                    release_request(workers),
                    channel="control",
                    patience_s=ANSWER_S,
                )
            report = request.run(operations.RebuildRequest(era=next(_eras), groups=groups))[0]
        except RankDied:
            raise
        except (SessionError, SwitchError, CellInterrupted) as error:
            # The group failed, and not the ranks in agreement: these raise a SwitchError.
            is_group_broken = bool(request.errors) and all(
                rank_error.ename not in {"SwitchError", "KeyboardInterrupt"}
                for rank_error in request.errors.values()
            )
            if is_group_broken and not groups and not request.detached:
                return rebuild_models(workers, groups=True)
            problem = (
                f"the ranks could not be recovered: {str(error).removesuffix('.')}. Plain variables"
                " are kept; use %nbdist restart to start new ranks and %nbdist load to load the"
                " last checkpoint"
            )
            line.show(problem)
            return problem
        done = []
        if groups:
            done += [f"new process group created and tested in {report.seconds:.1f} s"]
        if report.bound:
            done += [f"{', '.join(report.bound)} rebuilt"]
        if report.stale:
            done += [f"{', '.join(report.stale)} use the old process group: create them again"]
        line.show("; ".join(done) or "the ranks are ready")
        return ""
