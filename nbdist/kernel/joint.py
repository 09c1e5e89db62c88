"""A request that all ranks do together; runs in the notebook's kernel.

Watched as a cell is: who waits for whom is told after a few seconds, ranks that wait for one that
has failed are freed, and Stop goes from rung to rung. On the ranks Stop is heard where a phase
ends (`rank.stops`); where that takes long, or nothing moves, the phase is cut.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist import ranks as rank_names
from nbdist import wire
from nbdist.errors import CellInterrupted
from nbdist.kernel import tracebacks
from nbdist.kernel.ladder import END_AFTER_S, FREE_AFTER_S, LEFT_AFTER_S, Ladder
from nbdist.kernel.unstopped import not_stopped
from nbdist.kernel.whereabouts import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.engines.channel import Channel, Message
    from nbdist.errors import NbdistError, RankDied
    from nbdist.kernel.gang import Gang

TICK_S = 0.2
CUT_AFTER_S = 4.0
"""A phase that has not ended so long after Stop is cut."""
STILL_S = 1.5
"""Ranks that have stood at one place for so long, all of them, do not get on."""
AGAIN_S = 1.5
"""Ranks that were freed and have not answered are cut off once more: code of the user's may have
swallowed the interrupt, or two of them came as one on a machine in use."""


class Joint:
    """One request, on its way; `kernel.ladder` watches it as it watches a cell."""

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
            stoppable: whether Stop has an effect but a word of why not.
            alone: a rank that fails says so at once, and the others need not come to an end.
        """
        self.ranks = tuple(ranks)
        self.requests: dict[int, str] = {}
        self.errors: dict[int, wire.RankError] = {}
        self.finished = threading.Event()
        self.death: RankDied | None = None
        self.interrupted_at = 0.0
        """Unix seconds of when it was first asked to stop; 0: it was not."""
        self.notice = ""
        self.gang, self._kind, self._raises, self._show = gang, kind, raises, show
        self._stoppable, self.alone = stoppable, alone
        self.ladder = _Ladder(self, gang, Whereabouts(gang), world_size=len(self.ranks))
        self._answers: SimpleQueue[tuple[int, Channel, Message]] = SimpleQueue()
        self._replies: dict[int, Any] = {}
        self._pressed = self._taken = 0
        """How often Stop was pressed, and how many of those the ladder knows of."""

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks that have not answered yet."""
        return tuple(rank for rank in self.ranks if rank not in self._replies)

    running = pending

    def ask(self, content: Any) -> dict[int, Any]:
        """Ask the ranks; returns their replies once all have done it.

        Raises:
            NbdistError: of the type given: what failed first, and on which rank.
            CellInterrupted: Stop has ended it.
            RankDied: a rank ended.
        """
        self.gang.joint = self
        try:
            with not_stopped(self._press):
                request = self.gang.post(
                    self.ranks, "shell", self._kind, content, lambda *one: self._answers.put(one)
                )
                self.requests.update(dict.fromkeys(self.ranks, request))
                self.gang.wake()
                while self.pending and not (self.alone and self.errors):
                    self._take()
                    self._watch()
                self.finished.set()
                problem = self._problem()
        finally:
            self.gang.forget(set(self.requests.values()))
            self.gang.joint = None
        if self.errors:
            self._raise(problem)
        return self._replies

    def stop(self) -> None:
        """Stop was pressed; from any thread."""
        self._pressed += 1

    def _press(self) -> None:
        if self._stoppable:
            self.stop()
        else:
            self._show("cannot be stopped half-way")

    def _take(self) -> None:
        try:
            rank, channel, message = self._answers.get(timeout=TICK_S)
        except Empty:
            self.gang.check_up(self._kind)
            return
        if channel != "shell":
            return
        reply = self._replies[rank] = message["content"]
        if reply["status"] == "error":
            self.errors[rank] = wire.RankError(
                rank=rank,
                ename=reply.get("ename", self._raises.__name__),
                evalue=reply["error"],
                traceback=[f"{reply.get('ename', '')}: {reply['error']}"],
                at=message["header"]["date"].timestamp(),
            )

    def _watch(self) -> None:
        """Go on with Stop, and say who waits for whom."""
        while self._taken < self._pressed:
            self._taken += 1
            if self.ladder.stop() == "end":
                left = rank_names.words(self.pending)
                msg = f"{left} did not stop: %nbdist restart takes new ranks, and %nbdist load the"
                raise CellInterrupted(f"{msg} last checkpoint.")
        before = self.notice
        self.ladder.tick()
        if self.notice and self.notice != before:
            self._show(self.notice)

    def _problem(self) -> str:
        """What else is wrong after a failure, in words."""
        return ""

    def _raise(self, problem: str) -> None:
        """Raise what failed first, for those that it left alone say nothing of their own."""
        first = tracebacks.grouped(list(self.errors.values()))[0].error
        words = f"rank {first.rank}: {first.evalue}"
        if {one.evalue for one in self.errors.values()} == {first.evalue}:
            words = first.evalue
        if first.is_stop:
            words = f"the {self._kind.split('_')[1]} was stopped"
        if problem:
            words = f"{words.removesuffix('.')}; {problem}"
        if self._pressed and threading.current_thread() is threading.main_thread():
            raise CellInterrupted(words)
        raise self._raises(words)


class _Ladder(Ladder):
    """The way of a request to its end: one that works, if slowly, is not freed."""

    grace_s = 0.0
    unasked = False
    """Whether ranks that do not get on are stopped without Stop."""
    _cut = False
    _again_at = 0.0

    def _climb(self, now: float) -> None:
        super()._climb(now)
        if self.rung == "none" and self.unasked and self.standstill and self._may_free():
            self._ask(now)
        if self.rung == "asked" and not self._cut and now - self._asked_at > CUT_AFTER_S:
            self._cut = True
            self._stop_after(0)
        if self.rung == "freed" and now - max(self._freed_at, self._again_at) > AGAIN_S:
            self._again_at = now
            self._cut_off()

    @property
    def _patience_s(self) -> float:
        """A rank that has failed cannot come any more."""
        left_alone = len(self.cell.running) < len(self.cell.ranks)
        return LEFT_AFTER_S if left_alone else FREE_AFTER_S

    def _may_free(self) -> bool:
        """Whether nothing moves: of ranks in step some may wait for one that works."""
        answers = self._whereabouts.now()
        found = [answers[rank]["standing"] for rank in self.cell.running if rank in answers]
        still = all(one["idle"] and one["still_s"] > STILL_S for one in found)
        return still and len(found) == len(self.cell.running)

    def _words(self, now: float) -> str:
        words = super()._words(now)
        if self.rung == "freed" and now - self._freed_at >= END_AFTER_S:
            left = rank_names.words(self.cell.running)
            return f"{left} did not stop. Stop again waits no longer."
        return words
