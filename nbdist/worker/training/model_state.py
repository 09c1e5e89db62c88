"""The state of a living model under the keys of checkpoints; runs on a rank.

    model.<parameter or buffer>          as the bare model names it
    optim.state.<parameter>.<tensor>     element-wise state: "exp_avg", "momentum_buffer"

A second model under the same session has the prefixes `model2` and `optim2`.
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
    from nbdist.worker.training.prepared_models import Trained

Counts = dict[str, dict[str, float]]
"""Parameter -> scalar state of the optimizer: "step"."""


class Carried:
    """One prepared model with its optimizers, as tensors by key."""

    def __init__(self, number: int, one: Trained) -> None:
        """Find out where its engine keeps what.

        Args:
            number: 0 for the first model of the session.
            one: what `prepare()` learned.
        """
        self._trained = one
        suffix = str(number + 1) if number else ""
        self._model, self._optim = f"model{suffix}.", f"optim{suffix}.state."
        self._layout = layouts.of(one.model, [owned.raw for owned in one.living])

    @property
    def optim(self) -> str:
        """First part of the keys of optimizer state: "optim"."""
        return self._optim.partition(".")[0]

    @property
    def model(self) -> str:
        """What the keys of weights and buffers begin with: "model."."""
        return self._model

    def aliases(self) -> dict[str, str]:
        """Further keys of tied parameters -> the first."""
        return {
            self._model + name: self._model + first
            for name, first in self._trained.kept.aliases.items()
        }

    def share(self, *, optimizers: bool = True) -> dict[str, Shard]:
        """This rank's share: each element of a tensor is on exactly one rank. Live."""
        return self._keyed(owned=True, optimizers=optimizers)

    def wanted(self, *, optimizers: bool = True) -> dict[str, Shard]:
        """All that this rank must be given. Live."""
        return self._keyed(owned=False, optimizers=optimizers)

    def _keyed(self, *, owned: bool, optimizers: bool) -> dict[str, Shard]:
        weights = self._layout.weights(owned=owned)
        found = {self._model + name: shard for name, shard in weights.items()}
        for name, tensors in (self._layout.states(owned=owned) if optimizers else {}).items():
            found |= {f"{self._optim}{name}.{which}": one for which, one in tensors.items()}
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Live buffers of the state dict by key; every rank has its own."""
        kept = self._trained.skeleton
        names = set(kept.model.state_dict(keep_vars=True)) if kept is not None else set()
        return {
            self._model + meta_model.plain(name): one
            for name, one in self._trained.model.named_buffers()
            if meta_model.plain(name) in names
        }

    def share_of_buffers(self) -> dict[str, Shard]:
        """Rank 0's buffers as shards; the other ranks have no share in them."""
        mine = torch.distributed.get_rank() == 0
        return {key: whole(one, mine=mine) for key, one in self.buffers().items()}

    def wanted_buffers(self) -> dict[str, Shard]:
        """Buffers as shards; every rank wants all."""
        return {key: whole(one) for key, one in self.buffers().items()}

    def counts(self) -> Counts:
        """Scalar state of the optimizers."""
        return {name: dict(counts) for name, counts in self._layout.counts().items()}

    def allocate(self, like: ShardMap) -> None:
        """Make room for the optimizer state that these keys name."""
        names: dict[str, dict[str, torch.dtype]] = {}
        for key, shard in like.items():
            if key.startswith(self._optim):
                name, _, which = key.removeprefix(self._optim).rpartition(".")
                names.setdefault(name, {})[which] = shard.dtype
        if names:
            self._layout.allocate(names)

    def settle(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Set scalar state, and let the engine renew its copies of what was filled."""
        self._layout.settle(counts)

    def take(self, share: ShardMap, counts: Mapping[str, Mapping[str, float]]) -> int:
        """Fill this model from the ranks' shares; returns the bytes sent to other ranks.

        Args:
            share: of this rank, as `share()` of some engine gave it.
            counts: scalar state of all parameters.
        """
        self.allocate(share)
        sent = reshard.move(share, self.wanted())
        self.settle(counts)
        return sent

    def verify(
        self,
        digests: Mapping[str, int],
        kept: ShardMap,
        counts: Mapping[str, Mapping[str, float]],
    ) -> int:
        """Compare all tensors and counts with what they were; returns how many tensors.

        Args:
            digests: of before, by key.
            kept: the shares of before; consulted where the engine keeps another type.
            counts: of before.

        Raises:
            SwitchError: tensors differ, or are missing.
        """
        now = self.share()
        recast = {key: shard for key, shard in kept.items() if _is_recast(shard, now.get(key))}
        types = {key: now[key].dtype for key in recast}
        expected = {**digests, **digest.agreed(recast, dtypes=types)}
        found = digest.agreed(now)
        wrong = [key for key, value in expected.items() if found.get(key) != value]
        if wrong:
            message = f"{len(wrong)} of {len(expected)} tensors differ, {wrong[0]} among them."
            raise SwitchError(message)
        counted = self.counts()
        for name, given in counts.items():
            if given.items() - counted.get(name, {}).items():
                message = f"{name} has the counts {counted.get(name)}, and had {dict(given)}."
                raise SwitchError(message)
        return len(expected)


def whole(tensor: torch.Tensor, *, mine: bool = True) -> Shard:
    """Make a shard of all of a tensor, or of nothing of it."""
    flat = tensor.detach().reshape(-1)
    pieces = (Piece(0, flat.numel(), flat),) if mine else ()
    return Shard(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=pieces)


def _is_recast(before: Shard, now: Shard | None) -> bool:
    """Whether the engine keeps a tensor in another type than the one before it."""
    return now is not None and now.dtype != before.dtype
