"""Everything needed to rebuild a prepared model under another engine, or to restore its state.

A ``ModelRecipe`` without tensors can be pickled except for its hooks, so the model can also be
rebuilt in another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.errors import SwitchError
from nbdist.state import (
    meta_model,
    optimizer_properties,
    optimizer_recipes,
    reshard,
    shards,
    tensor_digest,
)
from nbdist.state.layouts.base import unwrap_engine
from nbdist.worker.training import training_metadata
from nbdist.worker.training.training_state import ModelAndOptimizerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from nbdist.state.layouts.base import ScalarState
    from nbdist.state.meta_model import MetaModel
    from nbdist.state.optimizer_properties import OptimizerProperties
    from nbdist.state.optimizer_recipes import OptimizerRecipe
    from nbdist.state.shards import Shard, ShardMap
    from nbdist.worker.training.prepared_models import PreparedModel


@dataclass(slots=True, kw_only=True, eq=False)
class ModelRecipe:
    """Recipe for rebuilding one model, with its state and digests to verify the result."""

    meta: MetaModel
    attributes: dict[str, dict[str, object]]
    """Attributes of the modules with plain values."""
    trainable: dict[str, bool]
    """Whether each parameter requires a gradient, by name; tied ones under all their names."""
    buffers: dict[str, torch.Tensor]
    """This rank's buffers by name, in host memory."""
    optimizers: list[tuple[OptimizerRecipe, list[optimizer_recipes.GroupOptions]]]
    properties: list[OptimizerProperties]
    """Per optimizer."""
    extra_attributes: list[dict[str, Any]]
    """Per optimizer, attributes that are not constructor arguments: hooks, counters."""
    scalar_state: ScalarState
    loss_scale: LossScale | None
    """Loss scale under fp16."""
    num_steps: int
    is_kept: bool
    """Whether `save_state()` of its Accelerator writes it; not after `free_memory()`."""
    tensors: dict[str, Shard] = field(default_factory=dict)
    """This rank's shards, in host memory; empty if they are in files."""
    digests: dict[str, int] = field(default_factory=dict)
    """Digests of weights and optimizer state."""
    state_dicts: tuple[list[Any], dict[str, torch.Tensor]] = field(default_factory=lambda: ([], {}))
    """In a backup: those of optimizers that cannot be resharded, with tensors in host memory."""
    scheduler_states: list[dict[str, Any]] = field(default_factory=list)
    """In a backup: those of the schedulers."""

    @classmethod
    def capture(
        cls, prepared: PreparedModel, scalar_state: ScalarState, *, hooks: bool
    ) -> ModelRecipe:
        """Capture the recipe of a prepared model, without tensors.

        Args:
            scalar_state: scalar state of its optimizers; empty to drop their state.
            hooks: include optimizer hooks, which may not be picklable.
        """
        raws = [owned.inner_optimizer for owned in prepared.live_optimizers]
        bare, kept = unwrap_engine(prepared.model), prepared.owner._models  # noqa: SLF001
        before = dict(prepared.meta.model.named_buffers())
        buffers = {}
        for name, live in prepared.model.named_buffers():
            plain = meta_model.bare_name(name)
            # DeepSpeed casts buffers to its compute dtype. Non-persistent ones, such as rotary
            # frequencies, are restored from the meta model instead.
            is_cast = plain in prepared.meta.buffers and live.dtype != before[plain].dtype
            buffers[plain] = (
                prepared.meta.buffers[plain] if is_cast else live.detach().to("cpu", copy=True)
            )
        return cls(
            meta=prepared.meta,
            attributes=meta_model.module_attributes(prepared.model, prepared.meta),
            trainable={
                meta_model.bare_name(name): parameter.requires_grad
                for name, parameter in prepared.model.named_parameters(remove_duplicate=False)
            },
            buffers=buffers,
            optimizers=[
                (owned.recipe, optimizer_recipes.group_options(owned.inner_optimizer))
                for owned in prepared.live_optimizers
            ],
            properties=[optimizer_properties.properties_of(raw) for raw in raws],
            extra_attributes=[
                optimizer_recipes.extra_state(raw)
                | (optimizer_recipes.step_hooks(raw) if hooks else {})
                for raw in raws
            ],
            scalar_state=scalar_state,
            loss_scale=get_loss_scale(prepared),
            num_steps=prepared.num_steps,
            is_kept=any(unwrap_engine(model) is bare for model in kept),
        )

    @classmethod
    def back_up(
        cls, state: ModelAndOptimizerState, live: ShardMap, scalar_state: ScalarState
    ) -> ModelRecipe:
        """Copy the state of a model, so that it can be restored; not a collective."""
        recipe = cls.capture(state.prepared, scalar_state, hooks=False)
        recipe.tensors = shards.copy_to_host(live)
        trees, tensors = state.state_dicts()
        copies = {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
        recipe.state_dicts = trees, copies
        schedulers = state.prepared.live_schedulers
        recipe.scheduler_states = [wrapper.scheduler.state_dict() for wrapper in schedulers]
        return recipe

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
        for raw, habits, known in zip(raws, self.extra_attributes, self.properties, strict=True):
            vars(raw).update(habits)
            optimizer_properties.set_properties(raw, known)
        return model, raws

    def load_state(self, prepared: PreparedModel) -> int:
        """Load the state into a model built from the recipe; return the bytes sent; collective."""
        sent = ModelAndOptimizerState(prepared).load_from(self.tensors, self.scalar_state)
        self.load_buffers(prepared)
        return sent

    def load_buffers(self, prepared: PreparedModel) -> None:
        """Restore buffers, step count and loss scale of the prepared model."""
        for name, live in prepared.model.named_buffers():
            live.copy_(self.buffers[meta_model.bare_name(name)])
        prepared.num_steps = self.num_steps
        set_loss_scale(prepared, self.loss_scale)

    def restore(self, state: ModelAndOptimizerState, *, optimizers: bool) -> None:
        """Restore the state from this backup of the same model; a collective."""
        self.load_buffers(state.prepared)
        if not optimizers:
            reshard.reshard(self.tensors, state.target_shards(optimizers=False))
            state.layout.finalize_state({})
            return
        before_first_step = training_metadata.initial_scalar_state(state.layout.scalar_state())
        state.load_from(self.tensors, before_first_step | self.scalar_state)
        state.load_state_dicts(*self.state_dicts)
        for owned, (_, groups) in zip(state.prepared.live_optimizers, self.optimizers, strict=True):
            for group, saved in zip(owned.inner_optimizer.param_groups, groups, strict=True):
                group.update(saved)
        schedulers = state.prepared.live_schedulers
        for wrapper, scheduler in zip(schedulers, self.scheduler_states, strict=True):
            wrapper.scheduler.load_state_dict(scheduler)

    def verify(self, prepared: PreparedModel) -> int:
        """Compare all tensors and scalars with the recipe; return the number of tensors.

        Where the engine has another dtype, `tensors` are cast to it and compared. A collective.

        Raises:
            SwitchError: tensors differ or are missing.
        """
        state = ModelAndOptimizerState(prepared)
        live = state.owned_shards()
        recast = {
            key: shard
            for key, shard in self.tensors.items()
            if key in live and live[key].dtype != shard.dtype
        }
        dtypes = {key: live[key].dtype for key in recast}
        expected = {**self.digests, **tensor_digest.global_digests(recast, dtypes=dtypes)}
        actual = tensor_digest.global_digests(live)
        wrong = [key for key, value in expected.items() if actual.get(key) != value]
        if wrong:
            raise SwitchError(
                f"{len(wrong)} of {len(expected)} tensors differ, for example {wrong[0]}."
            )
        scalars = state.layout.scalar_state()
        for name, count in self.scalar_state.items():
            if count.items() - scalars.get(name, {}).items():
                raise SwitchError(
                    f"Scalar state of {name} is {scalars.get(name)}, expected {dict(count)}."
                )
        return len(expected)

    def describe(self, schedulers: Sequence[Any], *, reset_optimizer: bool) -> list[str]:
        """Return descriptions of the model, its optimizers and schedulers, and the step count."""
        counts = f"{len(self.meta.names)} parameters, {len(self.buffers)} buffers"
        without = " without its state" if reset_optimizer else ""
        return [
            f"{type(self.meta.model).__name__} ({counts})",
            *(f"{recipe.optimizer_class.__name__}{without}" for recipe, _ in self.optimizers),
            *(type(scheduler).__name__ for scheduler in schedulers),
        ]


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
