"""A model in training without its engine, its weights and its optimizer state; runs on a rank.

From a mould the model is made again for another engine, in this process or, since all of it
can be pickled but the hooks, in a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.state import digest, meta_model, optimizer_recipes
from nbdist.worker.training import grad_scaler

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from nbdist.state.meta_model import Skeleton
    from nbdist.state.optimizer_recipes import Recipe
    from nbdist.state.shards import ShardMap
    from nbdist.worker.training.grad_scaler import Scale
    from nbdist.worker.training.model_state import Carried, Counts
    from nbdist.worker.training.prepared_models import Trained


@dataclass(slots=True, kw_only=True, eq=False)
class Mould:
    """What it takes to make one model again, and to see that it is the same."""

    skeleton: Skeleton
    attributes: dict[str, dict[str, object]]
    """Plain data that its modules hold."""
    trainable: dict[str, bool]
    buffers: dict[str, torch.Tensor]
    """This rank's own, in host memory, by name."""
    optimizers: list[tuple[Recipe, list[optimizer_recipes.Options]]]
    habits: list[dict[str, Any]]
    """Attributes of each optimizer that its constructor does not know: hooks, own numbers."""
    counts: Counts
    scale: Scale | None
    """Of the loss, under fp16."""
    steps: int
    digests: dict[str, int]
    """Of weights and optimizer state."""

    @classmethod
    def of(
        cls, one: Trained, carried: Carried, share: ShardMap, *, reset_optimizer: bool, hooks: bool
    ) -> Mould:
        """Take it from a model in training; a collective.

        Args:
            one: the model.
            carried: its state.
            share: this rank's part of it.
            reset_optimizer: leave the state of the optimizers behind.
            hooks: keep the hooks of optimizers, which need not be possible to pickle.
        """
        raws = [owned.raw for owned in one.living]
        return cls(
            skeleton=one.kept,
            attributes=meta_model.attributes(one.model, one.kept),
            trainable=meta_model.trainable(one.model),
            buffers=_buffers(one),
            optimizers=[
                (owned.recipe, optimizer_recipes.options(owned.raw)) for owned in one.living
            ],
            habits=[
                optimizer_recipes.own_numbers(raw) | (optimizer_recipes.hooks(raw) if hooks else {})
                for raw in raws
            ],
            counts={} if reset_optimizer else carried.counts(),
            scale=grad_scaler.scale_of(one),
            steps=one.steps,
            digests=digest.agreed(share),
        )

    def cast(self) -> tuple[nn.Module, list[Optimizer]]:
        """Make a bare model and its optimizers, without weights and state."""
        model = meta_model.revived(self.skeleton)
        meta_model.give_back(model, self.attributes)
        meta_model.set_trainable(model, self.trainable)
        named = dict(model.named_parameters(remove_duplicate=False))
        raws = [optimizer_recipes.made(recipe, named, groups) for recipe, groups in self.optimizers]
        for raw, habits in zip(raws, self.habits, strict=True):
            vars(raw).update(habits)
        return model, raws

    def fill(self, one: Trained) -> None:
        """Give the prepared model what is neither weights nor optimizer state."""
        for name, live in one.model.named_buffers():
            live.copy_(self.buffers[meta_model.plain(name)])
        one.steps = self.steps
        grad_scaler.give(one, self.scale)

    def words(self, *, reset_optimizer: bool) -> list[str]:
        """Say what was carried: model and optimizers."""
        counts = f"{len(self.skeleton.names)} parameters, {len(self.buffers)} buffers"
        without = " without its state" if reset_optimizer else ""
        return [
            f"{type(self.skeleton.model).__name__} ({counts})",
            *(f"{recipe.cls.__name__}{without}" for recipe, _ in self.optimizers),
        ]


def _buffers(one: Trained) -> dict[str, torch.Tensor]:
    """Copy this rank's buffers to host memory.

    DeepSpeed rounds buffers to the type that it computes in; those that no state dict has
    (rotary frequencies) are then taken from the skeleton again.
    """
    before = dict(one.kept.model.named_buffers())
    kept = {}
    for name, live in one.model.named_buffers():
        plain = meta_model.plain(name)
        rounded = plain in one.kept.buffers and live.dtype != before[plain].dtype
        kept[plain] = one.kept.buffers[plain] if rounded else live.detach().to("cpu", copy=True)
    return kept
