"""A request that all ranks carry out together; runs in the notebook's kernel.

Watched like a cell: blocked ranks are reported after a few seconds, ranks that wait for a failed
one are interrupted, and interrupts escalate in stages (`session.interrupt`). Ranks handle an
interrupt at the end of a phase (`worker.interrupt.interrupt_flag`); a phase that takes too long is
cut short.

A second interrupt returns the prompt even if the ranks continue. The request is then `detached`:
it stays the worker group's current request, the reader thread watches it, a third interrupt ends
the ranks, and `conclude` handles its end before the ranks are used again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets as rank_names
from nbdist.errors import CellInterrupted
from nbdist.output import tracebacks
from nbdist.protocol import messages
from nbdist.session.interrupt import InterruptEscalation
from nbdist.session.rank_activity import RankActivityPoller
from nbdist.signals import suppress_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.errors import NbdistError, RankDied
    from nbdist.session.interrupt import Kind
    from nbdist.session.worker_group import WorkerGroup

TICK_S = 0.2


def _nothing() -> None:
    """Do nothing."""


class CollectiveRequest:
    """One request to all ranks.

    Args:
        workers: the worker group.
        ranks: all ranks.
        kind: message type of the request.
        raises: error type for failures.
        show: called with a line when ranks block others, or after an interrupt.
        stoppable: whether the first interrupt has an effect beyond a message.
        alone: a failing rank replies immediately, and the others need not finish.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        ranks: Sequence[int],
        kind: str,
        *,
        raises: type[NbdistError],
        show: Callable[[str], object],
        stoppable: bool = True,
        alone: bool = False,
    ) -> None:
        self.ranks = tuple(ranks)
        self.requests: dict[int, str] = {}
        self.errors: dict[int, messages.RankError] = {}
        self.finished = threading.Event()
        self.failure: RankDied | None = None
        self.interrupted_at = 0.0
        """Unix time of the first interrupt in seconds; 0 if there was none."""
        self.notice = ""
        self.detached = False
        """True if the prompt was returned before all ranks had replied."""
        self.late: Callable[[], object] = _nothing
        """Called by `conclude` if a detached request succeeded on all ranks."""
        self.worker_group, self._kind, self._raises, self._show = workers, kind, raises, show
        self._alone = alone
        self._rank_activity = RankActivityPoller(workers)
        watched: Kind = "request" if stoppable else "repair"
        self.escalation = InterruptEscalation(
            self, workers, self._rank_activity, world_size=len(self.ranks), kind=watched
        )
        self._replies: dict[int, Any] = {}
        self._pressed = self._taken = 0
        """Number of interrupts on this thread, and how many of them were escalated."""

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks that have not replied yet."""
        return tuple(rank for rank in self.ranks if rank not in self._replies)

    running = pending

    @property
    def what(self) -> str:
        """Name of the request in messages: "the switch"."""
        return f"the {self._kind.split('_')[1]}"

    def send_and_wait(self, content: Any) -> dict[int, Any]:
        """Send the request; return the replies when all ranks have finished.

        Raises:
            NbdistError: of type `raises`: the first error, and its rank.
            CellInterrupted: an interrupt ended the request, or returned the prompt.
            RankDied: a rank ended.
        """
        self.worker_group.collective_request = self
        try:
            with suppress_interrupt(self._press):
                request = self.worker_group.queue_request(
                    self.ranks, "shell", self._kind, content, self._take
                )
                self.requests.update(dict.fromkeys(self.ranks, request))
                self.worker_group.wake()
                self._wait()
                problem = "" if self.detached else self._problem()
        finally:
            if not self.detached:
                self._forget()
        if self.detached:
            raise CellInterrupted(self.busy_message())
        if self.errors:
            self._raise(problem)
        return self._replies

    def busy_message(self) -> str:
        """Return an error message: the request is still running, and what to do."""
        where = self.escalation.where() or f"{rank_names.describe_ranks(self.pending)} did not stop"
        return (
            f"{self.what.capitalize()} is still running: {where}. The ranks are busy until it ends."
            " Use %nbdist interrupt to end the ranks, or %nbdist restart to start new ones and"
            " %nbdist load to load the last checkpoint."
        )

    def conclude(self) -> None:
        """Handle the end of a detached request; resynchronize the ranks if needed."""
        self._forget()
        self._problem()
        if not self.errors:
            self.late()

    def tick(self) -> None:
        """Watch the interrupt; on the reader thread."""
        self.escalation.tick()

    def interrupt(self) -> None:
        """Handle an interrupt; callable from any thread."""
        self.escalation.escalate()

    def _press(self) -> None:
        """Count an interrupt; this may run while the waiting thread holds any lock."""
        self._pressed += 1

    def _wait(self) -> None:
        """Return when all ranks have replied, or when a second interrupt returns the prompt."""
        shown = ""
        while not self.finished.wait(TICK_S):
            self.worker_group.cancel_unanswerable(self._kind)
            while self._taken < self._pressed:
                self._taken += 1
                self.escalation.escalate()
            self.worker_group.wake()  # lets the reader thread tick
            if self.notice and self.notice != shown:
                shown = self.notice
                self._show(shown)
            if self.escalation.returns_prompt:
                self.detached = True
                return

    def _forget(self) -> None:
        self.worker_group.drop_requests(set(self.requests.values()))
        self._rank_activity.clear()
        if self.worker_group.collective_request is self:
            self.worker_group.collective_request = None

    def _take(self, rank: int, channel: Channel, message: Message) -> None:
        if channel != "shell":
            return
        reply = message["content"]
        if reply["status"] == "error":
            self.errors[rank] = messages.RankError(
                rank=rank,
                ename=reply.get("ename", self._raises.__name__),
                evalue=reply["error"],
                traceback=[f"{reply.get('ename', '')}: {reply['error']}"],
                at=message["header"]["date"].timestamp(),
            )
        self._replies[rank] = reply
        if not self.pending or (self._alone and self.errors):
            self.finished.set()

    def _problem(self) -> str:
        """Resynchronize the ranks after a failure. Returns an error message, or ""."""
        return ""

    def _raise(self, problem: str) -> None:
        """Raise the first error; others are usually its consequence."""
        first = tracebacks.group_errors(list(self.errors.values()))[0].error
        words = f"rank {first.rank}: {first.evalue}"
        if {error.evalue for error in self.errors.values()} == {first.evalue}:
            words = first.evalue
        if first.is_interrupt:
            words = f"{self.what.capitalize()} was interrupted"
        if problem:
            words = f"{words.removesuffix('.')}; {problem}"
        if self.escalation.stops and threading.current_thread() is threading.main_thread():
            raise CellInterrupted(words)
        raise self._raises(words)
