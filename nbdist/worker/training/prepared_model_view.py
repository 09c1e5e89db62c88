"""A prepared model as it is now: its names, its tensors, this rank's share of them."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from nbdist.errors import CheckpointError
from nbdist.state import meta_model
from nbdist.worker.training import model_cleanup, prepared_models
from nbdist.worker.training.model_state import Carried

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.state.shards import Shard
    from nbdist.worker.training.prepared_models import Trained


class Living:
    """Where everything of one model is; copies nothing."""

    def __init__(self, one: Trained) -> None:
        """Look at the engine.

        Raises:
            SwitchError: the model cannot be described.
        """
        self.kept = one.kept
        self._one = one
        number = prepared_models.everything().index(one)
        carried = Carried(number, one)
        self._prefix = f"model{number + 1 if number else ''}."
        weights = carried.share(optimizers=False)
        self.share: dict[str, Shard] = weights | carried.share_of_buffers()
        before = {self._prefix + name: one.dtype for name, one in self.kept.model.named_buffers()}
        # DeepSpeed rounds buffers to the type it computes in; elsewhere they are as they were.
        rounded = {key: before.get(key, one.dtype) for key, one in carried.buffers().items()}
        self.dtypes = {key: shard.dtype for key, shard in weights.items()} | rounded
        """Key -> type that its values are given out in."""

    def bare(self) -> nn.Module:
        """The model without data, with the configuration as it is now."""
        model = copy.deepcopy(self.kept.model)
        now = meta_model.attributes(self._one.model, self.kept)
        meta_model.give_back(model, copy.deepcopy(now))
        return model

    def keys(self) -> dict[str, tuple[str, torch.dtype]]:
        """Name of a parameter or persistent buffer, tied ones by their first -> key and type."""
        return {key.removeprefix(self._prefix): (key, kind) for key, kind in self.dtypes.items()}

    def entries(self) -> Iterator[tuple[str, str]]:
        """Names of the state dict's tensors, each with its key; tied ones have one key."""
        model = self.kept.model
        first = {
            id(one): name
            for named in (model.named_parameters(), model.named_buffers())
            for name, one in named
        }
        for name, one in model.state_dict(keep_vars=True).items():
            key = self._prefix + first.get(id(one), "")
            if key in self.dtypes:
                yield name, key

    def numel(self, key: str) -> int:
        """Elements of a whole tensor."""
        return math.prod(self.share[key].shape)

    def size_of(self, key: str) -> int:
        """Bytes of a whole tensor as it is given out."""
        return self.numel(key) * self.dtypes[key].itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The widest type of a weight."""
        kinds = [one for one in self.dtypes.values() if one.is_floating_point]
        return max(kinds, key=lambda kind: kind.itemsize, default=torch.get_default_dtype())


class Found(NamedTuple):
    """A variable that holds a prepared model or a module of one."""

    one: Trained
    prefix: str
    """Of the module's parameters: "" or "transformer.h."."""


def found(value: object) -> Found | None:
    """Find the prepared model that a value is, or is a module of."""
    for one in prepared_models.everything() if isinstance(value, nn.Module) else ():
        if value is one.bare() or value is one.model:
            return Found(one, "")
        for name, module in meta_model.modules(one.model):
            if module is value:
                return Found(one, f"{name}." if name else "")
    return None


def chosen(name: str | None, names: Mapping[str, Any]) -> Trained:
    """The prepared model that a variable holds, or the only one.

    Raises:
        CheckpointError: none, or several and no name.
    """
    if name is not None:
        one = found(names.get(name))
        if one is None or one.prefix:
            message = f"{name!r} is no prepared model on the ranks; name a variable that holds one."
            raise CheckpointError(message)
        return one.one
    everything = prepared_models.everything()
    if len(everything) > 1 or not _named(everything, names):
        model_cleanup.let_go()  # some may be in use no more; 0.3 s
        everything = prepared_models.everything()
    if len(everything) > 1:
        everything = _named(everything, names)
    if not everything:
        message = "no model is prepared on the ranks; run a cell with accelerator.prepare(model)."
        raise CheckpointError(message)
    if len(everything) > 1:
        message = (
            f"{len(everything)} models are prepared; say which with --model NAME, a variable that"
            " holds it."
        )
        raise CheckpointError(message)
    return everything[0]


def _named(everything: Sequence[Trained], names: Mapping[str, Any]) -> list[Trained]:
    """Those that a variable holds."""
    return [one for one in everything if any(value is one.model for value in names.values())]
