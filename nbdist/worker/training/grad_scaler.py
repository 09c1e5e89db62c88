"""The loss scale of fp16 training, which each engine keeps elsewhere; runs on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.worker.training.prepared_models import Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A dynamic loss scale."""

    scale: float
    good_steps: int
    """Steps without an overflow since it changed last."""


def scale_of(one: Trained) -> Scale | None:
    """Return the loss scale of a model's engine; None where nothing is scaled."""
    grad_scaler = getattr(one.owner, "scaler", None)
    if grad_scaler is not None and grad_scaler.is_enabled():
        tracker = grad_scaler.state_dict()["_growth_tracker"]
        return Scale(scale=grad_scaler.get_scale(), good_steps=int(tracker))
    dynamic = _of_deepspeed(one)
    if dynamic is not None:
        return Scale(
            scale=float(dynamic.cur_scale),
            good_steps=int(dynamic.cur_iter - dynamic.last_overflow_iter - 1),
        )
    return None


def give(one: Trained, scale: Scale | None) -> None:
    """Let a model's engine go on with a loss scale, where it has one."""
    if scale is None:
        return
    grad_scaler = getattr(one.owner, "scaler", None)
    if grad_scaler is not None and grad_scaler.is_enabled():
        state = grad_scaler.state_dict()
        grad_scaler.load_state_dict(
            state | {"scale": scale.scale, "_growth_tracker": scale.good_steps}
        )
    elif (dynamic := _of_deepspeed(one)) is not None:
        dynamic.cur_scale = scale.scale
        dynamic.last_overflow_iter = dynamic.cur_iter - scale.good_steps - 1


def _of_deepspeed(one: Trained) -> Any:
    """Return DeepSpeed's dynamic scaler (0.19, runtime/fp16/loss_scaler.py), or None."""
    found = getattr(getattr(one.model, "optimizer", None), "loss_scaler", None)
    return found if hasattr(found, "last_overflow_iter") else None
