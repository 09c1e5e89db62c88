"""Detects optimizer steps for the active profile.

While no profile is active, a step costs one access of `active_window.window`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class StepListener(Protocol):
    """Profiling window that is notified of optimizer steps."""

    def on_step_begin(self) -> None:
        """Called before the optimizer steps."""

    def on_step_end(self, optimizer: Any) -> None:
        """Called after the optimizer has stepped."""

    def on_cell_end(self) -> None:
        """Called at the end of a cell."""


class WindowSlot:
    """Holds the active window of this rank, or None."""

    def __init__(self) -> None:
        self.window: StepListener | None = None


active_window = WindowSlot()
"""The window of this rank; `requests` sets it."""


def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `step()` of prepared optimizers to notify the window of each step.

    Calls that only accumulate gradients are ignored.
    """

    @functools.wraps(original)
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        window = active_window.window
        if window is None or not optimizer.gradient_state.sync_gradients:
            return original(optimizer, *args, **kwargs)
        window.on_step_begin()
        result = original(optimizer, *args, **kwargs)
        window.on_step_end(optimizer)
        return result

    return step
