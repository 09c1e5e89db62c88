"""Layout of FSDP2: each parameter is a DTensor, sharded by rows.

The device mesh has one dimension, or two with HSDP: shards within a node, replicas across nodes.
Replicas are bitwise equal, since they start equal and reduce gradients together; each owns an
even part.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`:
`torch.chunk` of dimension 0; the last ranks have fewer rows or none.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Replicate, Shard

from nbdist.errors import SwitchError
from nbdist.state.layouts.base import Layout, ParameterPlacement, check_group_size, unwrap_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

_CUTS = ((Shard(0),), (Replicate(), Shard(0)))
"""Supported placements per mesh dimension: over all ranks, or within a node and replicated."""


class Fsdp2Layout(Layout):
    """Layout of FSDP2: the optimizer steps the DTensor, whose local tensor has this rank's rows."""

    shards_parameters: ClassVar[bool] = True

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Reshard all units first."""
        # Evaluation leaves the root unit gathered. An error or interrupt within a forward or
        # backward pass leaves any unit gathered and its training state not IDLE.
        super().__init__(model, optimizers)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()  # noqa: SLF001
                if state._is_root and state._training_state != TrainingState.IDLE:  # noqa: SLF001
                    module.reset_iter_state()
                module.reshard()

    @classmethod
    def is_layout_of(cls, model: nn.Module) -> bool:
        """Return whether `fully_shard` was applied to any module of a model."""
        return any(isinstance(module, FSDPModule) for module in unwrap_engine(model).modules())

    @classmethod
    @contextlib.contextmanager
    def full_parameters(cls, model: nn.Module) -> Iterator[None]:
        """Gather all units, and keep them gathered after a forward."""
        units = _units(model)
        groups = [group for unit in units for group in _initialized(unit)._fsdp_param_groups]  # noqa: SLF001
        before = [group.post_forward_mesh_info for group in groups]
        try:
            for group in groups:
                group.post_forward_mesh_info = None  # as torch's set_reshard_after_forward(False)
            for unit in units:
                unit.unshard()
            yield
        finally:
            for group, mesh in zip(groups, before, strict=True):
                group.post_forward_mesh_info = mesh
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
        root = _units(model)[0]
        _initialized(root)
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
        """Return the placement of this rank's rows of a parameter."""
        _check_row_sharding(name, parameter)
        mesh, shape = parameter.device_mesh, tuple(parameter.shape)
        cut = mesh.ndim - 1  # the mesh dimension that shards
        with torch.no_grad():
            local = parameter.to_local().detach()
        rows = -(-shape[0] // mesh.size(cut))
        first = min(shape[0], mesh.get_local_rank(cut) * rows)
        local_rows = min(shape[0], first + rows) - first
        if local.shape != (local_rows, *shape[1:]) or not local.is_contiguous():
            self.refuse_version("DTensor", f"rows {first} to {first + local_rows} of {name} here")
        return ParameterPlacement(
            name=name,
            shape=shape,
            weight=local.view(-1),
            start=first * math.prod(shape[1:]),
            replica_index=mesh.get_local_rank(0) if cut else 0,
            num_replicas=mesh.size(0) if cut else 1,
            optimizer_tensor=self.optimizer_tensor_or_none(parameter),
        )

    def required_attributes(self) -> Iterator[tuple[object, str]]:
        """Yield the required attributes of units and DTensors; also checks the sharding."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield module, "reset_iter_state"
        for name, parameter in self.named_parameters():
            if isinstance(parameter, DTensor):
                _check_row_sharding(name, parameter)
                yield parameter, "device_mesh placements to_local"


def _check_row_sharding(name: str, parameter: DTensor) -> None:
    """Raise if the mesh or the sharded dimension is not supported."""
    mesh = parameter.device_mesh
    if tuple(parameter.placements) not in _CUTS:
        cut = ", ".join(map(str, parameter.placements))
        message = (
            f"{name} has placements ({cut}) over {mesh.ndim} mesh dimensions. nbdist supports FSDP2"
            " models whose parameters are all sharded along dimension 0 over the last mesh"
            " dimension, and replicated over at most one dimension before it."
        )
        raise SwitchError(message)
    check_group_size(mesh.size(), "FSDP2")


def _units(model: nn.Module) -> list[Any]:
    """Return the units of a model, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _initialized(unit: Any) -> Any:
    """Return the state of a unit; torch 2.13 takes the first one that is used as the root."""
    state = unit._get_fsdp_state()  # noqa: SLF001
    state._lazy_init()  # noqa: SLF001
    return state
