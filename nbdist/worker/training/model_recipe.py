"""Everything needed to rebuild a prepared model under another engine, without its weights.

A ``ModelRecipe`` can be pickled except for its hooks, so the model can also be rebuilt in another
process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.state import meta_model, optimizer_recipes, tensor_digest

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from nbdist.state.meta_model import MetaModel
    from nbdist.state.optimizer_recipes import OptimizerRecipe
    from nbdist.state.shards import ShardMap
    from nbdist.worker.training.model_state import ModelState, ScalarState
    from nbdist.worker.training.prepared_models import PreparedModel


@dataclass(slots=True, kw_only=True, eq=False)
class ModelRecipe:
    """Recipe for rebuilding one model and verifying the result."""

    meta: MetaModel
    attributes: dict[str, dict[str, object]]
    """Attributes of the modules with plain values."""
    trainable: dict[str, bool]
    """Whether each parameter requires a gradient, by name; tied ones under all their names."""
    buffers: dict[str, torch.Tensor]
    """This rank's buffers by name, in host memory."""
    optimizers: list[tuple[OptimizerRecipe, list[optimizer_recipes.GroupOptions]]]
    extra_attributes: list[dict[str, Any]]
    """Per optimizer, attributes that are not constructor arguments: hooks, counters."""
    scalar_state: ScalarState
    loss_scale: LossScale | None
    """Loss scale under fp16."""
    num_steps: int
    digests: dict[str, int]
    """Digests of weights and optimizer state."""

    @classmethod
    def capture(
        cls,
        prepared: PreparedModel,
        model_state: ModelState,
        shards: ShardMap,
        *,
        reset_optimizer: bool,
        hooks: bool,
    ) -> ModelRecipe:
        """Capture the recipe of a prepared model; collective.

        Args:
            prepared: the model.
            model_state: its state.
            shards: this rank's shards of the state.
            reset_optimizer: omit the optimizer state.
            hooks: include optimizer hooks, which may not be picklable.
        """
        raws = [owned.inner_optimizer for owned in prepared.live_optimizers]
        return cls(
            meta=prepared.meta,
            attributes=meta_model.module_attributes(prepared.model, prepared.meta),
            trainable={
                meta_model.bare_name(name): parameter.requires_grad
                for name, parameter in prepared.model.named_parameters(remove_duplicate=False)
            },
            buffers=_buffers(prepared),
            optimizers=[
                (owned.recipe, optimizer_recipes.group_options(owned.inner_optimizer))
                for owned in prepared.live_optimizers
            ],
            extra_attributes=[
                optimizer_recipes.extra_state(raw)
                | (optimizer_recipes.step_hooks(raw) if hooks else {})
                for raw in raws
            ],
            scalar_state={} if reset_optimizer else model_state.scalar_state(),
            loss_scale=get_loss_scale(prepared),
            num_steps=prepared.num_steps,
            digests=tensor_digest.global_digests(shards),
        )

    def build(self) -> tuple[nn.Module, list[Optimizer]]:
        """Build the unprepared model and its optimizers, without weights and state."""
        model = meta_model.materialize(self.meta)
        meta_model.restore_attributes(model, self.attributes)
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in named.items():
            parameter.requires_grad_(self.trainable.get(name, parameter.requires_grad))
        raws = [
            optimizer_recipes.build_optimizer(recipe, named, groups)
            for recipe, groups in self.optimizers
        ]
        for raw, habits in zip(raws, self.extra_attributes, strict=True):
            vars(raw).update(habits)
        return model, raws

    def load_buffers(self, prepared: PreparedModel) -> None:
        """Restore buffers, step count and loss scale of the prepared model."""
        for name, live in prepared.model.named_buffers():
            live.copy_(self.buffers[meta_model.bare_name(name)])
        prepared.num_steps = self.num_steps
        set_loss_scale(prepared, self.loss_scale)

    def describe(self, *, reset_optimizer: bool) -> list[str]:
        """Return descriptions of the model and its optimizers."""
        counts = f"{len(self.meta.names)} parameters, {len(self.buffers)} buffers"
        without = " without its state" if reset_optimizer else ""
        return [
            f"{type(self.meta.model).__name__} ({counts})",
            *(f"{recipe.optimizer_class.__name__}{without}" for recipe, _ in self.optimizers),
        ]


def _buffers(prepared: PreparedModel) -> dict[str, torch.Tensor]:
    """Copy this rank's buffers to host memory."""
    before = dict(prepared.meta.model.named_buffers())
    copies = {}
    for name, live in prepared.model.named_buffers():
        plain = meta_model.bare_name(name)
        # DeepSpeed casts buffers to its compute dtype. Non-persistent ones, such as rotary
        # frequencies, are restored from the meta model instead.
        is_cast = plain in prepared.meta.buffers and live.dtype != before[plain].dtype
        copies[plain] = (
            prepared.meta.buffers[plain] if is_cast else live.detach().to("cpu", copy=True)
        )
    return copies


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
