"""View of a prepared model's current state: names, dtypes and this rank's shards."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from nbdist.errors import CheckpointError
from nbdist.state import meta_model
from nbdist.worker.training import model_cleanup, prepared_models
from nbdist.worker.training.model_state import ModelState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.state.shards import Shard
    from nbdist.worker.training.prepared_models import PreparedModel


class ModelTensors:
    """View of one prepared model, without copies."""

    def __init__(self, prepared: PreparedModel) -> None:
        """Inspect the engine.

        Raises:
            SwitchError: the model cannot be described.
        """
        self.meta = prepared.meta
        self._prepared = prepared
        number = prepared_models.all_models().index(prepared)
        carried = ModelState(number, prepared)
        self._prefix = f"model{number + 1 if number else ''}."
        weights = carried.owned_shards(optimizers=False)
        self.owned_shards: dict[str, Shard] = weights | carried.owned_buffers()
        before = {
            self._prefix + name: buffer.dtype for name, buffer in self.meta.model.named_buffers()
        }
        # DeepSpeed casts buffers to its compute dtype; they are saved in the original one.
        original = {key: before.get(key, buffer.dtype) for key, buffer in carried.buffers().items()}
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
        first = {
            id(tensor): name
            for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
        }
        for name, tensor in model.state_dict(keep_vars=True).items():
            key = self._prefix + first.get(id(tensor), "")
            if key in self.dtypes:
                yield name, key

    def numel(self, key: str) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.owned_shards[key].shape)

    def tensor_bytes(self, key: str) -> int:
        """Return the bytes of the full tensor in the dtype in which it is saved."""
        return self.numel(key) * self.dtypes[key].itemsize

    @property
    def widest_dtype(self) -> torch.dtype:
        """The widest floating-point dtype of the model."""
        dtypes = [dtype for dtype in self.dtypes.values() if dtype.is_floating_point]
        return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())


class ModelReference(NamedTuple):
    """Reference to a prepared model or one of its modules."""

    prepared: PreparedModel
    prefix: str
    """Prefix of the module's parameters: "" or "transformer.h."."""


def find_model(value: object) -> ModelReference | None:
    """Find the prepared model that a value is or is a module of."""
    for prepared in prepared_models.all_models() if isinstance(value, nn.Module) else ():
        if value is prepared.user_model() or value is prepared.model:
            return ModelReference(prepared, "")
        for name, module in meta_model.named_modules(prepared.model):
            if module is value:
                return ModelReference(prepared, f"{name}." if name else "")
    return None


def select_model(name: str | None, names: Mapping[str, Any]) -> PreparedModel:
    """Return the prepared model that a variable holds, or the only one.

    Raises:
        CheckpointError: there is none, or there are several and no name is given.
    """
    if name is not None:
        reference = find_model(names.get(name))
        if reference is None or reference.prefix:
            message = (
                f"{name!r} is not a prepared model on the ranks. Use a variable that holds one."
            )
            raise CheckpointError(message)
        return reference.prepared
    models = prepared_models.all_models()
    if len(models) > 1 or not _named(models, names):
        model_cleanup.release_unused_models()  # some may no longer be in use; takes 0.3 s
        models = prepared_models.all_models()
    if len(models) > 1:
        models = _named(models, names)
    if not models:
        message = "No model is prepared on the ranks. Run a cell with accelerator.prepare(model)."
        raise CheckpointError(message)
    if len(models) > 1:
        message = (
            f"{len(models)} models are prepared. Choose one with --model NAME, the variable that"
            " holds it."
        )
        raise CheckpointError(message)
    return models[0]


def _named(everything: Sequence[PreparedModel], names: Mapping[str, Any]) -> list[PreparedModel]:
    """Return the models that a variable holds."""
    return [
        prepared
        for prepared in everything
        if any(value is prepared.model for value in names.values())
    ]
