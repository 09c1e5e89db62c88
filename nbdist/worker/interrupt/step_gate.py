"""Stop between optimizer steps, on all ranks after the same one; runs on a rank.

KeyboardInterrupt may come between any two lines. In a training loop one rank would then have
made a step that another has not, and their weights or shards would not belong together; within
a step, half of the parameters. So Stop takes two messages. The first holds every rank at its
next step and asks how many steps of this cell it has begun. The kernel then names the step
after which all of them stop, which each rank can reach without the others' next one.

What is no training, or whose steps take long, is interrupted at once.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HELD_S = 2.0
"""A rank that is held goes on after this time: nobody has told it where to stop."""
REST_S = 0.1
"""After its last step a rank may take this long for the rest of its iteration: clearing gradients,
a scheduler, counters. The next forward or backward ends it before."""
_NAP_S = 0.002


class Gate:
    """Where optimizer steps of this rank begin and end."""

    def __init__(self) -> None:
        """Hold nobody."""
        self._lock = threading.RLock()
        self.begin_cell()

    def begin_cell(self) -> None:
        """No step of this cell has begun, and nobody has pressed Stop."""
        with self._lock:
            self._entered = 0
            self._entered_at = time.monotonic()
            self._step_s = 0.0
            self._inside = self._armed = self._raised = False
            self._held_at: float | None = None
            self._last: int | None = None
            """Number of the step after which to stop; 0 at once."""

    @property
    def entered(self) -> int:
        """Steps of this cell that have begun."""
        return self._entered

    # -- the control thread

    def hold(self) -> tuple[int, float]:
        """Let no further step begin for a moment.

        Returns:
            Steps that have begun, and the seconds until the next one would, as it was so far.
        """
        with self._lock:
            self._held_at, self._last = time.monotonic(), None
            ago = self._held_at - self._entered_at
            return self._entered, max(self._step_s - ago, 0.0)

    def stop(self, after: int) -> None:
        """Raise KeyboardInterrupt in the main thread once it has made that many steps.

        A rank that is on its way out already is told nothing twice, but by 0: a cell may have
        caught the first.
        """
        with self._lock:
            self._last, self._held_at = after, None
            if self._entered >= after and not self._inside and not (after and self._raised):
                self._raise_in_main()

    # -- the main thread

    def _enter(self) -> None:
        while True:
            with self._lock:
                if self._last is not None and self._entered >= self._last:
                    self._raised = True
                    raise KeyboardInterrupt
                held = self._held_at is not None and time.monotonic() - self._held_at < HELD_S
                if not held:
                    now = time.monotonic()
                    self._step_s, self._entered_at = now - self._entered_at, now
                    self._entered += 1
                    self._inside = True
                    return
            time.sleep(_NAP_S)

    def _leave(self) -> None:
        with self._lock:
            self._inside = False
            if self._last is not None and self._entered >= self._last:
                self._armed = True
                threading.Timer(REST_S, self._fire).start()

    def _fire(self) -> None:
        with self._lock:
            if self._armed:
                self._armed = False
                self._raise_in_main()

    def _raise_in_main(self) -> None:
        self._raised = True
        os.kill(os.getpid(), signal.SIGINT)

    def pause(self) -> None:
        """End an iteration that was the last: the next one is about to begin."""
        with self._lock:
            armed, self._armed = self._armed, False
            self._raised = self._raised or armed
        if armed:
            raise KeyboardInterrupt

    def around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step()` of prepared optimizers."""

        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not optimizer.gradient_state.sync_gradients:  # it only accumulates
                return original(optimizer, *args, **kwargs)
            self._enter()
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._leave()

        return step


gate = Gate()
"""Of this rank."""
