"""Defers interrupts during operations that consist of phases, such as load and switch.

Interrupting such an operation at an arbitrary line would leave a model incomplete. The first
interrupt therefore takes effect at the end of a phase, where all ranks synchronize: the operation
fails on all ranks and is rolled back. A further interrupt ends the phase immediately, but never
the synchronization or the rollback.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nbdist.signals import suppress_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator


class DeferredInterrupts:
    """Count of the interrupts during the current operation."""

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
