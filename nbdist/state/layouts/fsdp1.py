"""Layout of FSDP1: the parameters of a unit are concatenated in a flat parameter, split evenly.

Source: torch 2.13, torch/distributed/fsdp/_flat_param.py: `FlatParameter` lists its original
parameters, `_ShardParamInfo` has the part of each that is in this rank's shard. The shard is
`_local_shard` from the first forward on, and the flat parameter's own data before it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from nbdist.errors import SwitchError
from nbdist.state import collectives
from nbdist.state.layouts.base import (
    Layout,
    ParameterPlacement,
    ScalarState,
    bare_name,
    check_group_size,
    unwrap_engine,
)
from nbdist.state.shards import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer


class Fsdp1Layout(Layout):
    """Layout of FSDP1.

    The optimizer steps this rank's part of the original parameters, or the flat parameter with
    `use_orig_params=False`.
    """

    shards_parameters: ClassVar[bool] = True

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Reshard all units first."""
        # Evaluation leaves the root unit gathered. An error or interrupt within a forward or
        # backward pass leaves any unit gathered and its training state not IDLE.
        super().__init__(model, optimizers)
        self._reshard()

    @classmethod
    def is_layout_of(cls, model: nn.Module) -> bool:
        """Return whether any module is wrapped by FSDP1."""
        return any(
            isinstance(module, FullyShardedDataParallel)
            for module in unwrap_engine(model).modules()
        )

    @classmethod
    @contextlib.contextmanager
    def full_parameters(cls, model: nn.Module) -> Iterator[None]:
        """Gather all units, and take the modules out of them.

        torch 2.13: the forward of a unit would gather its parameters again, and free them.
        """
        units = [
            (parent, name, unit)
            for parent in model.modules()
            for name, unit in parent.named_children()
            if isinstance(unit, FullyShardedDataParallel)
        ]
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            for parent, name, unit in units:
                parent.register_module(name, unit.module)
            if isinstance(model, FullyShardedDataParallel):
                vars(model)["forward"] = model.module.__call__
            try:
                yield
            finally:
                vars(model).pop("forward", None)
                for parent, name, unit in units:
                    parent.register_module(name, unit)

    @classmethod
    @contextlib.contextmanager
    def root_parameters(cls, model: nn.Module) -> Iterator[None]:
        """Gather the root unit, in full precision; compute in the dtype of the other units."""
        root = FullyShardedDataParallel.fsdp_modules(model)[0]
        dtype, device = root.mixed_precision.param_dtype, root.compute_device or "cpu"
        with (
            FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False),
            torch.autocast(torch.device(device).type, dtype) if dtype else contextlib.nullcontext(),
        ):
            yield

    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield the placement of each parameter in its flat parameter; ignored ones are whole."""
        places = {
            place.name: place
            for handle in self._handles()
            for place in self._original_placements(handle)
        }
        flat: set[int] = set()
        for handle in self._handles():
            # the module's parameters are views of the flat one
            views = [*(handle.flat_param._params or ()), *(handle.flat_param._shared_params or ())]  # noqa: SLF001
            flat |= set(map(id, [handle.flat_param, *views]))
        for name, parameter in self.named_parameters():
            if id(parameter) not in flat:
                places[name] = self.whole_placement(name, parameter)
        yield from places.values()

    def optimizer_state(self, *, owned: bool) -> dict[str, dict[str, Shard]]:
        """Return the optimizer state, with the keys that only other ranks have. A collective."""
        own_states = super().optimizer_state(owned=owned)
        kinds = {
            name: {state: (shard.shape, shard.dtype) for state, shard in tensors.items()}
            for name, tensors in own_states.items()
        }
        for rank_kinds in collectives.all_gather_values(kinds):
            for name, states in rank_kinds.items():
                for state, (shape, dtype) in states.items():
                    nothing = Shard(shape=shape, dtype=dtype)
                    own_states.setdefault(name, {}).setdefault(state, nothing)
        return own_states

    def scalar_state(self) -> ScalarState:
        """Return the scalar state, including that of other ranks. A collective."""
        counts: ScalarState = {}
        for rank_counts in collectives.all_gather_values(super().scalar_state()):
            for name, scalars in rank_counts.items():
                counts.setdefault(name, scalars)
        return counts

    def refresh(self) -> None:
        """Reshard, so that the next forward gathers the written values."""
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
        """Yield the FSDP1 units that have parameters."""
        for module in self.model.modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:  # noqa: SLF001
                yield module

    def _handles(self) -> Iterator[Any]:
        """Yield FSDP1's handle of each flat parameter."""
        for unit in self._units():
            yield unit._handle  # noqa: SLF001

    def _original_placements(self, handle: Any) -> Iterator[ParameterPlacement]:
        """Yield the placements of the original parameters of a flat parameter."""
        flat = handle.flat_param
        if handle.uses_sharded_strategy:
            check_group_size(handle.process_group.size(), "FSDP1")
        names = {id(module): bare_name(name) for name, module in self.model.named_modules()}
        shard = getattr(flat, "_local_shard", None)
        shard = flat.detach() if shard is None else shard.detach()
        for index, info in enumerate(flat._param_infos):  # noqa: SLF001
            name = ".".join(filter(None, (names[id(info.module)], info.param_name)))
            if not flat._contiguities[index]:  # noqa: SLF001
                message = (
                    f"{name} is not in row-major memory order, which FSDP1 preserves in its flat"
                    " parameter. Call model.to(memory_format=torch.contiguous_format) before"
                    " prepare()."
                )
                raise SwitchError(message)
            yield self._part(handle, index, name, shard)

    def _part(self, handle: Any, index: int, name: str, shard: torch.Tensor) -> ParameterPlacement:
        """Return the placement of an original parameter in this rank's shard."""
        flat = handle.flat_param
        shape, part = tuple(flat._shapes[index]), flat._shard_param_infos[index]  # noqa: SLF001
        originals = flat._params  # noqa: SLF001
        if not part.in_shard:
            # Stepped on other ranks only: its gradient here is None.
            return ParameterPlacement(name=name, shape=shape, weight=shard[:0])
        start, offset = part.intra_param_start_idx, part.offset_in_shard
        weight = shard.narrow(0, offset, part.numel_in_shard)
        stepped = self.optimizer_tensor_or_none(flat if originals is None else originals[index])
        if originals is not None:
            offset = 0  # in the stepped tensor
        return ParameterPlacement(
            name=name,
            shape=shape,
            weight=weight,
            start=start if handle.uses_sharded_strategy else 0,
            is_whole=not handle.uses_sharded_strategy,
            optimizer_tensor=stepped,
            optimizer_offset=offset,
        )

    def required_attributes(self) -> Iterator[tuple[object, str]]:
        """Yield the required attributes of the handles; iterating also checks the sharding."""
        for handle in self._handles():
            yield (
                handle,
                "_training_state _prefetched flat_param uses_sharded_strategy process_group",
            )
            yield (
                handle.flat_param,
                "_contiguities _param_infos _params _shapes _shard_param_infos",
            )
            for _ in self._original_placements(handle):
                pass
