"""A request that all ranks do together; runs in the notebook's kernel.

Watched as a cell is: who waits for whom is told after a few seconds, ranks that wait for one that
has failed are freed, and Stop goes from stage to stage (`session.interrupt`). On the ranks Stop is
heard where a phase ends (`worker.interrupt.interrupt_flag`); where that takes long, the phase is
cut.

A second Stop returns the prompt even if the ranks go on. The request is then `detached`: it stays
the session's `Gang.joint`, the reader thread watches it, a third Stop ends the ranks, and
`conclude` takes note of its end before the ranks are used again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets as rank_names
from nbdist.errors import CellInterrupted
from nbdist.output import tracebacks
from nbdist.protocol import messages
from nbdist.session.interrupt import Ladder
from nbdist.session.rank_activity import Whereabouts
from nbdist.session.suppress_interrupt import not_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.errors import NbdistError, RankDied
    from nbdist.session.interrupt import Kind
    from nbdist.session.worker_group import Gang

TICK_S = 0.2


def _nothing() -> None:
    """Do nothing."""


class Joint:
    """One request, on its way."""

    def __init__(
        self,
        gang: Gang,
        ranks: Sequence[int],
        kind: str,
        *,
        raises: type[NbdistError],
        show: Callable[[str], object],
        stoppable: bool = True,
        alone: bool = False,
    ) -> None:
        """Know what is to be asked.

        Args:
            gang: the ranks.
            ranks: all of them.
            kind: of the request.
            raises: how a failure is told.
            show: gets a line when ranks wait for one another, or Stop was pressed.
            stoppable: whether a first Stop has an effect but a word of why not.
            alone: a rank that fails says so at once, and the others need not come to an end.
        """
        self.ranks = tuple(ranks)
        self.requests: dict[int, str] = {}
        self.errors: dict[int, messages.RankError] = {}
        self.finished = threading.Event()
        self.death: RankDied | None = None
        self.interrupted_at = 0.0
        """Unix seconds of when it was first asked to stop; 0: it was not."""
        self.notice = ""
        self.detached = False
        """Whether the prompt was returned before all ranks had answered."""
        self.late: Callable[[], object] = _nothing
        """Called by `conclude` where a detached request went through on all ranks."""
        self.gang, self._kind, self._raises, self._show = gang, kind, raises, show
        self._alone = alone
        self._whereabouts = Whereabouts(gang)
        watched: Kind = "request" if stoppable else "repair"
        self.ladder = Ladder(
            self, gang, self._whereabouts, world_size=len(self.ranks), kind=watched
        )
        self._replies: dict[int, Any] = {}
        self._pressed = self._taken = 0
        """How often Stop was pressed on this thread, and how many of those the ladder knows of."""

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks that have not answered yet."""
        return tuple(rank for rank in self.ranks if rank not in self._replies)

    running = pending

    @property
    def what(self) -> str:
        """The request in words: "the switch"."""
        return f"the {self._kind.split('_')[1]}"

    def ask(self, content: Any) -> dict[int, Any]:
        """Ask the ranks; returns their replies once all have done it.

        Raises:
            NbdistError: of the type given: what failed first, and on which rank.
            CellInterrupted: Stop has ended it, or has returned the prompt.
            RankDied: a rank ended.
        """
        self.gang.joint = self
        try:
            with not_stopped(self._press):
                request = self.gang.post(self.ranks, "shell", self._kind, content, self._take)
                self.requests.update(dict.fromkeys(self.ranks, request))
                self.gang.wake()
                self._wait()
                problem = "" if self.detached else self._problem()
        finally:
            if not self.detached:
                self._forget()
        if self.detached:
            raise CellInterrupted(self.busy_words())
        if self.errors:
            self._raise(problem)
        return self._replies

    def busy_words(self) -> str:
        """Say that it goes on, and what can be done."""
        where = self.ladder.where() or f"{rank_names.words(self.pending)} did not stop"
        return (
            f"{self.what} goes on: {where}. Until it has ended the ranks can do nothing else:"
            " %nbdist interrupt ends the ranks, %nbdist restart takes new ones, and %nbdist load"
            " the last checkpoint."
        )

    def conclude(self) -> None:
        """Take note of the end of a detached request, and have the ranks in step again."""
        self._forget()
        self._problem()
        if not self.errors:
            self.late()

    def stop(self) -> None:
        """Stop was pressed; from any thread."""
        self.ladder.stop()

    def _press(self) -> None:
        """Stop was pressed on the thread that waits, which may hold any lock."""
        self._pressed += 1

    def _wait(self) -> None:
        """Return when all ranks have answered, or when a second Stop returns the prompt."""
        shown = ""
        while not self.finished.wait(TICK_S):
            self.gang.check_up(self._kind)
            while self._taken < self._pressed:
                self._taken += 1
                self.ladder.stop()
            self.gang.wake()  # the reader thread watches
            if self.notice and self.notice != shown:
                shown = self.notice
                self._show(shown)
            if self.ladder.returns_prompt:
                self.detached = True
                return

    def _forget(self) -> None:
        self.gang.forget(set(self.requests.values()))
        self._whereabouts.forget()
        if self.gang.joint is self:
            self.gang.joint = None

    def _take(self, rank: int, channel: Channel, message: Message) -> None:
        """Take a reply, on the reader thread."""
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
        """What else is wrong after a failure, in words."""
        return ""

    def _raise(self, problem: str) -> None:
        """Raise what failed first, for those that it left alone say nothing of their own."""
        first = tracebacks.grouped(list(self.errors.values()))[0].error
        words = f"rank {first.rank}: {first.evalue}"
        if {error.evalue for error in self.errors.values()} == {first.evalue}:
            words = first.evalue
        if first.is_stop:
            words = f"{self.what} was stopped"
        if problem:
            words = f"{words.removesuffix('.')}; {problem}"
        if self.ladder.stops and threading.current_thread() is threading.main_thread():
            raise CellInterrupted(words)
        raise self._raises(words)
