"""Stop, from rung to rung, and the telling of who waits for whom; runs in the notebook's kernel.

    asked     KeyboardInterrupt on every rank, in training after the same optimizer step: ends
              Python code, and collectives that Python waits for, with nothing broken
    freed     2 s later, or at the next Stop: ranks that are stuck in C lose their connections,
              which ends the collective; the groups are made anew afterwards (`kernel.settling`)
    end       Stop again, when that has not helped: the ranks are ended

`tick` runs on the reader thread, also for cells in the background; it sends, and waits never.
A rank that has raised while all others wait for it cannot come any more: after a grace its
peers are stopped in the same way, unasked.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nbdist import ranks as rank_names
from nbdist import wire
from nbdist.kernel.standstill import apart, place, standstill

if TYPE_CHECKING:
    from nbdist.engines.channel import Channel, Message
    from nbdist.errors import RankDied
    from nbdist.kernel.gang import Gang
    from nbdist.kernel.standstill import Standstill
    from nbdist.kernel.whereabouts import Whereabouts

Rung = Literal["none", "asked", "freed", "end"]

LOOK_AFTER_S = 1.0
"""A cell is looked at from then on."""
LOOK_EVERY_S = 1.0
LOOK_SOON_S = 0.4
"""The same, once it is to stop."""
NEXT_STEP_S = 0.5
"""Ranks make a further optimizer step before they stop if it begins within this time."""
NEARER_S = 0.8
"""Ranks that have not stopped by then stop at the step that the first of them is at."""
ANSWER_S = 0.4
"""A rank that has not said its step by then holds the interpreter in C, or is stopped."""
FREE_AFTER_S = 2.0
LEFT_AFTER_S = 0.5
"""The same where another rank has ended the cell, and cannot come any more."""
END_AFTER_S = 3.0
"""From then on after freeing, Stop ends the ranks."""
_UNKNOWN = wire.HoldReply(begun=0, next_s=math.inf)
"""Of a rank that cannot say how far it is."""
GRACE_S = 3.0
"""Ranks that wait for one that has raised are stopped after this time."""


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
    def errors(self) -> dict[int, wire.RankError]:
        """Of the ranks that failed."""


class Ladder:
    """One cell's way to its end."""

    grace_s = GRACE_S

    def __init__(
        self, cell: Watched, gang: Gang, whereabouts: Whereabouts, *, world_size: int
    ) -> None:
        """Watch a cell that has just been sent."""
        self.rung: Rung = "none"
        self.standstill: Standstill | None = None
        """Who waits for whom; None where nobody does."""
        self.stuck = ""
        """What was freed, in words."""
        self.cell, self._gang, self._whereabouts = cell, gang, whereabouts
        self._world_size = world_size
        self._began = self._looked_at = time.monotonic()
        self._asked_at = self._freed_at = 0.0
        self._held_at = 0.0
        """Since when ranks are held; 0: they are not."""
        self._begun: dict[int, wire.HoldReply] = {}
        self._named = 0
        """The step after which all stop; 0 at once."""
        self._named_far = False
        """Whether all ranks make a further step, and no nearer one was named since."""
        self._failed_at: float | None = None
        self._lock = threading.Lock()

    def stop(self) -> Rung:
        """Go one rung up; from any thread. Returns the rung that was reached."""
        now = time.monotonic()
        with self._lock:
            if self.rung == "none":
                self._ask(now)
            elif self.rung == "asked" and self._may_free():
                self._free(now)
            elif self.rung == "asked":
                self._stop_after(0)
            elif self.rung == "freed" and now - self._freed_at > END_AFTER_S:
                self.rung = "end"
        return self.rung

    def tick(self) -> None:
        """Look at the cell where it is time, and go on where Stop has not ended it yet."""
        now = time.monotonic()
        with self._lock:
            if self.cell.finished.is_set() or self.rung == "end":
                return
            every = LOOK_EVERY_S if self.rung == "none" else LOOK_SOON_S
            if now - self._began > LOOK_AFTER_S and now - self._looked_at >= every:
                self._looked_at = now
                self._whereabouts.ask(range(self._world_size))
            self._look()
            self._climb(now)
            self.cell.notice = self._words(now)

    def _look(self) -> None:
        cell = self.cell
        errors = {rank: one for rank, one in cell.errors.items() if not one.is_stop}
        self.standstill = standstill(
            cell.ranks, answers=self._whereabouts.now(), pending=cell.running, errors=errors
        )

    def _climb(self, now: float) -> None:
        if self.rung == "none" and self._waits_in_vain():
            self._failed_at = self._failed_at or now
            if now - self._failed_at >= self.grace_s:
                self._ask(now)
        elif self.rung == "asked" and now - self._asked_at > self._patience_s and self._may_free():
            self._free(now)
        elif self.rung == "asked" and now - self._asked_at > FREE_AFTER_S and self._named:
            self._stop_after(0)
        elif self._held_at and now - self._held_at > ANSWER_S:
            self._stop_after(self._last_step())
        elif self.rung == "asked" and now - self._asked_at > NEARER_S and self._named_far:
            self._named_far = False
            self._hold()

    @property
    def _patience_s(self) -> float:
        """How long ranks that wait in C may take to stop by themselves."""
        left_alone = len(self.cell.running) < len(self.cell.ranks)
        if left_alone and apart(self._whereabouts.now().values()):
            return LEFT_AFTER_S
        return FREE_AFTER_S

    def _waits_in_vain(self) -> bool:
        """Whether a rank has raised and all others wait for it."""
        if self.standstill is None or not self.cell.errors:
            return False
        lost = set(self.standstill.missing) <= self.cell.errors.keys()
        return lost and set(self.standstill.waiting) == set(self.cell.running)

    def _may_free(self) -> bool:
        """Whether a rank that was asked to stop waits in C; one that computes will stop."""
        answers = self._whereabouts.now()
        return any(
            answers[rank]["standing"]["idle"] for rank in self.cell.running if rank in answers
        )

    def _ask(self, now: float) -> None:
        self.rung, self._asked_at = "asked", now
        self.cell.interrupted_at = self.cell.interrupted_at or time.time()
        self._hold()

    def _hold(self) -> None:
        """Ask the ranks how many optimizer steps they have begun; they begin no other now."""
        self._begun, self._held_at = {}, time.monotonic()
        self._gang.post(self.cell.running, "control", wire.HOLD, {}, self._take_begun)
        self._gang.wake()

    def _take_begun(self, rank: int, channel: Channel, message: Message) -> None:
        """Name the step after which all stop, once all have answered; on the reader thread."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            self._begun[rank] = _UNKNOWN if content.get("status") == "error" else content
            if self._held_at and self._begun.keys() >= set(self.cell.running):
                self._stop_after(self._last_step())

    def _last_step(self) -> int:
        """The step that all can reach soon; 0 where there is no training."""
        begun = [one["begun"] for one in self._begun.values()]
        if not any(begun):
            return 0
        soon = max(one["next_s"] for one in self._begun.values()) < NEXT_STEP_S
        # a whole further step leaves no collective half done; else those that lag catch up
        self._named_far = soon and time.monotonic() - self._asked_at < NEARER_S
        return max(begun) + self._named_far

    def _stop_after(self, step: int) -> None:
        self._held_at, self._named = 0.0, step
        pending = self.cell.pending
        for request in {self.cell.requests[rank] for rank in pending}:
            content = wire.Interrupt(request=request, after=step)
            self._gang.post(pending, "control", "interrupt_request", content)
        self._gang.wake()

    def _free(self, now: float) -> None:
        self.rung, self._freed_at = "freed", now
        answers = self._whereabouts.now()
        stuck = [rank for rank in self.cell.running if rank in answers]
        places = dict.fromkeys(place(answers[rank]) for rank in stuck)
        self.stuck = f"{rank_names.words(stuck)} in {', '.join(places)}"
        self._cut_off()

    def _cut_off(self) -> None:
        """Interrupt the ranks, and cut the connections that they may wait for."""
        self._stop_after(0)
        pids = [member.pid for member in self._gang.members]
        content: Any = wire.ReleaseRequest(pids=pids, id=secrets.token_hex(8))
        self._gang.post(range(self._world_size), "control", wire.RELEASE, content)
        self._gang.wake()

    def _words(self, now: float) -> str:
        """What is shown below the cell now."""
        left = rank_names.words(self.cell.running) if self.cell.running else ""
        if self.rung == "none" or not left:
            return self.standstill.words if self.standstill else ""
        if self.rung == "asked":
            if now - self._asked_at < FREE_AFTER_S:
                return ""
            return f"asked to stop; {left} {'is' if len(self.cell.running) == 1 else 'are'} busy"
        if now - self._freed_at < END_AFTER_S:
            return f"stuck: {self.stuck}; freeing"
        return (
            f"{left} did not stop. Stop again ends the ranks: their variables are lost, and new"
            " ranks are started."
        )
