"""HF Trainer under the session's strategy; runs on a rank.

A Trainer makes its own `Accelerator()`, which takes the session's engine as any other
does (`rank.accelerator`). What is left to say is what Trainer would decide by itself:
the device, precision, accumulation and clipping. Under --auto the engine is decided here,
before Trainer builds it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from nbdist.errors import OptionError
from nbdist.rank import accelerator
from nbdist.rank.choose import Batch
from nbdist.rank.zero import StepsItself

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    _keep_optimizer_of_deepspeed()
    return session.options.strategy.training_arguments(session.options, session.hardware)


def _keep_optimizer_of_deepspeed() -> None:
    """Let a second `train()` under DeepSpeed go on with engine and optimizer, as others do.

    transformers 5.23 (`deepspeed_init`) makes a new optimizer, for an engine that has one.
    """
    module: Any = importlib.import_module("transformers.trainer")
    original = module.deepspeed_init
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def deepspeed_init(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        kept = trainer.optimizer
        if isinstance(kept, StepsItself) and kept.engine is trainer.model_wrapped:
            return kept, None
        return original(trainer, *args, **kwargs)

    module.deepspeed_init = deepspeed_init


def found(names: Mapping[str, Any]) -> list[Any]:
    """Trainers of transformers among variables."""
    return [value for value in names.values() if _is_trainer(type(value))]


def _is_trainer(kind: type) -> bool:
    """Whether it is a Trainer or made of one, without importing it."""
    bases = inspect.getmro(kind)
    return any(
        base.__name__ == "Trainer" and base.__module__.startswith("transformers.") for base in bases
    )


def follow(trainer: Any) -> None:
    """Let a Trainer know the engine that its model has now.

    Its `model` is the bare one, but under FSDP the wrapped one (transformers 5.23).
    """
    state = trainer.accelerator.state
    trainer.is_deepspeed_enabled = getattr(state, "deepspeed_plugin", None) is not None
    trainer.is_fsdp_enabled = getattr(state, "fsdp_plugin", None) is not None
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, nn.Module):
        bare = trainer.accelerator.unwrap_model(wrapped)
        trainer.model = wrapped if trainer.is_fsdp_enabled else bare
        trainer.deepspeed = wrapped if trainer.is_deepspeed_enabled else None
