"""HF Trainer under the session's strategy; runs on a rank.

A Trainer makes its own `Accelerator()`, which takes the session's engine as any other
does (`rank.accelerator`). What is left to say is what Trainer would decide by itself:
the device, precision, accumulation and clipping. Under --auto the engine is decided here,
before Trainer builds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import OptionError
from nbdist.rank import accelerator
from nbdist.rank.choose import Batch

if TYPE_CHECKING:
    from torch import nn

    from nbdist.rank.choose import Chooser
    from nbdist.strategies import Options

BATCH_SIZE = 8
"""Trainer's default of per_device_train_batch_size."""
OPTIMIZER = {"class": "AdamW", "fused": True}
"""Trainer's default (adamw_torch_fused in transformers 5.23)."""


def trainer_arguments(
    model: nn.Module | None = None, *, batch_size: int | None = None, seq_len: int | None = None
) -> dict[str, Any]:
    """Return arguments for `TrainingArguments(..., **nbdist.trainer_arguments())`.

    Args:
        model: needed under --auto, which decides by it: the model that Trainer will get.
        batch_size: samples of one rank's micro-batch; default: Trainer's own, 8.
        seq_len: tokens of a sample; default: what the model takes, 2048 at most.

    Raises:
        SessionError: not called on a rank of a session.
        OptionError: --auto, and no model.
    """

    def choice(chooser: Chooser) -> Options:
        if model is None:
            message = (
                "--auto decides by the model: nbdist.trainer_arguments(model=model), and say"
                " batch_size= and seq_len= for a choice that fits your batch."
            )
            raise OptionError(message)
        given = {"batch_size": batch_size, "seq_len": seq_len}
        guessed = [name for name, one in given.items() if one is None]
        guess = f"assumed: {' and '.join(guessed)}; give trainer_arguments(...) your own"
        batch = Batch(
            batch_size=batch_size or BATCH_SIZE, seq_len=seq_len, guess=guess if guessed else ""
        )
        return chooser.decide(model, OPTIMIZER, lambda: batch)

    session = accelerator.decide(choice)
    return session.options.strategy.training_arguments(session.options, session.hardware)
