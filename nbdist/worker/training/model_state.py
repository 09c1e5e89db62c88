"""State of a prepared model, with the keys used in checkpoints.

    model.<parameter or buffer>          names of the user's model
    optim.state.<parameter>.<tensor>     element-wise state: "exp_avg", "momentum_buffer"

A second model in the session has the prefixes `model2` and `optim2`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbdist.errors import SwitchError
from nbdist.state import digest, layouts, meta_model, reshard
from nbdist.state.shards import Piece, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.state.shards import ShardMap
    from nbdist.worker.training.prepared_models import PreparedModel

ScalarState = dict[str, dict[str, float]]
"""Parameter -> scalar state of the optimizer: "step"."""


class ModelState:
    """State of a prepared model and its optimizers, as tensors by key."""

    def __init__(self, number: int, prepared: PreparedModel) -> None:
        """Determine the layout of the engine's state.

        Args:
            number: index of the model in the session.
            prepared: the prepared model.
        """
        self._trained = prepared
        suffix = str(number + 1) if number else ""
        self._model, self._optim = f"model{suffix}.", f"optim{suffix}.state."
        self._layout = layouts.layout_for(
            prepared.model, [owned.inner_optimizer for owned in prepared.live_optimizers]
        )

    @property
    def optimizer_prefix(self) -> str:
        """First part of optimizer state keys: "optim"."""
        return self._optim.partition(".")[0]

    @property
    def model_prefix(self) -> str:
        """Prefix of the keys of weights and buffers: "model."."""
        return self._model

    def aliases(self) -> dict[str, str]:
        """Return a mapping from additional keys of tied parameters to the first key."""
        return {
            self._model + name: self._model + first
            for name, first in self._trained.meta.aliases.items()
        }

    def owned_shards(self, *, optimizers: bool = True) -> dict[str, Shard]:
        """Return views of the shards owned by this rank; every element has exactly one owner."""
        return self._keyed(owned=True, optimizers=optimizers)

    def target_shards(self, *, optimizers: bool = True) -> dict[str, Shard]:
        """Return views of all shards that this rank needs."""
        return self._keyed(owned=False, optimizers=optimizers)

    def _keyed(self, *, owned: bool, optimizers: bool) -> dict[str, Shard]:
        weights = self._layout.weights(owned=owned)
        shards = {self._model + name: shard for name, shard in weights.items()}
        for name, states in (
            self._layout.optimizer_state(owned=owned) if optimizers else {}
        ).items():
            shards |= {f"{self._optim}{name}.{key}": shard for key, shard in states.items()}
        return shards

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return this rank's persistent buffers by key, without copying."""
        meta = self._trained.meta_or_none
        names = set(meta.model.state_dict(keep_vars=True)) if meta is not None else set()
        return {
            self._model + meta_model.bare_name(name): buffer
            for name, buffer in self._trained.model.named_buffers()
            if meta_model.bare_name(name) in names
        }

    def owned_buffers(self) -> dict[str, Shard]:
        """Return the buffers as shards, all owned by rank 0."""
        mine = torch.distributed.get_rank() == 0
        return {key: whole_shard(buffer, mine=mine) for key, buffer in self.buffers().items()}

    def target_buffers(self) -> dict[str, Shard]:
        """Return the buffers as shards; every rank needs all of them."""
        return {key: whole_shard(buffer) for key, buffer in self.buffers().items()}

    def scalar_state(self) -> ScalarState:
        """Return the scalar state of the optimizers."""
        return {name: dict(counts) for name, counts in self._layout.scalar_state().items()}

    def allocate_optimizer_state(self, like: ShardMap) -> None:
        """Allocate the optimizer state for these keys."""
        names: dict[str, dict[str, torch.dtype]] = {}
        for key, shard in like.items():
            if key.startswith(self._optim):
                name, _, state = key.removeprefix(self._optim).rpartition(".")
                names.setdefault(name, {})[state] = shard.dtype
        if names:
            self._layout.allocate_optimizer_state(names)

    def finalize_state(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Set the scalar state, and update the engine's copies of the loaded tensors."""
        self._layout.finalize_state(counts)

    def load_from(self, shards: ShardMap, counts: Mapping[str, Mapping[str, float]]) -> int:
        """Load the state from the ranks' shards; return the bytes sent to other ranks.

        Args:
            shards: the shards owned by this rank, from ``owned_shards()`` under any engine.
            counts: scalar state of all parameters.
        """
        self.allocate_optimizer_state(shards)
        sent = reshard.reshard(shards, self.target_shards())
        self.finalize_state(counts)
        return sent

    def verify(
        self,
        digests: Mapping[str, int],
        saved_shards: ShardMap,
        counts: Mapping[str, Mapping[str, float]],
    ) -> int:
        """Compare all tensors and scalars with the original state; return the number of tensors.

        Args:
            digests: digests of the original state by key.
            saved_shards: original shards, used where the engine has another dtype.
            counts: original scalar state.

        Raises:
            SwitchError: tensors differ or are missing.
        """
        shards = self.owned_shards()
        recast = {
            key: shard for key, shard in saved_shards.items() if _is_recast(shard, shards.get(key))
        }
        dtypes = {key: shards[key].dtype for key in recast}
        expected = {**digests, **digest.global_digests(recast, dtypes=dtypes)}
        actual = digest.global_digests(shards)
        wrong = [key for key, value in expected.items() if actual.get(key) != value]
        if wrong:
            message = f"{len(wrong)} of {len(expected)} tensors differ, for example {wrong[0]}."
            raise SwitchError(message)
        scalars = self.scalar_state()
        for name, given in counts.items():
            if given.items() - scalars.get(name, {}).items():
                message = f"Scalar state of {name} is {scalars.get(name)}, expected {dict(given)}."
                raise SwitchError(message)
        return len(expected)


def whole_shard(tensor: torch.Tensor, *, mine: bool = True) -> Shard:
    """Return a shard with the whole tensor, or an empty one if another rank owns it."""
    flat = tensor.detach().reshape(-1)
    pieces = (Piece(0, flat.numel(), flat),) if mine else ()
    return Shard(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=pieces)


def _is_recast(before: Shard, now: Shard | None) -> bool:
    """Return whether the engine stores a tensor in another dtype than the previous engine."""
    return now is not None and now.dtype != before.dtype
