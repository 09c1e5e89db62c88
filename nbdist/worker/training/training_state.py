"""State of a prepared model, with the keys used in checkpoints.

    model.<parameter or buffer>          names of the user's model
    optim.state.<parameter>.<tensor>     element-wise state: "exp_avg", "momentum_buffer"
    optim.own.<rank>.<optimizer>.<path>  other state: a tensor of the optimizer's state dict

A second model in the session has the prefixes `model2` and `optim2`.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbdist.errors import CheckpointError
from nbdist.state import layouts, meta_model, optimizer_state_dict, reshard
from nbdist.state.shards import Shard, ShardPiece
from nbdist.worker.training import prepared_models, release_models

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.state.shards import ShardMap
    from nbdist.worker.training.prepared_models import PreparedModel


class ModelAndOptimizerState:
    """State of a prepared model and its optimizers, as tensors by key."""

    def __init__(self, prepared: PreparedModel, number: int | None = None) -> None:
        self.prepared = prepared
        self.number = prepared_models.all_models().index(prepared) if number is None else number
        """Number of the model in the session, or in a checkpoint."""
        suffix = str(self.number + 1) if self.number else ""
        self.model_prefix = f"model{suffix}."
        """Prefix of the keys of weights and buffers."""
        self.optimizer_prefix = f"optim{suffix}"
        """First part of optimizer state keys."""
        self.element_prefix = f"{self.optimizer_prefix}.state."
        """Prefix of the keys of element-wise optimizer state."""
        self.layout = layouts.layout_for(
            prepared.model, [owned.inner_optimizer for owned in prepared.live_optimizers]
        )

    def aliases(self) -> dict[str, str]:
        """Return a mapping from additional keys of tied parameters to the first key."""
        return {
            self.model_prefix + name: self.model_prefix + first
            for name, first in self.prepared.meta.aliases.items()
        }

    def owned_shards(self, *, optimizers: bool = True) -> dict[str, Shard]:
        """Return views of the shards owned by this rank; every element has exactly one owner."""
        return self._shards_by_key(owned=True, optimizers=optimizers)

    def target_shards(self, *, optimizers: bool = True) -> dict[str, Shard]:
        """Return views of all shards that this rank needs."""
        return self._shards_by_key(owned=False, optimizers=optimizers)

    def _shards_by_key(self, *, owned: bool, optimizers: bool) -> dict[str, Shard]:
        weights = self.layout.weights(owned=owned)
        shards = {self.model_prefix + name: shard for name, shard in weights.items()}
        for name, states in (
            self.layout.optimizer_state(owned=owned) if optimizers else {}
        ).items():
            shards |= {f"{self.element_prefix}{name}.{key}": shard for key, shard in states.items()}
        return shards

    def frozen_shards(self) -> dict[str, Shard]:
        """Return the owned shards of the parameters that need no gradient."""
        parameters = self.layout.named_parameters()
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        weights = self.layout.weights(owned=True)
        return {self.model_prefix + name: weights[name] for name in weights if name in frozen}

    def state_dicts(self) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Return the state dicts of optimizers that cannot be resharded.

        Returns:
            The state dicts without tensors, and this rank's live tensors by key.

        Raises:
            CheckpointError: an optimizer holds an object that cannot be stored.
        """
        trees, tensors = [], dict[str, torch.Tensor]()
        with self.layout.other_optimizers() as optimizers:
            for number, optimizer in enumerate(optimizers):
                tree, parts = optimizer_state_dict.flatten(optimizer)
                trees.append(tree)
                prefix = f"{self.state_dict_prefix}{number}."
                tensors |= {prefix + path: part for path, part in parts.items()}
        return trees, tensors

    def load_state_dicts(self, trees: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what ``state_dicts`` returned, under the same engine and number of ranks.

        Raises:
            CheckpointError: the optimizers differ.
        """
        with self.layout.other_optimizers(len(trees)) as optimizers:
            for number, (optimizer, tree) in enumerate(zip(optimizers, trees, strict=True)):
                prefix = f"{self.state_dict_prefix}{number}."
                parts = {
                    key.removeprefix(prefix): tensor
                    for key, tensor in tensors.items()
                    if key.startswith(prefix)
                }
                saved = optimizer_state_dict.unflatten(tree, parts, optimizer)
                optimizer_state_dict.load(optimizer, saved)

    def reset_state_dicts(self) -> None:
        """Drop the state of the optimizers that cannot be resharded."""
        with self.layout.other_optimizers() as optimizers:
            for optimizer in optimizers:
                optimizer.state.clear()

    @property
    def state_dict_rank(self) -> int:
        """Rank that stores the state dicts of this rank: under DDP they are equal on all."""
        return 0 if self.layout.is_replicated else torch.distributed.get_rank()

    @property
    def state_dict_prefix(self) -> str:
        """Prefix of the keys of tensors of this rank's state dicts."""
        return f"{self.optimizer_prefix}.own.{self.state_dict_rank:05d}."

    def buffers(self, *, owned: bool) -> dict[str, Shard]:
        """Return this rank's persistent buffers as shards, without copying.

        Args:
            owned: if True rank 0 owns them all, otherwise all ranks need all of them.
        """
        is_owner = not owned or torch.distributed.get_rank() == 0
        meta = self.prepared.meta_or_none
        names = set(meta.model.state_dict(keep_vars=True)) if meta is not None else set()
        return {
            self.model_prefix + meta_model.bare_name(name): whole_shard(buffer, is_owner=is_owner)
            for name, buffer in self.prepared.model.named_buffers()
            if meta_model.bare_name(name) in names
        }

    def allocate_optimizer_state(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Allocate the optimizer state among these keys, by key -> dtype."""
        names: dict[str, dict[str, torch.dtype]] = {}
        for key, dtype in dtypes.items():
            if key.startswith(self.element_prefix):
                name, _, state = key.removeprefix(self.element_prefix).rpartition(".")
                names.setdefault(name, {})[state] = dtype
        if names:
            self.layout.allocate_optimizer_state(names)

    def load_from(self, shards: ShardMap, counts: Mapping[str, Mapping[str, float]]) -> int:
        """Load the state from the ranks' shards; return the bytes sent to other ranks.

        Args:
            shards: the shards owned by this rank, from ``owned_shards()`` under any engine.
            counts: scalar state of all parameters.
        """
        self.allocate_optimizer_state({key: shard.dtype for key, shard in shards.items()})
        sent = reshard.reshard(shards, self.target_shards())
        self.layout.finalize_state(counts)
        return sent


def whole_shard(tensor: torch.Tensor, *, is_owner: bool = True) -> Shard:
    """Return a shard with the whole tensor, or an empty one if another rank owns it."""
    flat = tensor.detach().reshape(-1)
    pieces = (ShardPiece(0, flat.numel(), flat),) if is_owner else ()
    return Shard(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=pieces)


class ModelTensors:
    """View of one prepared model, without copies."""

    def __init__(self, prepared: PreparedModel) -> None:
        """Inspect the engine.

        Raises:
            SwitchError: the model cannot be described.
        """
        self.meta = prepared.meta
        self._prepared = prepared
        state = ModelAndOptimizerState(prepared)
        self._prefix = state.model_prefix
        weights = state.owned_shards(optimizers=False)
        buffers = state.buffers(owned=True)
        self.owned_shards: dict[str, Shard] = weights | buffers
        before = {
            self._prefix + name: buffer.dtype for name, buffer in self.meta.model.named_buffers()
        }
        # DeepSpeed casts buffers to its compute dtype; they are saved in the original one.
        original = {key: before.get(key, buffer.dtype) for key, buffer in buffers.items()}
        self.dtypes = {key: shard.dtype for key, shard in weights.items()} | original
        """Key -> dtype in which its values are saved."""

    def to_meta(self) -> nn.Module:
        """Return the model on the meta device, with its current configuration."""
        model = copy.deepcopy(self.meta.model)
        attributes = meta_model.module_attributes(self._prepared.model, self.meta)
        meta_model.restore_attributes(model, copy.deepcopy(attributes))
        return model

    def parameter_keys(self) -> dict[str, tuple[str, torch.dtype]]:
        """Return name -> (key, dtype) of parameters and persistent buffers, tied ones once."""
        return {key.removeprefix(self._prefix): (key, dtype) for key, dtype in self.dtypes.items()}

    def state_dict_keys(self) -> Iterator[tuple[str, str]]:
        """Yield the names in the state dict with their keys; tied tensors have the same key."""
        model = self.meta.model
        first = meta_model.first_names(model)
        for name, tensor in model.state_dict(keep_vars=True).items():
            key = self._prefix + first.get(id(tensor), "")
            if key in self.dtypes:
                yield name, key

    def numel(self, key: str) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.owned_shards[key].shape)

    @property
    def widest_dtype(self) -> torch.dtype:
        """The widest floating-point dtype of the model."""
        dtypes = [dtype for dtype in self.dtypes.values() if dtype.is_floating_point]
        return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())


def select_model(name: str | None, names: Mapping[str, Any]) -> PreparedModel:
    """Return the prepared model that a variable holds, or the only one.

    Raises:
        CheckpointError: there is none, or there are several and no name is given.
    """
    if name is not None:
        value = names.get(name)
        held = getattr(value, "__dict__", {}).get("model")  # by a Trainer
        reference = prepared_models.find_model(value) or prepared_models.find_model(held)
        if reference is None or reference.prefix:
            raise CheckpointError(
                f"{name!r} is not a prepared model on the ranks. Use a variable that holds what"
                " accelerator.prepare() returned for a whole model."
            )
        return reference.prepared
    models = prepared_models.all_models()
    if len(models) > 1 or not prepared_models.models_in(names):
        release_models.release_unused_models()  # some may no longer be in use; takes 0.3 s
        models = prepared_models.all_models()
    if len(models) > 1:
        models = prepared_models.models_in(names) or models
    if not models:
        raise CheckpointError(
            "No model is prepared on the ranks. Run a cell with accelerator.prepare(model)."
        )
    if len(models) > 1:
        raise CheckpointError(
            f"{len(models)} models are prepared. Choose one with --model NAME, the variable that"
            " holds it or its Trainer."
        )
    return models[0]
