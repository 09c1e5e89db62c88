"""FSDP1: the parameters of a unit lie one after the other in a flat one, which is cut evenly.

Source: torch 2.13, torch/distributed/fsdp/_flat_param.py: `FlatParameter` lists its original
parameters, `_ShardParamInfo` says which part of each is in this rank's shard. The shard is
`_local_shard` from the first forward on, and the flat parameter's own data before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from nbdist.errors import SwitchError
from nbdist.state import collectives
from nbdist.state.layouts.base import Counts, Layout, Place, bare, check_world, plain
from nbdist.state.shards import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer


class Fsdp1(Layout):
    """What an optimizer steps is this rank's part of the original parameter.

    With `use_orig_params=False` it is the flat parameter.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Return to shards first.

        An evaluation leaves the outermost unit whole; an error or Stop within a forward or a
        backward leaves any of them so, and torch then takes them to be still at work.
        """
        super().__init__(model, optimizers)
        self._reshard()

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        """Whether any module is wrapped by FSDP1."""
        return any(isinstance(one, FullyShardedDataParallel) for one in bare(model).modules())

    def places(self) -> Iterator[Place]:
        """Each original parameter in its unit's flat one; ignored ones are whole."""
        found = {place.name: place for handle in self._handles() for place in self._inside(handle)}
        flat = {id(one) for handle in self._handles() for one in _parameters(handle)}
        for name, parameter in self.named_parameters():
            if id(parameter) not in flat:
                found[name] = self.replica(name, parameter)
        yield from found.values()

    def states(self, *, owned: bool) -> dict[str, dict[str, Shard]]:
        """As everywhere, with the keys of what only other ranks have. A collective."""
        found = super().states(owned=owned)
        kinds = {
            name: {state: (shard.shape, shard.dtype) for state, shard in tensors.items()}
            for name, tensors in found.items()
        }
        for others in collectives.everyones(kinds):
            for name, states in others.items():
                for state, (shape, dtype) in states.items():
                    nothing = Shard(shape=shape, dtype=dtype)
                    found.setdefault(name, {}).setdefault(state, nothing)
        return found

    def counts(self) -> Counts:
        """As everywhere, with those of what only other ranks have. A collective."""
        found: Counts = {}
        for others in collectives.everyones(super().counts()):
            for name, scalars in others.items():
                found.setdefault(name, scalars)
        return found

    def refresh(self) -> None:
        """Return to shards, so that the next forward gathers what was filled."""
        self._reshard()

    def _reshard(self) -> None:
        for unit in self._units():
            unit.training_state = TrainingState.IDLE
            handle = unit._handle  # noqa: SLF001
            handle._training_state = HandleTrainingState.IDLE  # noqa: SLF001
            whole = getattr(handle.flat_param, "_full_param_padded", None)
            if whole is not None and whole.untyped_storage().size() > 0:
                handle.reshard(free_unsharded_flat_param=True)
                handle.post_reshard()
                handle._prefetched = False  # noqa: SLF001

    def _units(self) -> Iterator[Any]:
        """Wrapped modules with parameters."""
        for module in self.model.modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:  # noqa: SLF001
                yield module

    def _handles(self) -> Iterator[Any]:
        """FSDP1's own objects around each flat parameter."""
        for unit in self._units():
            yield unit._handle  # noqa: SLF001

    def _inside(self, handle: Any) -> Iterator[Place]:
        """Find the original parameters of one flat one."""
        flat = handle.flat_param
        if handle.uses_sharded_strategy:
            check_world(handle.process_group.size(), "FSDP1")
        names = {id(module): plain(name) for name, module in self.model.named_modules()}
        shard = getattr(flat, "_local_shard", None)
        shard = flat.detach() if shard is None else shard.detach()
        for index, info in enumerate(flat._param_infos):  # noqa: SLF001
            name = ".".join(filter(None, (names[id(info.module)], info.param_name)))
            if not flat._contiguities[index]:  # noqa: SLF001
                _refuse_order(name)
            yield self._part(handle, index, name, shard)

    def _part(self, handle: Any, index: int, name: str, shard: torch.Tensor) -> Place:
        """Find one original parameter in a shard."""
        flat = handle.flat_param
        shape, part = tuple(flat._shapes[index]), flat._shard_param_infos[index]  # noqa: SLF001
        originals = flat._params  # noqa: SLF001
        if not part.in_shard:
            # torch steps it on other ranks only: its gradient here is None.
            return Place(name=name, shape=shape, weight=shard[:0])
        start, offset = part.intra_param_start_idx, part.offset_in_shard
        weight = shard.narrow(0, offset, part.numel_in_shard)
        stepped = self.if_stepped(flat if originals is None else originals[index])
        if originals is not None:
            offset = 0  # of what is stepped
        if not handle.uses_sharded_strategy:
            return Place(
                name=name,
                shape=shape,
                weight=weight,
                whole=True,
                stepped=stepped,
                offset=offset,
            )
        return Place(
            name=name, shape=shape, weight=weight, start=start, stepped=stepped, offset=offset
        )

    def internals(self) -> Iterator[tuple[object, str]]:
        """Return what is used of the handles; looking at the places checks the cut."""
        for handle in self._handles():
            yield (
                handle,
                "_training_state _prefetched flat_param uses_sharded_strategy process_group",
            )
            yield (
                handle.flat_param,
                "_contiguities _param_infos _params _shapes _shard_param_infos",
            )
            for _ in self._inside(handle):
                pass


def _parameters(handle: Any) -> list[nn.Parameter]:
    """Parameters of modules that are views of a flat one, and that one itself."""
    flat = handle.flat_param
    return [flat, *(flat._params or ()), *(flat._shared_params or ())]  # noqa: SLF001


def _refuse_order(name: str) -> None:
    """Say that a parameter's elements are not in the order that other engines have."""
    message = (
        f"{name} is in another memory order than row by row, and FSDP1 keeps it so in its flat"
        " parameter; use model.to(memory_format=torch.contiguous_format) before prepare()."
    )
    raise SwitchError(message)
