"""Work of all ranks in phases: each phase succeeds or fails on all of them."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from nbdist.errors import CollectiveMismatch, NbdistError
from nbdist.state import collectives
from nbdist.worker.interrupt.interrupt_flag import stops
from nbdist.worker.operations import consensus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

CHECKING = "checking"
"""The phase in which nothing has moved yet: what it refuses needs no other words."""
AGREEMENT = 1
STOP = "Stop was pressed"
TOLD_EVERY_S = 0.25

Said = tuple[str | None, bool, bool]
"""An error in words, whether it is a refusal, and whether it follows from that of another rank."""

before_phase: list[Callable[[str], object]] = []
"""Called with each phase's name before it begins; tests let phases fail here."""


class Phases:
    """The phases of one piece of work, and how long they took."""

    def __init__(self, what: str, tell: Callable[[str], object], raises: type[NbdistError]) -> None:
        """Know what the work is called.

        Args:
            what: "the switch".
            tell: told of each phase.
            raises: how a phase that fails is told.
        """
        self._what, self._tell, self._raises = what, tell, raises
        self.seconds: dict[str, float] = {}
        """By phase."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """One phase; what may fail on one rank alone stands in another one than collectives.

        Raises:
            NbdistError: of the type given, on all ranks alike: which phase failed, on which
                ranks, and why.
        """
        began = time.perf_counter()
        self._tell(name)
        self._agree(name, consensus.attempt(lambda: [hook(name) for hook in before_phase])[1])
        error: BaseException | None = None
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as caught:
            log.exception("%s failed while %s", self._what, name)
            error = caught
        self._agree(name, error)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def _agree(self, name: str, error: BaseException | None) -> None:
        """Let all ranks know whether one of them failed, or is to stop; a collective."""
        with stops.whole(error):
            error = error or (KeyboardInterrupt() if stops.wanted else None)
            refused = isinstance(error, NbdistError)
            follows = isinstance(error, CollectiveMismatch)
            everyone = self._everyones(name, (_words(error), refused, follows))
        failed = {rank: why for rank, (why, *_) in enumerate(everyone) if why is not None}
        # ranks that only met with one that had failed say nothing of their own
        failed = {rank: why for rank, why in failed.items() if not everyone[rank][2]} or failed
        if not failed:
            return
        stops.no_more()
        if set(failed.values()) == {STOP}:
            raise self._raises(f"{self._what} was stopped while {name}") from error
        if name == CHECKING and all(everyone[rank][1] for rank in failed):
            raise self._raises(consensus.said(failed, len(everyone))) from error
        reasons = " / ".join(dict.fromkeys(failed.values()))
        everywhere = len(failed) == len(everyone)
        ranks = "all ranks" if everywhere else f"rank {', '.join(map(str, failed))}"
        raise self.failure(name, ranks, reasons) from error

    def _everyones(self, name: str, mine: Said) -> list[Said]:
        """What each rank has to say at the end of a phase.

        Raises:
            NbdistError: of the type given: the ranks have lost one another.
        """
        while True:
            try:
                return collectives.everyones(mine, about=AGREEMENT)
            except CollectiveMismatch:
                continue  # a rank that was still in the phase: it fails there, and comes here
            except RuntimeError as error:
                stopped = stops.wanted
                stops.no_more()
                if stopped:
                    raise self._raises(f"{self._what} was stopped while {name}") from error
                why = f"the ranks have lost one another ({consensus.words(error)})"
                raise self._raises(f"{self._what} failed while {name}: {why}") from error

    def failure(self, name: str, ranks: str, reasons: str) -> NbdistError:
        """The error of a phase in words."""
        return self._raises(f"{self._what} failed while {name}, on {ranks}: {reasons}")


def _words(error: BaseException | None) -> str | None:
    return STOP if isinstance(error, KeyboardInterrupt) else consensus.words(error)


class Alone(Phases):
    """Phases of a rank that says at once what fails, for the kernel then ends all new ranks."""

    def _agree(self, name: str, error: BaseException | None) -> None:
        error = error or (KeyboardInterrupt() if stops.wanted else None)
        if error is not None:
            raise self.failure(name, f"rank {collectives.rank()}", _words(error) or "") from error


class Told:
    """How far it is, in words, now and then."""

    def __init__(self, tell: Callable[[str], object], doing: str, total: int) -> None:
        """Begin.

        Args:
            tell: hears the words.
            doing: "writing".
            total: bytes of this rank.
        """
        self._tell, self._doing, self._total = tell, doing, total
        self._due = 0.0

    def __call__(self, done: int) -> None:
        """Hear how many bytes of this rank are done."""
        now = time.monotonic()
        if self._total and now >= self._due:
            self._due = now + TOLD_EVERY_S
            self._tell(f"{self._doing}, {min(done / self._total, 1):.0%}")
