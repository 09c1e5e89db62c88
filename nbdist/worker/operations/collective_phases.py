"""Runs an operation in phases, each of which succeeds or fails on all ranks together."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from typing import TYPE_CHECKING, Any

from nbdist.errors import CheckpointError, CollectiveMismatch, NbdistError
from nbdist.signal_handling import suppress_interrupt
from nbdist.state import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

CHECKING_PHASE = "checking"
"""Phase that changes nothing: its errors are raised without the name of the phase."""
AGREEMENT_TAG = 1
INTERRUPTED = "interrupted"
PROGRESS_INTERVAL_S = 0.25
_NO_ROOM = frozenset({errno.EDQUOT, errno.EFBIG, errno.ENOSPC})

before_phase: list[Callable[[str], object]] = []
"""Called with the name of each phase before it begins; for fault injection in tests."""


class DeferredInterrupts:
    """Defers interrupts during operations that consist of phases, such as load and switch.

    Interrupting such an operation at an arbitrary line would leave a model incomplete. The first
    interrupt therefore takes effect at the end of a phase, where all ranks synchronize: the
    operation fails on all ranks and is rolled back. A further interrupt ends the phase immediately,
    but never the synchronization or the rollback.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._num_interrupts = 0
        self._is_interruptible = True
        """False during a rollback, which cannot be interrupted."""
        self._is_blocked = False
        """True while interrupts are blocked."""
        self.failed = ""
        """Error with which this rank waits in the synchronization; "" if there is none."""

    @property
    def is_set(self) -> bool:
        """True if the operation was interrupted."""
        return self._is_interruptible and self._num_interrupts > 0

    @contextlib.contextmanager
    def defer_interrupts(self) -> Iterator[None]:
        """Defer interrupts in this context; for the main thread."""
        self._reset()
        try:
            with suppress_interrupt(self._on_interrupt):
                yield
        finally:
            self._reset()

    @contextlib.contextmanager
    def block_interrupts(self, error: BaseException | None = None) -> Iterator[None]:
        """Block interrupts in this context, during the synchronization of the ranks.

        Args:
            error: the error with which this rank enters the synchronization.
        """
        self._is_blocked, self.failed = True, "" if error is None else type(error).__name__
        try:
            yield
        finally:
            self._is_blocked, self.failed = False, ""

    def ignore(self) -> None:
        """Ignore further interrupts: the operation failed and is rolled back."""
        self._is_interruptible = False

    def _on_interrupt(self) -> None:
        self._num_interrupts += 1
        if self._num_interrupts > 1 and self._is_interruptible and not self._is_blocked:
            raise KeyboardInterrupt


deferred_interrupts = DeferredInterrupts()
"""The flag of this rank."""


class CollectivePhases:
    """Phases of a collective operation, with their durations.

    Args:
        what: name of the operation at the start of a message: "Switch".
        on_phase: called with the name of each phase.
        raises: class of the error that a failed phase raises.
        coordinated: whether a phase fails on all ranks if it fails on one. If not, it raises on
            this rank at once, and the kernel ends all ranks.
    """

    def __init__(
        self,
        name: str,
        on_phase: Callable[[str], object],
        raises: type[NbdistError],
        *,
        coordinated: bool = True,
    ) -> None:
        self._what, self._on_phase, self._raises = name, on_phase, raises
        self._coordinated = coordinated
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
        start_time = time.perf_counter()
        self._on_phase(name)
        self._agree(name, try_call(lambda: [hook(name) for hook in before_phase])[1])
        error: BaseException | None = None
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as caught:
            log.exception("%s failed while %s", self._what, name)
            error = caught
        self._agree(name, error)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_time

    def _agree(self, name: str, error: BaseException | None) -> None:
        """Raise on all ranks if one of them failed or was interrupted; a collective."""
        with deferred_interrupts.block_interrupts(error):
            error = error or (KeyboardInterrupt() if deferred_interrupts.is_set else None)
            is_interrupt = isinstance(error, KeyboardInterrupt)
            reason = INTERRUPTED if is_interrupt else error_text(error)
            if not self._coordinated:
                if reason is None:
                    return
                where = f"rank {collectives.rank()}"
                raise self._raises(
                    f"{self._what} failed while {name}, on {where}: {reason}"
                ) from error
            # Whether another rank's error caused this one.
            follows = isinstance(error, CollectiveMismatch)
            outcomes = self._gather(name, (reason, isinstance(error, NbdistError), follows))
        failed = {rank: reason for rank, (reason, *_) in enumerate(outcomes) if reason is not None}
        # Drop the errors of ranks that failed only because another rank did.
        failed = {rank: text for rank, text in failed.items() if not outcomes[rank][2]} or failed
        if not failed:
            return
        deferred_interrupts.ignore()
        if set(failed.values()) == {INTERRUPTED}:
            raise self._raises(f"{self._what} interrupted while {name}.") from error
        if name == CHECKING_PHASE and all(outcomes[rank][1] for rank in failed):
            raise self._raises(rank_errors_text(failed, len(outcomes))) from error
        reasons = " / ".join(dict.fromkeys(failed.values()))
        everywhere = len(failed) == len(outcomes)
        where = "all ranks" if everywhere else f"rank {', '.join(map(str, failed))}"
        raise self._raises(f"{self._what} failed while {name}, on {where}: {reasons}") from error

    def _gather(self, name: str, outcome: tuple[str | None, bool, bool]) -> list[Any]:
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
                stopped = deferred_interrupts.is_set
                deferred_interrupts.ignore()
                if stopped:
                    raise self._raises(f"{self._what} interrupted while {name}.") from error
                reason = f"the ranks lost their connection ({error_text(error)})"
                raise self._raises(f"{self._what} failed while {name}: {reason}") from error


class ByteProgress:
    """Progress of a transfer as a text with a percentage, at a limited rate."""

    def __init__(self, on_phase: Callable[[str], object], doing: str, total: int) -> None:
        self._on_phase, self._text, self._total = on_phase, doing, total
        self._due = 0.0

    def __call__(self, done: int) -> None:
        """Report the number of bytes that are done on this rank."""
        now = time.monotonic()
        if self._total and now >= self._due:
            self._due = now + PROGRESS_INTERVAL_S
            self._on_phase(f"{self._text}, {min(done / self._total, 1):.0%}")


def error_text(error: BaseException | None) -> str | None:
    """Return an error as one line of text; None for no error."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        location = f" at {error.filename}" if error.filename else ""
        advice = ". Free space there or use another folder." if error.errno in _NO_ROOM else ""
        return (
            f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)}){location}{advice}"
        )
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, NbdistError) else f"{type(error).__name__}: {text}"


def try_call(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return a call's result and None, or None and the exception that it raised."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - sent to all ranks
        return None, error


def call_on_all_ranks(
    call: Callable[[], Any], raises: type[NbdistError] = CheckpointError, prefix: str = ""
) -> Any:
    """Return a call's result on this rank, after it has succeeded on all ranks; a collective.

    Raises:
        NbdistError: it failed on at least one rank. The message is the same on all ranks.
    """
    result, error = try_call(call)
    texts = collectives.all_gather_values(error_text(error))
    if failed := {rank: text for rank, text in enumerate(texts) if text is not None}:
        raise raises(prefix + rank_errors_text(failed, len(texts))) from error
    return result


def rank_errors_text(failed: dict[int, str], world_size: int) -> str:
    """Return the errors of several ranks as one line of text."""
    reasons = " / ".join(dict.fromkeys(failed.values()))
    if len(failed) == world_size:
        return reasons
    ranks = ", ".join(map(str, failed))
    return f"rank {ranks}: {reasons}"
