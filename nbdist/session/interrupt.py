"""Stop, stage by stage, of a cell or of a request that all ranks do together; in the kernel.

    interrupted   KeyboardInterrupt on every rank, in training after the same optimizer step:
                  ends Python code, and collectives that Python waits for, with nothing broken
    aborted       the process groups of all ranks are aborted, which ends what waits in C for
                  another rank; `session.recovery` makes new groups afterwards
    ended         the ranks are ended: their variables are lost

Each Stop permits one stage more, whatever the ranks do, so Stop always ends: the second one
returns the prompt, the third ends the ranks. A Stop that comes before a stage had its time takes
effect after it.

Without a second Stop the groups are aborted only where there is evidence that an interrupted rank
waits for another one: it stays at the same line, and another rank has begun fewer collectives of
a shared group, has failed or ended, or the line is inside a collective. CPU time is no evidence: a
rank that waits for NCCL in `cudaStreamSynchronize` uses all of a core.

A rank that has failed while all others wait for it cannot come any more: its peers are
interrupted without a Stop.

`tick` runs on the reader thread, also for cells in the background; it sends, and never waits.
"""

from __future__ import annotations

import enum
import math
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nbdist import rank_sets as rank_names
from nbdist.protocol import messages
from nbdist.session.hang_detection import apart, described, standstill

if TYPE_CHECKING:
    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.errors import RankDied
    from nbdist.session.hang_detection import Standstill
    from nbdist.session.rank_activity import Whereabouts
    from nbdist.session.worker_group import Gang

TO_ABORT, TO_END = 2, 3
"""So many Stops permit it, whatever the ranks do."""
TICK_S = 0.1
LOOK_AFTER_S = 1.0
"""Ranks are first asked where they are so long after the beginning."""
LOOK_EVERY_S = 1.0
LOOK_SOON_S = 0.4
"""The same, once Stop was pressed."""
NEXT_STEP_S = 0.5
"""Ranks make a further optimizer step before they stop if it begins within this time."""
NEARER_S = 0.8
"""Ranks that have not stopped by then stop at the step that the first of them is at."""
ANSWER_S = 0.4
"""A rank that has not said its step by then holds the GIL in C, or is stopped."""
SECOND_AFTER_S = 1.0
"""An interrupt has at least this time, so that a double click aborts nothing."""
FREE_AFTER_S = 2.0
"""Ranks that were interrupted and wait in C are freed after this time."""
LEFT_AFTER_S = 1.0
"""The same where another rank has ended, and cannot come any more."""
STILL_S = 1.5
"""A rank that was interrupted and has been at one line for so long is in C."""
ALONE_S = 5.0
"""The same where nothing says that it waits for others but that they have ended."""
CUT_AFTER_S = 4.0
"""A phase of a request that has not ended so long after the first interrupt gets a second one."""
AGAIN_S = 1.5
"""A request whose groups were aborted is interrupted again and again: code of the user's may have
swallowed an interrupt, or two of them came as one on a machine in use."""
RETURN_AFTER_S = 3.0
"""A second Stop returns the prompt so long after the groups were aborted."""
END_AFTER_S = 3.0
"""A third Stop ends the ranks so long after the groups were aborted, at the earliest."""
GRACE_S = 3.0
"""Ranks that wait for one that has failed are interrupted after this time."""
SILENT_S = 5.0
"""A rank that has not answered for so long is named."""
REPAIR_S = 30.0
"""A repair in which no rank moves for so long is given up."""
_UNKNOWN = messages.HoldReply(begun=0, next_s=math.inf)
"""Of a rank that cannot say how far it is."""

Kind = Literal["cell", "request", "repair"]
"""What is stopped: a cell; a request whose ranks hear the first interrupt where a phase ends
(`worker.interrupt.interrupt_flag`); or a repair (of groups and engines), which must not be stopped
half-way: the first Stop does nothing, and it is given up without a Stop where no rank moves."""


class Stage(enum.IntEnum):
    """How far Stop has gone."""

    RUNNING = 0
    INTERRUPTED = 1
    ABORTED = 2
    ENDED = 3


class Watched(Protocol):
    """A cell, or a request that all ranks do together."""

    ranks: tuple[int, ...]
    requests: dict[int, str]
    """By rank, those that have been sent."""
    finished: threading.Event
    interrupted_at: float
    """Unix seconds of when it was first asked to stop; 0: it was not."""
    notice: str
    """Who waits for whom, in words."""
    death: RankDied | None

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks that have not answered."""

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks that are not at its end."""

    @property
    def errors(self) -> dict[int, messages.RankError]:
        """Of the ranks that failed."""


class Ladder:
    """The stages of one cell or request."""

    def __init__(
        self,
        work: Watched,
        gang: Gang,
        whereabouts: Whereabouts,
        *,
        world_size: int,
        kind: Kind = "cell",
    ) -> None:
        """Watch what has just been sent."""
        self.stage = Stage.RUNNING
        self.stops = 0
        """How often Stop was pressed, in whatever way."""
        self.standstill: Standstill | None = None
        """Who waits for whom; None where nobody does."""
        self.work, self._gang, self._whereabouts, self._kind = work, gang, whereabouts, kind
        self._world_size = world_size
        self._began = self._looked_at = time.monotonic()
        self._ticked_at = self._interrupted_at = self._aborted_at = self._repeated_at = 0.0
        self._stuck = ""
        """Which ranks were in C when the groups were aborted, and where."""
        self._not_aborted: dict[int, str] = {}
        """By rank, why its groups could not be aborted."""
        self._held_at = 0.0
        """Since when ranks are held at their next optimizer step; 0: they are not."""
        self._begun: dict[int, messages.HoldReply] = {}
        self._named = 0
        """The step after which all stop; 0 at once."""
        self._named_far = False
        """Whether all ranks make a further step, and no nearer one was named since."""
        self._failed_at: float | None = None
        self._ending = False
        self._lock = threading.Lock()

    def stop(self) -> Stage:
        """Stop was pressed; from any thread. Returns the stage that is reached now."""
        with self._lock:
            self.stops += 1
            if self.stage is Stage.ABORTED:
                self._abort_groups()
            self._advance(time.monotonic())
        self._end_ranks()
        return self.stage

    def tick(self) -> None:
        """Ask where the ranks are, enter the next stage where it is due, and say what is shown."""
        now = time.monotonic()
        with self._lock:
            over = self.work.finished.is_set() or self.stage is Stage.ENDED
            if over or now - self._ticked_at < TICK_S:
                return
            self._ticked_at = now
            every = LOOK_EVERY_S if self.stage is Stage.RUNNING else LOOK_SOON_S
            if now - self._began > LOOK_AFTER_S and now - self._looked_at >= every:
                self._looked_at = now
                self._whereabouts.ask(range(self._world_size))
            self.standstill = self._standstill()
            self._interrupt_again(now)
            self._advance(now)
            self.work.notice = self._words(now)
        self._end_ranks()

    @property
    def returns_prompt(self) -> bool:
        """Whether whoever waits for the ranks gets the prompt back, though they go on."""
        if self.stage is not Stage.ABORTED or self.stops >= TO_END:
            return False  # what ends the ranks ends the waiting too
        aborted_s = time.monotonic() - self._aborted_at
        given_up = self._kind == "repair" and aborted_s > 2 * SILENT_S
        return given_up or (self.stops == TO_ABORT and aborted_s > RETURN_AFTER_S)

    # -- when the next stage is due

    def _advance(self, now: float) -> None:
        aborted_s = now - self._aborted_at
        if self.stage is Stage.RUNNING and (self.stops or self._cannot_end(now)):
            self._interrupt(now)
        elif self.stage is Stage.INTERRUPTED:
            asked = self.stops >= TO_ABORT and now - self._interrupted_at > SECOND_AFTER_S
            if asked or self._is_blocked(now):
                self._abort(now)
        elif self.stage is Stage.ABORTED and self.stops >= TO_END and aborted_s > END_AFTER_S:
            self.stage = Stage.ENDED

    def _cannot_end(self, now: float) -> bool:
        """Whether the ranks have waited in vain for long enough."""
        if self._kind == "repair" and self._nothing_moves(now):
            return True
        if not self._waits_in_vain():
            self._failed_at = None
            return False
        self._failed_at = self._failed_at or now
        return now - self._failed_at >= GRACE_S

    def _waits_in_vain(self) -> bool:
        """Whether a rank has failed and all others wait for it."""
        failed = self._failed()
        if self.standstill is None or not failed:
            return False
        others = set(self.work.running) - failed.keys()
        lost = set(self.standstill.missing) <= failed.keys()
        return lost and set(self.standstill.waiting) >= others

    def _is_blocked(self, now: float) -> bool:
        """Whether ranks that were interrupted wait for one another in C."""
        running, answers = self.work.running, self._whereabouts.now()
        if self._kind == "repair":
            return self._nothing_moves(now)
        waited_s = now - (self._interrupted_at if self._kind == "cell" else self._repeated_at)
        if self._kind == "request":
            # some may wait for one that reads a disk: only an interrupt that cuts shows it
            still = [answers[rank]["standing"]["still_s"] for rank in running if rank in answers]
            if not self._repeated_at or waited_s < STILL_S or len(still) < len(running):
                return False
            if min(still, default=0.0) < STILL_S:
                return False
        elif waited_s < (
            LEFT_AFTER_S if self._left_alone and apart(answers.values()) else FREE_AFTER_S
        ):
            return False
        if self._standstill(within_s=min(STILL_S, waited_s - LEFT_AFTER_S / 2)) is not None:
            return True
        return self._left_alone and any(
            answers[rank]["standing"]["still_s"] >= ALONE_S for rank in running if rank in answers
        )

    def _nothing_moves(self, now: float) -> bool:
        """Whether no rank has moved for long, or all wait for one another."""
        answers, silent = self._whereabouts.now(), self._whereabouts.silent()
        still = [
            max(silent.get(rank, 0.0), answers[rank]["standing"]["still_s"])
            if rank in answers
            else now - self._began
            for rank in self.work.running
        ]
        long_enough = STILL_S if self.standstill is not None else REPAIR_S
        return min(still, default=0.0) >= long_enough

    @property
    def _left_alone(self) -> bool:
        """Whether a rank has ended or failed, and cannot come to those that still run."""
        return len(self.work.running) < len(self.work.ranks) or bool(self._failed())

    def _failed(self) -> dict[int, messages.RankError]:
        """Ranks that failed, also those that have to agree with the others before they answer."""
        errors = {rank: error for rank, error in self.work.errors.items() if not error.is_stop}
        for rank, here in self._whereabouts.now().items():
            if self._kind != "cell" and here["standing"]["failed"]:
                ename = here["standing"]["failed"]
                error = messages.RankError(rank=rank, ename=ename, evalue="", traceback=[], at=0.0)
                errors.setdefault(rank, error)
        return errors

    def _standstill(self, within_s: float | None = None) -> Standstill | None:
        return standstill(
            self.work.ranks,
            answers=self._whereabouts.now(),
            pending=self.work.running,
            errors=self._failed(),
            waited_s=within_s,
        )

    # -- the stages

    def _interrupt(self, now: float) -> None:
        self.stage, self._interrupted_at = Stage.INTERRUPTED, now
        if self._kind != "repair":
            self.work.interrupted_at = self.work.interrupted_at or time.time()
            self._hold()

    def _interrupt_again(self, now: float) -> None:
        """Interrupt ranks again that have not stopped, where the first one may not have counted."""
        waited_s = now - self._interrupted_at
        if self.stage is Stage.ABORTED:
            if self._kind != "cell" and now - self._repeated_at > AGAIN_S:
                self._abort_groups()
        elif self.stage is not Stage.INTERRUPTED or self._kind == "repair":
            return
        elif self._kind == "request" and not self._repeated_at:
            if waited_s > (LEFT_AFTER_S if self._left_alone else CUT_AFTER_S):
                self._repeated_at = now
                self._stop_after(0)
        elif waited_s > FREE_AFTER_S and self._named:
            self._stop_after(0)
        if self._held_at and now - self._held_at > ANSWER_S:
            self._stop_after(self._last_step())
        elif waited_s > NEARER_S and self._named_far:
            self._named_far = False
            self._hold()

    def _hold(self) -> None:
        """Ask the ranks how many optimizer steps they have begun; they begin no other now."""
        self._begun, self._held_at = {}, time.monotonic()
        self._gang.post(self.work.running, "control", messages.HOLD, {}, self._take_begun)
        self._gang.wake()

    def _take_begun(self, rank: int, channel: Channel, message: Message) -> None:
        """Name the step after which all stop, once all have answered; on the reader thread."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            self._begun[rank] = _UNKNOWN if content.get("status") == "error" else content
            if self._held_at and self._begun.keys() >= set(self.work.running):
                self._stop_after(self._last_step())

    def _last_step(self) -> int:
        """The step that all can reach soon; 0 where there is no training."""
        begun = [reply["begun"] for reply in self._begun.values()]
        if not any(begun):
            return 0
        soon = max(reply["next_s"] for reply in self._begun.values()) < NEXT_STEP_S
        # a whole further step leaves no collective half done; else those that lag catch up
        self._named_far = soon and time.monotonic() - self._interrupted_at < NEARER_S
        return max(begun) + self._named_far

    def _stop_after(self, step: int) -> None:
        self._held_at, self._named = 0.0, step
        pending = self.work.pending
        for request in {self.work.requests[rank] for rank in pending}:
            content = messages.Interrupt(request=request, after=step)
            self._gang.post(pending, "control", "interrupt_request", content)
        self._gang.wake()

    def _abort(self, now: float) -> None:
        self.stage, self._aborted_at, self._named_far = Stage.ABORTED, now, False
        self._stuck = self.where()
        self._abort_groups()

    def _abort_groups(self) -> None:
        """Interrupt the ranks at once, and abort the process groups that they may wait in."""
        self._repeated_at = time.monotonic()
        self._stop_after(0)
        self._gang.post(
            range(self._world_size),
            "control",
            messages.RELEASE,
            release_request(self._gang),
            self._take_released,
        )
        self._gang.wake()

    def _take_released(self, rank: int, channel: Channel, message: Message) -> None:
        """Keep why a rank could not abort its groups; on the reader thread."""
        content: Any = message["content"]
        if channel == "control" and content.get("status") == "error":
            self._not_aborted[rank] = content["error"]

    def _end_ranks(self) -> None:
        """End the ranks, once; without the lock, which who hears of it may need."""
        with self._lock:
            due = self.stage is Stage.ENDED and not self._ending
            self._ending = self._ending or due
        if due:
            left = rank_names.words(self.work.pending)
            where = self.where()
            self._gang.end(left, "did not stop" + (f" ({where})" if where else ""))

    # -- what is shown

    def _words(self, now: float) -> str:
        """What is shown below the cell now."""
        left = self.work.running
        if self.stage is Stage.RUNNING or not left:
            words = [self.standstill.words if self.standstill else "", self.where(silent=True)]
            return "; ".join(filter(None, words))
        if self.stage is Stage.INTERRUPTED and now - self._interrupted_at < FREE_AFTER_S:
            return ""
        if self.stage is Stage.ABORTED and now - self._aborted_at < RETURN_AFTER_S:
            return f"stuck: {self._stuck}; the process groups are aborted"
        where = self.where() or f"{rank_names.words(left)} did not stop"
        what = f"{self._what_was_done()}, but {where}"
        return f"{'. '.join(filter(None, [what, self._why_not_aborted(), self._what_next()]))}."

    def _what_was_done(self) -> str:
        if self.stage is Stage.ABORTED:
            return "the process groups were aborted"
        return "cannot be stopped half-way" if self._kind == "repair" else "interrupted"

    def _why_not_aborted(self) -> str:
        said = [f"rank {rank}: {why}" for rank, why in sorted(self._not_aborted.items())]
        return f"Groups could not be aborted on {'; '.join(said)}".rstrip(".") if said else ""

    def _what_next(self) -> str:
        if self.stops < TO_ABORT:
            return "Stop again returns the prompt, and a third Stop ends the ranks"
        return "Stop again ends the ranks: their variables are lost, and new ranks are started"

    def where(self, *, silent: bool = False) -> str:
        """Where the running ranks are, and how they are there; of silent ranks only, or of all."""
        unanswered = self._whereabouts.silent()
        unanswered = {rank: seconds for rank, seconds in unanswered.items() if seconds >= SILENT_S}
        shown = [rank for rank in self.work.running if not silent or rank in unanswered]
        states = {rank: self._gang.state_of(rank) for rank in shown if rank in unanswered}
        answers = self._whereabouts.now()
        return described(shown, answers=answers, silent=unanswered, states=states)


def release_request(gang: Gang) -> messages.ReleaseRequest:
    """Ask a rank to abort its process groups; it may be asked again."""
    pids = [member.pid for member in gang.members]
    return messages.ReleaseRequest(pids=pids, id=secrets.token_hex(8))
