"""Reports the values that a Hugging Face Trainer logs, as `report()` does in a loop."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.worker.report import Reporter

_LEFT_OUT = ("epoch", "total_flos", "step")
_LEFT_OUT_ENDS = ("_runtime", "_samples_per_second", "_steps_per_second", "train_loss")
"""Summaries of a whole run instead of a step."""


def metrics_callback(reporter: Reporter) -> type:
    """Return the class of a TrainerCallback that reports each log; every Trainer creates one.

    The steps of a second `train()` follow those of the first one.
    """
    from transformers.trainer_callback import TrainerCallback

    class ReportMetrics(TrainerCallback):
        """Sends the Trainer's logged values to the notebook."""

        offset = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            # A Trainer counts from 1: the step after the last reported one.
            self.offset = max(0, reporter.next_step - 1 - state.global_step)

        def on_log(
            self,
            args: Any,  # noqa: ARG002
            state: Any,
            control: Any,  # noqa: ARG002
            logs: Mapping[str, Any] | None = None,
            **_: Any,
        ) -> None:
            if values := _curves(logs or {}):
                reporter.report(self.offset + state.global_step, **values)

    return ReportMetrics


def _curves(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one log that belong to its step."""
    return {
        name: float(value)
        for name, value in logs.items()
        if isinstance(value, numbers.Real)
        and name not in _LEFT_OUT
        and not name.endswith(_LEFT_OUT_ENDS)
    }
