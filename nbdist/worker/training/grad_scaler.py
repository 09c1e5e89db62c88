"""Gets and sets the loss scale of fp16 training, from Accelerate's or DeepSpeed's scaler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.worker.training.prepared_models import PreparedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """State of a dynamic loss scaler."""

    scale: float
    good_steps: int
    """Steps without an overflow since the last change of the scale."""


def get_loss_scale(prepared: PreparedModel) -> LossScale | None:
    """Return the loss scale of a model's engine; None if the loss is not scaled."""
    grad_scaler = getattr(prepared.owner, "scaler", None)
    if grad_scaler is not None and grad_scaler.is_enabled():
        tracker = grad_scaler.state_dict()["_growth_tracker"]
        return LossScale(scale=grad_scaler.get_scale(), good_steps=int(tracker))
    dynamic = _of_deepspeed(prepared)
    if dynamic is not None:
        return LossScale(
            scale=float(dynamic.cur_scale),
            good_steps=int(dynamic.cur_iter - dynamic.last_overflow_iter - 1),
        )
    return None


def set_loss_scale(prepared: PreparedModel, scale: LossScale | None) -> None:
    """Set the loss scale of a model's engine, if it has a scaler."""
    if scale is None:
        return
    grad_scaler = getattr(prepared.owner, "scaler", None)
    if grad_scaler is not None and grad_scaler.is_enabled():
        state = grad_scaler.state_dict()
        grad_scaler.load_state_dict(
            state | {"scale": scale.scale, "_growth_tracker": scale.good_steps}
        )
    elif (dynamic := _of_deepspeed(prepared)) is not None:
        dynamic.cur_scale = scale.scale
        dynamic.last_overflow_iter = dynamic.cur_iter - scale.good_steps - 1


def _of_deepspeed(prepared: PreparedModel) -> Any:
    """Return DeepSpeed's dynamic scaler (0.19, runtime/fp16/loss_scaler.py), or None."""
    scaler = getattr(getattr(prepared.model, "optimizer", None), "loss_scaler", None)
    return scaler if hasattr(scaler, "last_overflow_iter") else None
