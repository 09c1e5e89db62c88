"""A transformers Trainer as tutorials write it, used on ranks and in the test process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.models import llama

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import EvalPrediction, LlamaForCausalLM, TrainerControl, TrainerState

TOKENS = torch.randint(0, 211, (64, 24), generator=torch.Generator().manual_seed(5))
TOKENS[:, 1::2] = (TOKENS[:, ::2] * 7 + 3) % 211
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


class StopAt(TrainerCallback):
    """Stop the training after a step, as a full disk or a time limit would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - transformers' signature
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        control.should_training_stop |= state.global_step == self.step


def build(dropout: float = 0.0) -> LlamaForCausalLM:
    """Return the same model at each call."""
    torch.manual_seed(0)
    return llama(attention_dropout=dropout)


def accuracy(predictions: EvalPrediction) -> dict[str, float]:
    """Return the share of the next tokens that are predicted."""
    logits, labels = predictions
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def make(
    folder: str,
    model: LlamaForCausalLM | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    optimizers: tuple[Any, Any] = (None, None),
    **arguments: Any,
) -> Trainer:
    """Return a Trainer for 8 steps of 8 rows on any number of ranks."""
    world_size = distributed.get_world_size() if distributed.is_initialized() else 1
    defaults = {
        "per_device_train_batch_size": 8 // world_size,
        "max_steps": 8,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "save_strategy": "no",
        "report_to": "none",
        "push_to_hub": False,
    }
    return Trainer(
        model=model or build(),
        args=TrainingArguments(folder, **(defaults | arguments)),
        train_dataset=ROWS,
        eval_dataset=ROWS[:16],
        compute_metrics=accuracy,
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    """Return all logged values of a metric."""
    return [row[name] for row in trainer.state.log_history if name in row]
