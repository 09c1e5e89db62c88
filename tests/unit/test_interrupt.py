"""The stages of Stop: each is entered in time, whatever the ranks do, and none without a reason."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from nbdist.protocol import messages
from nbdist.session import interrupt
from nbdist.session.interrupt import InterruptEscalation, InterruptStage
from tests.doubles.rank_activity_replies import answer, waits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.session.interrupt import Kind


class Work:
    """A cell or request that two ranks run."""

    def __init__(self) -> None:
        self.ranks = self.running = self.pending = (0, 1)
        self.request_id = "cell"
        self.finished = threading.Event()
        self.interrupted_at, self.notice, self.failure = 0.0, "", None
        self.errors: dict[int, messages.RankError] = {}


class Ranks:
    """What is sent to them, and what they say."""

    def __init__(self) -> None:
        self.rank_processes: list[Any] = []
        self.world_size = 2
        self.sent: list[str] = []
        self.ended: list[str] = []
        self.answers: dict[int, messages.RankActivityReply] = {}
        self.unanswered: dict[int, float] = {}
        self.refuse_abort = False
        self.replies: Any = None
        """Takes the replies to the last pause."""
        self.after: list[int] = []
        """The steps after which the ranks were stopped."""

    def send_request(
        self, ranks: Iterable[int], _: str, kind: str, content: Any, route: Any = None
    ) -> str:
        self.sent.append(kind)
        if kind == messages.PAUSE:
            self.replies = route
        if kind == "interrupt_request":
            self.after.append(content["after"])
        if kind == messages.ABORT_COLLECTIVES and self.refuse_abort:
            reply = {"status": "error", "error": "AccessDenied"}
            for rank in ranks:
                route(rank, "control", {"content": reply})
        return "request"

    def wake(self) -> None: ...

    def say(self, rank: int, begun: int, *, is_training: bool = False) -> None:
        content = messages.PauseReply(begun=begun, next_s=9.0, is_training=is_training)
        self.replies(rank, "control", {"content": content})

    def end(self, who: str, how: str) -> None:
        self.ended.append(f"{who} {how}")

    def state_of(self, _: int) -> str:
        return "stopped"

    # -- as the kernel's `RankActivityPoller`

    def poll_ranks(self, _: object) -> None: ...

    def latest_replies(self) -> dict[int, messages.RankActivityReply]:
        return self.answers

    def silent(self) -> dict[int, float]:
        return self.unanswered


class Clock:
    """A time that passes when it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(interrupt, "time", clock)
    return clock


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def watching(ranks: Ranks, kind: Kind = "cell") -> tuple[InterruptEscalation, Work]:
    work, workers = Work(), cast("Any", ranks)
    return InterruptEscalation(work, workers, workers, kind=kind), work


def passes(clock: Clock, stages: InterruptEscalation, seconds: float) -> None:
    """Let time pass; ranks that stand still do so for longer."""
    for _ in range(round(seconds / 0.2)):
        clock.now += 0.2
        stages.tick()


@pytest.mark.parametrize("kind", ["cell", "request", "repair"])
def test_three_stops_end_ranks_that_say_nothing(clock: Clock, ranks: Ranks, kind: Kind) -> None:
    stages, _ = watching(ranks, kind)
    assert stages.escalate() is InterruptStage.INTERRUPTED
    passes(clock, stages, 60)
    assert not stages.returns_prompt or kind == "repair"
    stages.escalate()
    passes(clock, stages, 4)
    assert stages.returns_prompt
    assert not ranks.ended
    stages.escalate()
    assert len(ranks.ended) == 1
    stages.escalate()
    passes(clock, stages, 4)
    assert len(ranks.ended) == 1


def test_three_stops_at_once_leave_each_stage_its_time(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks)
    for _ in range(3):
        assert stages.escalate() is InterruptStage.INTERRUPTED
    passes(clock, stages, 2)
    assert stages.stage is InterruptStage.ABORTED
    passes(clock, stages, 1)
    assert not ranks.ended
    passes(clock, stages, 2)
    assert ranks.ended


def test_a_rank_that_computes_for_long_is_never_aborted_by_one_stop(
    clock: Clock, ranks: Ranks
) -> None:
    stages, _ = watching(ranks)
    ranks.answers = {0: answer(3, still_s=60.0), 1: answer(3, still_s=60.0)}
    stages.escalate()
    passes(clock, stages, 100)
    assert stages.stage is InterruptStage.INTERRUPTED
    assert messages.ABORT_COLLECTIVES not in ranks.sent
    assert "interrupted, but ranks 0-1 spin in line 3. Interrupt again" in stages.work.notice


def test_a_rank_that_spins_ahead_of_the_others_is_aborted_after_one_stop(
    clock: Clock, ranks: Ranks
) -> None:
    stages, _ = watching(ranks)
    ranks.answers = {0: answer(3, still_s=60.0, count=6), 1: answer(2, count=5)}
    passes(clock, stages, 10)
    assert stages.stage is InterruptStage.RUNNING
    stages.escalate()
    passes(clock, stages, 3)
    assert stages.stage is InterruptStage.ABORTED
    assert not stages.returns_prompt


def test_a_request_is_not_aborted_while_a_rank_still_moves(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks, "request")
    ranks.answers = {0: waits(4, 1, seconds=60.0), 1: answer(2, called="read", still_s=0.5)}
    stages.escalate()
    passes(clock, stages, 60)
    assert stages.stage is InterruptStage.INTERRUPTED
    ranks.answers[1] = answer(2, called="read", still_s=2.0)
    passes(clock, stages, 1)
    assert stages.stage is InterruptStage.ABORTED


def test_a_rank_that_has_failed_in_a_phase_frees_one_that_spins(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks, "request")
    failed = answer(waits_for="all_gather", missing=[1], still_s=9.0, failed="OutOfMemoryError")
    ranks.answers = {0: failed, 1: answer(8, called="item", still_s=9.0)}
    passes(clock, stages, 1)
    assert stages.work.notice.startswith("rank 0 raised OutOfMemoryError; rank 1 has been in item")
    passes(clock, stages, 12)
    assert stages.stage is InterruptStage.ABORTED
    assert stages.num_interrupts == 0


def test_a_repair_in_which_nothing_moves_is_given_up_without_a_stop(
    clock: Clock, ranks: Ranks
) -> None:
    stages, _ = watching(ranks, "repair")
    ranks.answers = {rank: answer(8, called="item", still_s=20.0) for rank in (0, 1)}
    passes(clock, stages, 5)
    assert stages.stage is InterruptStage.RUNNING
    ranks.answers = {rank: answer(8, called="item", still_s=31.0) for rank in (0, 1)}
    passes(clock, stages, 12)
    assert stages.stage is InterruptStage.ABORTED
    assert stages.returns_prompt


def test_a_rank_that_does_not_answer_is_named_without_a_stop(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks)
    ranks.answers = {1: answer(3, called="solve")}
    ranks.unanswered = {1: 4.0}
    passes(clock, stages, 1)
    assert stages.work.notice == ""
    ranks.unanswered = {1: 5.0}
    passes(clock, stages, 1)
    assert stages.work.notice == (
        "rank 1 is stopped (SIGSTOP, state T) and has not answered for 5 s, last seen in solve at"
        " line 3"
    )


def test_groups_that_could_not_be_aborted_are_reported(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks)
    ranks.refuse_abort = True
    stages.escalate()
    clock.now += 2
    stages.escalate()
    passes(clock, stages, 4)
    text = "could not be aborted on rank 0: AccessDenied; rank 1: AccessDenied. Interrupt again"
    assert text in stages.work.notice


def test_ranks_at_different_steps_stop_after_the_later_one(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks)
    stages.escalate()
    ranks.say(0, 7)
    ranks.say(1, 8)
    assert ranks.after == [8]
    passes(clock, stages, 2.4)  # they are asked again, and one is still behind
    ranks.say(0, 7)
    ranks.say(1, 8)
    assert ranks.after == [8, 8]


def test_ranks_that_agree_but_go_on_are_interrupted_at_once(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks)
    stages.escalate()
    ranks.say(0, 8)
    ranks.say(1, 8)
    passes(clock, stages, 2.4)
    ranks.say(0, 8)
    ranks.say(1, 8)
    assert ranks.after == [8, 0]


def test_a_run_that_ends_completes_its_first_step(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks)
    stages.escalate(patience_s=10)
    ranks.say(0, 0, is_training=True)
    ranks.say(1, 0, is_training=True)
    assert ranks.after == [1]
    passes(clock, stages, 11)  # it takes longer than the grace period allows
    ranks.say(0, 0, is_training=True)
    ranks.say(1, 0, is_training=True)
    assert ranks.after == [1, 0]


def test_a_rank_that_is_late_to_answer_may_be_one_step_ahead(clock: Clock, ranks: Ranks) -> None:
    stages, _ = watching(ranks)
    stages.escalate()
    ranks.say(0, 7)
    passes(clock, stages, 1)
    assert ranks.after == [8]
