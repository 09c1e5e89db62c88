"""Transactions of all ranks in phases: each phase succeeds or fails on all ranks."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from nbdist.errors import CollectiveMismatch, NbdistError
from nbdist.state import collectives
from nbdist.worker.interrupt.interrupt_flag import interrupt_flag
from nbdist.worker.operations import consensus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

CHECKING_PHASE = "checking"
"""Phase that changes nothing: its errors are raised without the name of the phase."""
AGREEMENT_TAG = 1
INTERRUPTED = "interrupted"
PROGRESS_INTERVAL_S = 0.25

PhaseOutcome = tuple[str | None, bool, bool]
"""Error text or None; whether it is an `NbdistError`; whether another rank's error caused it."""

before_phase: list[Callable[[str], object]] = []
"""Called with the name of each phase before it begins; for fault injection in tests."""


class Transaction:
    """Phases of a collective operation, with their durations."""

    def __init__(
        self, what: str, on_phase: Callable[[str], object], raises: type[NbdistError]
    ) -> None:
        """Set up the phases.

        Args:
            what: name of the operation at the start of a message: "Switch".
            on_phase: called with the name of each phase.
            raises: class of the error that a failed phase raises.
        """
        self._what, self._tell, self._raises = what, on_phase, raises
        self.seconds: dict[str, float] = {}
        """Phase -> seconds."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run one phase.

        Code that may fail on a single rank and collectives must be in separate phases.

        Raises:
            NbdistError: the phase failed on at least one rank; of the given class, on all ranks.
                The message has the phase, the ranks and the reasons.
        """
        began = time.perf_counter()
        self._tell(name)
        self._agree(name, consensus.try_call(lambda: [hook(name) for hook in before_phase])[1])
        error: BaseException | None = None
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as caught:
            log.exception("%s failed while %s", self._what, name)
            error = caught
        self._agree(name, error)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def _agree(self, name: str, error: BaseException | None) -> None:
        """Raise on all ranks if one of them failed or was interrupted; a collective."""
        with interrupt_flag.block_interrupts(error):
            error = error or (KeyboardInterrupt() if interrupt_flag.is_set else None)
            refused = isinstance(error, NbdistError)
            follows = isinstance(error, CollectiveMismatch)
            outcomes = self._everyones(name, (_words(error), refused, follows))
        failed = {rank: reason for rank, (reason, *_) in enumerate(outcomes) if reason is not None}
        # Drop the errors of ranks that failed only because another rank did.
        failed = {
            rank: reason for rank, reason in failed.items() if not outcomes[rank][2]
        } or failed
        if not failed:
            return
        interrupt_flag.ignore()
        if set(failed.values()) == {INTERRUPTED}:
            raise self._raises(f"{self._what} interrupted while {name}.") from error
        if name == CHECKING_PHASE and all(outcomes[rank][1] for rank in failed):
            raise self._raises(consensus.rank_errors_text(failed, len(outcomes))) from error
        reasons = " / ".join(dict.fromkeys(failed.values()))
        everywhere = len(failed) == len(outcomes)
        ranks = "all ranks" if everywhere else f"rank {', '.join(map(str, failed))}"
        raise self.phase_error(name, ranks, reasons) from error

    def _everyones(self, name: str, outcome: PhaseOutcome) -> list[PhaseOutcome]:
        """All-gather the outcomes of a phase.

        Raises:
            NbdistError: the ranks cannot communicate; of the given class.
        """
        while True:
            try:
                return collectives.all_gather_values(outcome, about=AGREEMENT_TAG)
            except CollectiveMismatch:
                continue  # another rank is still in the phase: it fails there, then calls this
            except RuntimeError as error:
                stopped = interrupt_flag.is_set
                interrupt_flag.ignore()
                if stopped:
                    raise self._raises(f"{self._what} interrupted while {name}.") from error
                reason = f"the ranks lost their connection ({consensus.error_text(error)})"
                raise self._raises(f"{self._what} failed while {name}: {reason}") from error

    def phase_error(self, name: str, ranks: str, reasons: str) -> NbdistError:
        """Return the error of a failed phase."""
        return self._raises(f"{self._what} failed while {name}, on {ranks}: {reasons}")


def _words(error: BaseException | None) -> str | None:
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else consensus.error_text(error)


class UncoordinatedTransaction(Transaction):
    """Phases that raise on this rank at once: if one fails, the kernel ends all new ranks."""

    def _agree(self, name: str, error: BaseException | None) -> None:
        error = error or (KeyboardInterrupt() if interrupt_flag.is_set else None)
        if error is not None:
            raise self.phase_error(
                name, f"rank {collectives.rank()}", _words(error) or ""
            ) from error


class ByteProgress:
    """Progress of a transfer as a text with a percentage, at a limited rate."""

    def __init__(self, on_phase: Callable[[str], object], doing: str, total: int) -> None:
        """Set up the progress.

        Args:
            on_phase: called with the text.
            doing: start of the text: "writing".
            total: bytes of this rank.
        """
        self._tell, self._doing, self._total = on_phase, doing, total
        self._due = 0.0

    def __call__(self, done: int) -> None:
        """Report the number of bytes that are done on this rank."""
        now = time.monotonic()
        if self._total and now >= self._due:
            self._due = now + PROGRESS_INTERVAL_S
            self._tell(f"{self._doing}, {min(done / self._total, 1):.0%}")
