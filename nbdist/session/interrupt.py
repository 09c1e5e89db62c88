"""Escalates an interrupt of a cell or request in three stages; runs in the notebook's kernel.

    interrupted   KeyboardInterrupt on every rank, during training after the same optimizer step;
                  ends Python code and collectives that Python waits for; nothing is broken
    aborted       the process groups of all ranks are aborted, which ends waits in C code;
                  `session.collective_request` creates new groups afterwards
    ended         the ranks are ended; their variables are lost

Each interrupt permits one more stage whatever the ranks do: the second returns the prompt, the
third ends the ranks. An interrupt that arrives before a stage had its minimum time takes effect
after it.

Without a second interrupt the groups are aborted only if there is evidence that an interrupted
rank waits for another one: it stays at the same line, and another rank has begun fewer collectives
of a shared group, has failed or ended, or the line is inside a collective. CPU time is not a
criterion: a rank that waits for NCCL in `cudaStreamSynchronize` uses a full core.

If a rank failed and all others wait for it, they are interrupted automatically after a grace
period.

`tick` runs on the reader thread, also for background cells; it sends messages and never blocks.
"""

from __future__ import annotations

import enum
import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from nbdist import rank_sets
from nbdist.protocol import messages
from nbdist.session.rank_activity import (
    HANG_AFTER_S,
    describe_positions,
    detect_hang,
    have_collectives_diverged,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.errors import RankDied
    from nbdist.session.rank_activity import Hang, RankActivityPoller
    from nbdist.session.worker_group import WorkerGroup

INTERRUPTS_TO_ABORT, INTERRUPTS_TO_END = 2, 3
"""Number of the interrupt that permits each stage."""
TICK_S = 0.1
POLL_AFTER_S = 1.0
"""Delay before the positions of ranks are polled first."""
POLL_INTERVAL_S = 1.0
INTERRUPTED_POLL_INTERVAL_S = 0.4
"""Polling interval after an interrupt."""
MAX_NEXT_STEP_S = 0.5
"""Ranks run one more optimizer step before they stop if it starts within this time."""
STOP_AT_EARLIER_STEP_AFTER_S = 0.8
"""Ranks that are not stopped after this time stop at the step of the first of them."""
REPLY_S = 0.4
"""A rank that has not reported its step after this time holds the GIL in C, or is stopped; the
others stop without its answer."""
MIN_FIRST_STAGE_S = 1.0
"""Minimum duration of the first stage, so that a double click does not abort anything."""
RELEASE_AFTER_S = 2.0
"""Delay before interrupted ranks that wait in C code are released."""
CATCH_UP_S = 5.0
"""Ranks that have not reached the step of the others after this time are interrupted before it."""
RELEASE_AFTER_PEER_EXIT_S = 1.0
"""The same if another rank has ended."""
STILL_S = 1.5
"""An interrupted rank that has been at one line for this long is in C code."""
STILL_ALONE_S = 5.0
"""The same if the only evidence for a wait is that other ranks have ended."""
REPEAT_REQUEST_AFTER_S = 4.0
"""Delay of the second interrupt for a phase of a request that has not ended."""
REPEAT_INTERVAL_S = 1.5
"""Interval at which a request is interrupted again after its groups were aborted.

User code may have swallowed an interrupt, or two of them may have been merged under load."""
RETURN_AFTER_S = 3.0
"""Delay after the abort before a second interrupt returns the prompt."""
END_AFTER_S = 3.0
"""Minimum delay after the abort before a third interrupt ends the ranks."""
GRACE_S = 3.0
"""Delay before ranks that wait for a failed or finished one are interrupted."""
SILENT_S = 5.0
"""Ranks that have not replied for this long are reported."""
REPAIR_S = 30.0
"""A repair is aborted if no rank makes progress for this long."""
_UNKNOWN = messages.PauseReply(begun=0, next_s=math.inf, is_training=False)
"""Reply for a rank that cannot report its step."""

Kind = Literal["cell", "request", "repair"]
"""What is interrupted.

A cell; a request, whose ranks handle the first interrupt at the end of a phase
(`worker.operations.collective_phases`); or a repair of groups and backends, which must not be
interrupted half-way: it ignores the first interrupt, and is aborted without one if no rank makes
progress."""


class InterruptStage(enum.IntEnum):
    """Stage of an interrupt."""

    RUNNING = 0
    INTERRUPTED = 1
    ABORTED = 2
    ENDED = 3


class Interruptible(ABC):
    """A cell, or a request to all ranks."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)
        self.request_id = ""
        """Id of the message to the ranks."""
        self.finished = threading.Event()
        self.interrupted_at = 0.0
        """Unix time of the first interrupt in seconds; 0 if there was none."""
        self.notice = ""
        """Status line: which ranks block others."""
        self.deadlock = ""
        """Which ranks waited for one that had finished, if they were interrupted because of it."""
        self.failure: RankDied | None = None

    @property
    @abstractmethod
    def pending(self) -> tuple[int, ...]:
        """Ranks that have not replied yet."""

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks that have not finished yet."""
        return self.pending

    @property
    @abstractmethod
    def errors(self) -> dict[int, messages.RankError]:
        """Errors by rank."""


class InterruptEscalation:
    """Escalation of the interrupts of one cell or request."""

    def __init__(
        self,
        work: Interruptible,
        workers: WorkerGroup,
        rank_activity: RankActivityPoller,
        *,
        kind: Kind = "cell",
    ) -> None:
        self.stage = InterruptStage.RUNNING
        self.num_interrupts = 0
        """Number of interrupts so far."""
        self.hang: Hang | None = None
        """The current hang, or None."""
        self.has_prompt = False
        """True while a rank waits for the user at a prompt, and others wait for that rank."""
        self.work, self._kind = work, kind
        self._workers, self._rank_activity = workers, rank_activity
        self._began = self._polled_at = time.monotonic()
        self._ticked_at = self._interrupted_at = self._aborted_at = self._repeated_at = 0.0
        self._stuck_text = ""
        """Ranks that were in C code when the groups were aborted, and their positions."""
        self._not_aborted: dict[int, str] = {}
        """Why a rank's groups could not be aborted, by rank."""
        self._pause_requested_at = 0.0
        """Time at which ranks were asked to hold before their next optimizer step; 0: not held."""
        self._pause_replies: dict[int, messages.PauseReply] = {}
        self._stop_step = 0
        """The step after which all ranks stop; 0: immediately."""
        self._runs_another_step = False
        """True while all ranks run one more step and no earlier stop was requested since."""
        self._patience_s = 0.0
        self._failed_at: float | None = None
        self._prompt_seen_at = -math.inf
        self._ending = False
        self._lock = threading.Lock()

    def escalate(self, *, patience_s: float = 0.0) -> InterruptStage:
        """Handle an interrupt; callable from any thread. Returns the stage.

        Args:
            patience_s: time in which the ranks may complete their optimizer step before the delays
                of an interrupt begin. 0 as if a user waits for the prompt.
        """
        with self._lock:
            self.num_interrupts += 1
            self._patience_s = patience_s
            if self.stage is InterruptStage.ABORTED:
                self._abort_groups()
            self._advance(time.monotonic())
        self._end_ranks()
        return self.stage

    def tick(self) -> None:
        """Poll the ranks, enter the next stage if it is due, and update the status line."""
        now = time.monotonic()
        with self._lock:
            over = self.work.finished.is_set() or self.stage is InterruptStage.ENDED
            if over or now - self._ticked_at < TICK_S:
                return
            self._ticked_at = now
            if self.has_prompt:
                self._prompt_seen_at = now
            if now - self._prompt_seen_at < HANG_AFTER_S and self.stage is InterruptStage.RUNNING:
                self.hang, self.work.notice = None, ""  # ranks have waited for the user, not hung
                return
            every = (
                POLL_INTERVAL_S
                if self.stage is InterruptStage.RUNNING
                else INTERRUPTED_POLL_INTERVAL_S
            )
            if now - self._began > POLL_AFTER_S and now - self._polled_at >= every:
                self._polled_at = now
                self._rank_activity.poll_ranks(range(self._workers.world_size))
            self.hang = self._detect_hang()
            self._interrupt_again(now)
            self._advance(now)
            self.work.notice = self._status_text(now)
        self._end_ranks()

    @property
    def returns_prompt(self) -> bool:
        """True if the waiting thread should return the prompt although the ranks continue."""
        if self.stage is not InterruptStage.ABORTED or self.num_interrupts >= INTERRUPTS_TO_END:
            return False  # ending the ranks ends the wait too
        aborted_s = time.monotonic() - self._aborted_at
        given_up = self._kind == "repair" and aborted_s > 2 * SILENT_S
        # All running ranks have raised: on a busy machine their replies follow a little later.
        patience_s = RETURN_AFTER_S if self.work.running else 2 * SILENT_S
        return given_up or (self.num_interrupts == INTERRUPTS_TO_ABORT and aborted_s > patience_s)

    # -- when the next stage is due

    def _advance(self, now: float) -> None:
        aborted_s = now - self._aborted_at
        if self.stage is InterruptStage.RUNNING and (self.num_interrupts or self._cannot_end(now)):
            self.stage = InterruptStage.INTERRUPTED
            self._interrupted_at = now + self._patience_s
            if self._kind != "repair":
                self.work.interrupted_at = self.work.interrupted_at or time.time()
                self._pause_at_step()
        elif self.stage is InterruptStage.INTERRUPTED:
            permitted = (
                self.num_interrupts >= INTERRUPTS_TO_ABORT
                and now - self._interrupted_at > MIN_FIRST_STAGE_S
            )
            if permitted or self._is_blocked(now):
                self.stage, self._aborted_at, self._runs_another_step = (
                    InterruptStage.ABORTED,
                    now,
                    False,
                )
                self._stuck_text = self.where()
                self._abort_groups()
        elif (
            self.stage is InterruptStage.ABORTED
            and self.num_interrupts >= INTERRUPTS_TO_END
            and aborted_s > END_AFTER_S
        ):
            self.stage = InterruptStage.ENDED

    def _cannot_end(self, now: float) -> bool:
        """Return whether ranks have waited for a failed or finished one for the grace period."""
        if self._kind == "repair" and self._is_stalled(now):
            return True
        failed, hang = self._failed(), self.hang
        absent = set(failed)
        if hang is not None and hang.in_collective and self._kind == "cell":
            absent |= set(hang.missing_ranks) - set(self.work.pending)
        waits_in_vain = (
            hang is not None
            and bool(absent)
            and set(hang.missing_ranks) <= absent
            and set(hang.waiting_ranks) >= set(self.work.running) - failed.keys()
        )
        if not waits_in_vain:
            self._failed_at = None
            return False
        self._failed_at = self._failed_at or now
        if now - self._failed_at < GRACE_S:
            return False
        if hang is not None and not failed:
            self.work.deadlock = f"{hang.description}. All ranks must run that line. "
        return True

    def _is_blocked(self, now: float) -> bool:
        """Return whether interrupted ranks wait for each other in C code."""
        running, replies = self.work.running, self._rank_activity.latest_replies()
        if self._kind == "repair":
            return self._is_stalled(now)
        waited_s = now - (self._interrupted_at if self._kind == "cell" else self._repeated_at)
        if self._kind == "request":
            # Ranks may wait for one that reads from disk: only the second interrupt shows it.
            still = [replies[rank]["standing"]["still_s"] for rank in running if rank in replies]
            if not self._repeated_at or waited_s < STILL_S or len(still) < len(running):
                return False
            if min(still, default=0.0) < STILL_S:
                return False
        elif waited_s < (
            RELEASE_AFTER_PEER_EXIT_S
            if self._has_lost_peers and have_collectives_diverged(replies.values())
            else RELEASE_AFTER_S
        ):
            return False
        if (
            self._detect_hang(within_s=min(STILL_S, waited_s - RELEASE_AFTER_PEER_EXIT_S / 2))
            is not None
        ):
            return True
        return self._has_lost_peers and any(
            replies[rank]["standing"]["still_s"] >= STILL_ALONE_S
            for rank in running
            if rank in replies
        )

    def _is_stalled(self, now: float) -> bool:
        """Return whether no rank makes progress, or all wait for each other."""
        replies, silent = self._rank_activity.latest_replies(), self._rank_activity.silent()
        still = [
            max(silent.get(rank, 0.0), replies[rank]["standing"]["still_s"])
            if rank in replies
            else now - self._began
            for rank in self.work.running
        ]
        long_enough = STILL_S if self.hang is not None else REPAIR_S
        return min(still, default=0.0) >= long_enough

    @property
    def _has_lost_peers(self) -> bool:
        """True if a rank has ended or failed while others are still running."""
        return len(self.work.running) < len(self.work.ranks) or bool(self._failed())

    def _failed(self) -> dict[int, messages.RankError]:
        """Return errors by rank, including ranks that have not replied yet.

        A failed rank of a request first agrees with the others, then replies.
        """
        errors = {rank: error for rank, error in self.work.errors.items() if not error.is_interrupt}
        for rank, here in self._rank_activity.latest_replies().items():
            if self._kind != "cell" and here["standing"]["failed"]:
                ename = here["standing"]["failed"]
                error = messages.RankError(rank=rank, ename=ename, evalue="", traceback=[], at=0.0)
                errors.setdefault(rank, error)
        return errors

    def _detect_hang(self, within_s: float | None = None) -> Hang | None:
        return detect_hang(
            self.work.ranks,
            replies=self._rank_activity.latest_replies(),
            pending=self.work.running,
            errors=self._failed(),
            waited_s=within_s,
        )

    # -- the stages

    def _interrupt_again(self, now: float) -> None:
        """Repeat the interrupt for ranks that have not stopped, in case the first one was lost."""
        waited_s = now - self._interrupted_at
        if self.stage is InterruptStage.ABORTED:
            if self._kind != "cell" and now - self._repeated_at > REPEAT_INTERVAL_S:
                self._abort_groups()
        elif self.stage is not InterruptStage.INTERRUPTED or self._kind == "repair":
            return
        elif self._kind == "request" and not self._repeated_at:
            if waited_s > (
                RELEASE_AFTER_PEER_EXIT_S if self._has_lost_peers else REPEAT_REQUEST_AFTER_S
            ):
                self._repeated_at = now
                self._stop_after(0)
        elif (
            waited_s > RELEASE_AFTER_S
            and self._stop_step
            and not self._pause_requested_at
            and now - self._repeated_at > REPEAT_INTERVAL_S
        ):
            self._repeated_at = now
            self._pause_at_step()
        if (
            self._pause_requested_at
            and self._pause_replies
            and now - self._pause_requested_at > REPLY_S
        ):
            self._stop_after(self._last_step())
        elif waited_s > STOP_AT_EARLIER_STEP_AFTER_S and self._runs_another_step:
            self._runs_another_step = False
            self._pause_at_step()

    def _pause_at_step(self) -> None:
        """Ask the ranks for their optimizer step and hold them before the next one."""
        self._pause_replies, self._pause_requested_at = {}, time.monotonic()
        self._workers.send_request(
            self.work.running, "control", messages.PAUSE, {}, self._on_steps_begun
        )

    def _on_steps_begun(self, rank: int, channel: Channel, message: Message) -> None:
        """Choose the last step when all ranks have replied; called on the reader thread."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            self._pause_replies[rank] = _UNKNOWN if content.get("status") == "error" else content
            if self._pause_requested_at and self._pause_replies.keys() >= set(self.work.running):
                self._stop_after(self._last_step())

    def _last_step(self) -> int:
        """Return the step that all ranks can reach soon; 0 to interrupt them immediately."""
        begun = [reply["begun"] for reply in self._pause_replies.values()]
        if len(self.work.running) < len(self.work.ranks):
            begun.append(self._stop_step)  # the other ranks have stopped after that step
        if not any(begun) and not (
            self._patience_s and any(reply["is_training"] for reply in self._pause_replies.values())
        ):
            return 0  # no training is running, or a user waits for the end of its first step
        waited_s = time.monotonic() - self._interrupted_at
        if not self._pause_replies.keys() >= set(self.work.running):
            # A rank that did not reply can be ahead, but by one step at most: the backward pass of
            # the next one needs the other ranks, which do not start it.
            return self._stop_step or max(begun) + 1
        if waited_s > CATCH_UP_S or (waited_s > RELEASE_AFTER_S and len(set(begun)) == 1):
            return 0
        next_s = max(reply["next_s"] for reply in self._pause_replies.values())
        soon = next_s < max(MAX_NEXT_STEP_S, self._patience_s)
        # One more full step leaves no collective unmatched; otherwise the slower ranks catch up.
        self._runs_another_step = soon and waited_s < STOP_AT_EARLIER_STEP_AFTER_S
        return max(begun) + self._runs_another_step

    def _stop_after(self, step: int) -> None:
        self._pause_requested_at, self._stop_step = 0.0, step
        if pending := self.work.pending:
            content = messages.InterruptRequest(request=self.work.request_id, after=step)
            self._workers.send_request(pending, "control", "interrupt_request", content)

    def _abort_groups(self) -> None:
        """Interrupt the ranks immediately and abort their process groups."""
        self._repeated_at = time.monotonic()
        self._stop_after(0)
        self._workers.send_request(
            range(self._workers.world_size),
            "control",
            messages.ABORT_COLLECTIVES,
            release_request(self._workers),
            self._on_groups_aborted,
        )

    def _on_groups_aborted(self, rank: int, channel: Channel, message: Message) -> None:
        """Record why a rank could not abort its groups; called on the reader thread."""
        content: Any = message["content"]
        if channel == "control" and content.get("status") == "error":
            self._not_aborted[rank] = content["error"]

    def _end_ranks(self) -> None:
        """End the ranks, once."""
        with self._lock:
            due = self.stage is InterruptStage.ENDED and not self._ending
            self._ending = self._ending or due
        if due:  # without the lock: the failure handler may need it
            left = rank_sets.describe_ranks(self.work.pending)
            where = self.where()
            self._workers.end(left, "did not stop" + (f" ({where})" if where else ""))

    # -- messages to the user

    def _status_text(self, now: float) -> str:
        left = self.work.running
        if self.stage is InterruptStage.RUNNING or not left:
            words = [self.hang.description if self.hang else "", self.where(silent=True)]
            return "; ".join(filter(None, words))
        if (
            self.stage is InterruptStage.INTERRUPTED
            and now - self._interrupted_at < RELEASE_AFTER_S
        ):
            return ""
        if self.stage is InterruptStage.ABORTED and now - self._aborted_at < RETURN_AFTER_S:
            return f"stuck: {self._stuck_text}; aborting the process groups"
        where = self.where() or f"{rank_sets.describe_ranks(left)} did not stop"
        done = "cannot be interrupted now" if self._kind == "repair" else "interrupted"
        if self.stage is InterruptStage.ABORTED:
            done = "the process groups were aborted"
        sentences = [f"{done}, but {where}"]
        if self._not_aborted:
            problems = [
                f"rank {rank}: {reason}" for rank, reason in sorted(self._not_aborted.items())
            ]
            text = f"Process groups could not be aborted on {'; '.join(problems)}"
            sentences.append(text.rstrip("."))
        if self.num_interrupts < INTERRUPTS_TO_ABORT:
            then = "Interrupt again to get the prompt back; a third interrupt ends the ranks"
        else:
            then = "Interrupt again to end the ranks: variables are lost, and new ranks are started"
        return f"{'. '.join([*sentences, then])}."

    def where(self, *, silent: bool = False) -> str:
        """Describe the running ranks and their positions; with `silent` only those not replying."""
        unanswered = self._rank_activity.silent()
        unanswered = {rank: seconds for rank, seconds in unanswered.items() if seconds >= SILENT_S}
        shown = [rank for rank in self.work.running if not silent or rank in unanswered]
        states = {rank: self._workers.state_of(rank) for rank in shown if rank in unanswered}
        replies = self._rank_activity.latest_replies()
        return describe_positions(shown, replies=replies, silent=unanswered, states=states)


def release_request(workers: WorkerGroup) -> messages.AbortCollectivesRequest:
    """Return a request to abort process groups; it may be sent repeatedly."""
    pids = [member.pid for member in workers.rank_processes]
    return messages.AbortCollectivesRequest(pids=pids, id=secrets.token_hex(8))
