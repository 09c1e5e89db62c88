"""Where the optimizer's steps are found; runs on a rank.

While nothing is profiled a step costs one look at `slot.window`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.profiling.window import Window


class Slot:
    """The one window of this rank."""

    def __init__(self) -> None:
        """Nothing is profiled."""
        self.window: Window | None = None


slot = Slot()
"""Of this rank."""


def around_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `step()` of prepared optimizers: tell the window of those that use gradients."""

    @functools.wraps(original)
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        window = slot.window
        if window is None or not optimizer.gradient_state.sync_gradients:
            return original(optimizer, *args, **kwargs)
        window.step_begins()
        result = original(optimizer, *args, **kwargs)
        window.step_ended(optimizer)
        return result

    return step
