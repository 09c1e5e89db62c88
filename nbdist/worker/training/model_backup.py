"""Copy of a prepared model's state, to restore it after a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbdist.state import optimizer_recipes, reshard, shards
from nbdist.worker.training import model_recipe, training_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.state.shards import Shard
    from nbdist.worker.training.model_recipe import LossScale
    from nbdist.worker.training.model_state import ModelState, ScalarState
    from nbdist.worker.training.prepared_models import PreparedModel


@dataclass(slots=True, kw_only=True, eq=False)
class ModelBackup:
    """Copy of one model's state, to restore it after a failure."""

    tensors: dict[str, Shard]
    buffers: dict[str, torch.Tensor]
    counts: ScalarState
    state_dicts: tuple[list[Any], dict[str, torch.Tensor]]
    """As of ``ModelState.state_dicts``, in host memory."""
    options: list[list[optimizer_recipes.GroupOptions]]
    schedulers: list[dict[str, Any]]
    scale: LossScale | None
    steps: int


def back_up(
    state: ModelState, prepared: PreparedModel, live: Mapping[str, Shard], counts: ScalarState
) -> ModelBackup:
    """Copy one model's state, so that it can be restored."""
    trees, tensors = state.state_dicts()
    return ModelBackup(
        tensors=shards.copy_to_host(live),
        buffers={key: tensor.detach().clone() for key, tensor in state.buffers().items()},
        counts=counts,
        state_dicts=(
            trees,
            {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()},
        ),
        options=[
            optimizer_recipes.group_options(owned.inner_optimizer)
            for owned in prepared.live_optimizers
        ],
        schedulers=[wrapper.scheduler.state_dict() for wrapper in prepared.live_schedulers],
        scale=model_recipe.get_loss_scale(prepared),
        steps=prepared.num_steps,
    )


def restore(
    state: ModelState, prepared: PreparedModel, backup: ModelBackup, *, optimizers: bool
) -> None:
    """Restore one model's state from the copy; a collective."""
    with torch.no_grad():
        for key, live in state.buffers().items():
            live.copy_(backup.buffers[key])
    if not optimizers:
        reshard.reshard(backup.tensors, state.target_shards(optimizers=False))
        state.finalize_state({})
        return
    targets = state.target_shards()
    zero_shards(shard for key, shard in targets.items() if key not in backup.tensors)
    state.load_from(
        backup.tensors,
        training_metadata.initial_scalar_state(state.scalar_state()) | backup.counts,
    )
    state.load_state_dicts(*backup.state_dicts)
    for owned, options in zip(prepared.live_optimizers, backup.options, strict=True):
        for group, saved in zip(owned.inner_optimizer.param_groups, options, strict=True):
            group.update(saved)
    for wrapper, scheduler in zip(prepared.live_schedulers, backup.schedulers, strict=True):
        wrapper.scheduler.load_state_dict(scheduler)
    model_recipe.set_loss_scale(prepared, backup.scale)
    prepared.num_steps = backup.steps


@torch.no_grad()
def zero_shards(absent: Iterable[Shard]) -> None:
    """Set optimizer state that was not saved to zero, its value before the first step."""
    for shard in absent:
        for piece in shard.pieces:
            piece.view.zero_()
