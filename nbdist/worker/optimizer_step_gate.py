"""Interrupts all ranks after the same optimizer step.

KeyboardInterrupt can be raised between any two lines. In a training loop, one rank might then have
made a step that another has not, so that their weights or shards are inconsistent; within a step,
only some parameters are updated. An interrupt therefore takes two messages. The first pauses
every rank before its next step and returns how many steps of this cell it has started. The kernel
then sends the step after which all ranks stop, which each rank can reach without the next step of
the others.

Code without optimizer steps, or with slow ones, is interrupted immediately.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ITERATION_END_S = 0.1
"""Time after the last step for the rest of the iteration: clearing gradients, a scheduler,
counters. The next forward or backward ends it earlier."""
_POLL_S = 0.002


class StepListener(Protocol):
    """Profile that is notified of optimizer steps, on the main thread."""

    def on_step_begin(self) -> None:
        """Called before the optimizer steps."""

    def on_step_end(self, optimizer: Any) -> None:
        """Called after the optimizer has stepped."""

    def on_cell_end(self) -> None:
        """Called at the end of a cell."""


class OptimizerStepGate:
    """Gate around the optimizer steps of this rank."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.listener: StepListener | None = None
        """Active profile of this rank. Without one, a step costs one attribute access."""
        self.before_step: Callable[[], object] = lambda: None
        """Called on the main thread before each step."""
        self.capture_state: Callable[[], Any] = lambda: None
        """Returns what a save needs as it is between two steps; called after the last step."""
        self.between_steps: Callable[[], object] = lambda: None
        """Called after each step, on the main thread: callbacks of widgets."""
        self.begin_cell()

    def begin_cell(self) -> None:
        """Reset the state at the start of a cell."""
        with self._lock:
            self.num_steps_begun = 0
            """Number of steps started in this cell."""
            self._ended_with = 0
            """Number of steps of the cell that ended last."""
            self.last_step_state: Any = None
            """Result of `capture_state` if the cell was stopped after a step, else None."""
            self._entered_at = time.monotonic()
            self._step_s = 0.0
            self._is_stepping = self._is_armed = self._has_raised = self._paused = False
            self.is_training = False
            """True between the first forward with gradients of a step and the step."""
            self._last: int | None = None
            """Number of the step after which to stop; 0 for immediately."""

    def end_cell(self) -> None:
        """Reset the state at the end of a cell."""
        with self._lock:
            ended_with, state = self.num_steps_begun, self.last_step_state
            self.begin_cell()
            self._ended_with, self.last_step_state = ended_with, state

    # -- the control thread

    def pause_steps(self) -> tuple[int, float]:
        """Pause before the next step, until `interrupt_after` or the end of the cell.

        A time limit would let a rank go on when the kernel is slow, one step ahead of the others.

        Returns:
            Number of steps started, and the estimated seconds until the next one.
        """
        with self._lock:
            self._paused, self._last = True, None
            ago = time.monotonic() - self._entered_at
            # A cell that has just ended is still running for the kernel.
            begun = max(self.num_steps_begun, self._ended_with)
            return begun, max(self._step_s - ago, 0.0)

    def interrupt_after(self, after: int) -> None:
        """Raise KeyboardInterrupt in the main thread after that many steps.

        It is raised only once, except with `after=0`: the cell may have caught the first one.
        """
        with self._lock:
            self._last, self._paused = after, False
            if (
                self.num_steps_begun >= after
                and not self._is_stepping
                and not (after and self._has_raised)
            ):
                self._raise_in_main()

    @property
    def is_interrupted(self) -> bool:
        """True if the cell was interrupted and this rank has made its last step."""
        with self._lock:
            due = self._last is not None and self.num_steps_begun >= self._last
            return due and not self._is_stepping

    # -- the main thread

    def _try_begin_step(self) -> bool:
        """Begin a step unless the steps are paused; raise if the last step is done."""
        with self._lock:
            if self._last is not None and self.num_steps_begun >= self._last:
                self._has_raised = True
                raise KeyboardInterrupt
            if self._paused:
                return False
            now = time.monotonic()
            self._step_s, self._entered_at = now - self._entered_at, now
            self.num_steps_begun += 1
            self._is_stepping, self.is_training = True, False
            return True

    def _interrupt_if_armed(self) -> None:
        with self._lock:
            if self._is_armed:
                self._is_armed = False
                self._raise_in_main()

    def _raise_in_main(self) -> None:
        self._has_raised = True
        os.kill(os.getpid(), signal.SIGINT)

    def end_iteration(self, *, is_training: bool = True) -> None:
        """Raise a pending KeyboardInterrupt, because the next iteration is about to start.

        Args:
            is_training: whether gradients are computed, so that a step follows.
        """
        with self._lock:
            armed, self._is_armed = self._is_armed, False
            self._has_raised = self._has_raised or armed
            self.is_training = self.is_training or is_training
        if armed:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def step(self, optimizer: Any) -> Iterator[None]:
        """Context of a step of a prepared optimizer, on the main thread.

        Raises:
            KeyboardInterrupt: the ranks stop before this step.
        """
        listener = self.listener
        if listener is not None:
            listener.on_step_begin()
        self.before_step()
        while not self._try_begin_step():
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            with self._lock:
                self._is_stepping = False
                if self._last is not None and self.num_steps_begun >= self._last:
                    self.last_step_state = self.capture_state()
                    self._is_armed = True
                    threading.Timer(ITERATION_END_S, self._interrupt_if_armed).start()
        if listener is not None:
            listener.on_step_end(optimizer)
        self.between_steps()


optimizer_step_gate = OptimizerStepGate()
"""The gate of this rank."""
