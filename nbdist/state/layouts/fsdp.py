"""Layouts of FSDP1, which flattens parameters, and FSDP2, which shards each by rows.

FSDP1: the parameters of a unit are concatenated in a flat parameter, split evenly. Source: torch
2.13, torch/distributed/fsdp/_flat_param.py: `FlatParameter` lists its original parameters,
`_ShardParamInfo` has the part of each that is in this rank's shard. The shard is `_local_shard`
from the first forward on, and the flat parameter's own data before it.

FSDP2: each parameter is a DTensor, sharded by rows. The device mesh has one dimension, or two with
HSDP: shards within a node, replicas across nodes. Replicas are bitwise equal, since they start
equal and reduce gradients together; each owns an even part. Source: torch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`: `torch.chunk` of
dimension 0; the last ranks have fewer rows or none.

Both layouts reshard all units first. Evaluation leaves the root unit gathered. An error or
interrupt within a forward or backward pass leaves any unit gathered and its training state not
IDLE.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as Fsdp2TrainingState
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardedDim

from nbdist.errors import SwitchError
from nbdist.state import collectives
from nbdist.state.layouts.base import (
    Layout,
    ParameterPlacement,
    ScalarState,
    bare_name,
    check_group_size,
    fsdp2_param_groups,
    fsdp2_units,
)
from nbdist.state.shards import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

_SUPPORTED_PLACEMENTS = ((ShardedDim(0),), (Replicate(), ShardedDim(0)))
"""Supported placements of FSDP2 per mesh dimension: over all ranks, or within a node and
replicated."""


class Fsdp1Layout(Layout):
    """Layout of FSDP1.

    The optimizer steps this rank's part of the original parameters, or the flat parameter with
    `use_orig_params=False`.
    """

    shards_parameters: ClassVar[bool] = True

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Reshard all units first."""
        super().__init__(model, optimizers)
        self.refresh()

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
        gathered: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        # TRL's GRPOTrainer has gathered it already, which torch refuses a second time.
        if root.training_state is not TrainingState.SUMMON_FULL_PARAMS:
            summon = FullyShardedDataParallel.summon_full_params
            gathered = summon(model, recurse=False, writeback=False)
        with (
            gathered,
            torch.autocast(torch.device(device).type, dtype) if dtype else contextlib.nullcontext(),
        ):
            yield

    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield the placement of each parameter in its flat parameter; ignored ones are whole."""
        places: dict[str, ParameterPlacement] = {}
        flat: set[int] = set()
        for unit in self._units():
            handle = unit._handle  # noqa: SLF001
            places |= {place.name: place for place in self._original_placements(handle)}
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
        for module in self.model.modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:  # noqa: SLF001
                yield module

    def _original_placements(self, handle: Any) -> Iterator[ParameterPlacement]:
        flat = handle.flat_param
        if handle.uses_sharded_strategy:
            check_group_size(handle.process_group.size(), "FSDP1")
        names = {id(module): bare_name(name) for name, module in self.model.named_modules()}
        shard = getattr(flat, "_local_shard", None)
        shard = flat.detach() if shard is None else shard.detach()
        for index, info in enumerate(flat._param_infos):  # noqa: SLF001
            name = ".".join(filter(None, (names[id(info.module)], info.param_name)))
            if not flat._contiguities[index]:  # noqa: SLF001
                raise SwitchError(
                    f"{name} is not in row-major memory order, which FSDP1 preserves in its flat"
                    " parameter. Call model.to(memory_format=torch.contiguous_format) before"
                    " prepare()."
                )
            shape, part = tuple(flat._shapes[index]), flat._shard_param_infos[index]  # noqa: SLF001
            if not part.in_shard:
                # Stepped on other ranks only: its gradient here is None.
                yield ParameterPlacement(name=name, shape=shape, weight=shard[:0])
                continue
            originals = flat._params  # noqa: SLF001
            stepped = flat if originals is None else originals[index]
            yield ParameterPlacement(
                name=name,
                shape=shape,
                weight=shard.narrow(0, part.offset_in_shard, part.numel_in_shard),
                start=part.intra_param_start_idx if handle.uses_sharded_strategy else 0,
                is_whole=not handle.uses_sharded_strategy,
                optimizer_tensor=self.optimizer_tensor_or_none(stepped),
                optimizer_offset=part.offset_in_shard if originals is None else 0,
            )


class Fsdp2Layout(Layout):
    """Layout of FSDP2: the optimizer steps the DTensor, whose local tensor has this rank's rows."""

    shards_parameters: ClassVar[bool] = True

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Reshard all units first."""
        super().__init__(model, optimizers)
        for unit in fsdp2_units(model):
            state = unit._get_fsdp_state()  # noqa: SLF001
            if state._is_root and state._training_state != Fsdp2TrainingState.IDLE:  # noqa: SLF001
                reset_iteration(unit)
            unit.reshard()

    @classmethod
    @contextlib.contextmanager
    def full_parameters(cls, model: nn.Module) -> Iterator[None]:
        """Gather all units, and keep them gathered after a forward and a backward."""
        units = fsdp2_units(model)
        for unit in units:
            _initialize(unit)
        groups = [group for unit in units for group in fsdp2_param_groups(unit)]
        before = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
        # torch 2.13: state_dict() would reshard the model.
        hooks = [
            (module._state_dict_pre_hooks, handle.id)  # noqa: SLF001
            for group in groups
            for module, handle in group._module_to_pre_save_state_dict_hook_handle.items()  # noqa: SLF001
        ]
        removed = [(of_module, key, of_module.pop(key)) for of_module, key in hooks]
        try:
            for group in groups:
                group.post_forward_mesh_info = None  # as torch's set_reshard_after_forward(False)
                group.reshard_after_backward = False
            for unit in units:
                unit.unshard()
            yield
        finally:
            for of_module, key, hook in removed:
                of_module[key] = hook
            for group, (mesh, reshard) in zip(groups, before, strict=True):
                group.post_forward_mesh_info, group.reshard_after_backward = mesh, reshard
                # torch 2.13: the backward prefetches in this order, which a forward on one rank
                # would make different from that of the others.
                group.comm_ctx.post_forward_order.clear()
                group._post_forward_indices.clear()  # noqa: SLF001
            for unit in units:
                unit.reshard()

    @classmethod
    @contextlib.contextmanager
    def root_parameters(cls, model: nn.Module) -> Iterator[None]:
        """Gather the root unit."""
        root = fsdp2_units(model)[0]
        _initialize(root)
        try:
            root.unshard()
            yield
        finally:
            root.reshard()

    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield the placement of this rank's rows of each parameter; ignored ones are whole."""
        for name, parameter in self.named_parameters():
            if isinstance(parameter, DTensor):
                yield self._row_placement(name, parameter)
            else:
                yield self.whole_placement(name, parameter)

    def _row_placement(self, name: str, parameter: DTensor) -> ParameterPlacement:
        mesh, shape = parameter.device_mesh, tuple(parameter.shape)
        if tuple(parameter.placements) not in _SUPPORTED_PLACEMENTS:
            placements = ", ".join(map(str, parameter.placements))
            raise SwitchError(
                f"{name} has placements ({placements}) over {mesh.ndim} mesh dimensions. nbdist"
                " supports FSDP2 models whose parameters are all sharded along dimension 0 over"
                " the last mesh dimension, and replicated over at most one dimension before it."
            )
        check_group_size(mesh.size(), "FSDP2")
        cut = mesh.ndim - 1  # the mesh dimension that shards
        with torch.no_grad():
            local = parameter.to_local().detach()
        rows = -(-shape[0] // mesh.size(cut))
        first = min(shape[0], mesh.get_local_rank(cut) * rows)
        local_rows = min(shape[0], first + rows) - first
        if local.shape != (local_rows, *shape[1:]) or not local.is_contiguous():
            raise SwitchError(
                f"Cannot read the training state of torch {torch.__version__}: DTensor has no rows"
                f" {first} to {first + local_rows} of {name} here. Install torch 2.13, the tested"
                " version."
            )
        return ParameterPlacement(
            name=name,
            shape=shape,
            weight=local.view(-1),
            start=first * math.prod(shape[1:]),
            replica_index=mesh.get_local_rank(0) if cut else 0,
            num_replicas=mesh.size(0) if cut else 1,
            optimizer_tensor=self.optimizer_tensor_or_none(parameter),
        )


def reset_iteration(root: Any) -> None:
    """Reset a root unit of FSDP2 after an interrupted forward or backward; its gradients are lost.

    torch 2.13 has a method for it. What older versions keep is reset one by one.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    root_state: Any = root._get_fsdp_state()  # noqa: SLF001
    shared, communication = root_state._state_ctx, root_state._comm_ctx  # noqa: SLF001
    if torch.cuda.is_initialized():
        for stream in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
            torch.cuda.current_stream().wait_stream(getattr(communication, f"{stream}_stream"))
    vars(communication).update(all_gather_state=None, reduce_scatter_state=None)
    communication.post_forward_order.clear()
    for state in shared.all_states:
        state._modules_to_run_forward.clear()  # noqa: SLF001
        state._training_state = Fsdp2TrainingState.IDLE  # noqa: SLF001
    for group in [group for state in shared.all_states for group in fsdp2_param_groups(state)]:
        vars(group).update(dict.fromkeys(_GROUP_ITERATION), _training_state=Fsdp2TrainingState.IDLE)
        group._post_forward_indices.clear()  # noqa: SLF001
        group._to_sharded()  # noqa: SLF001
    vars(shared).update(iter_forward_root=None, post_backward_final_callback_queued=False)


_GROUP_ITERATION = (
    "_all_gather_result",
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
    "_all_reduce_state",
)
"""Attributes that a parameter group of torch 2.11 has during an iteration."""


def _initialize(unit: Any) -> None:
    """Initialize a unit; torch 2.13 takes the first one that is used as the root."""
    unit._get_fsdp_state()._lazy_init()  # noqa: SLF001
