"""HF Trainer under the session's strategy; runs on a rank.

A Trainer makes its own `Accelerator()`, which takes the session's engine as any other
does (`rank.accelerator`). What is left to say is what Trainer would decide by itself:
the device, precision, accumulation and clipping.
"""

from __future__ import annotations

from typing import Any

from nbdist.rank import accelerator


def trainer_arguments() -> dict[str, Any]:
    """Return arguments for `TrainingArguments(..., **nbdist.trainer_arguments())`.

    Raises:
        SessionError: not called on a rank of a session.
    """
    session = accelerator.current()
    return session.options.strategy.training_arguments(session.options, session.hardware)
