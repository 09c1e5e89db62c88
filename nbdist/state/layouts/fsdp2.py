"""FSDP2: each parameter is a DTensor, cut in blocks of rows.

The mesh has one axis, or two: shards inside a node, replicas across nodes. What replicas hold is
equal, bit by bit, for they began equal and reduce their gradients together; each owns an even part.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`:
`torch.chunk` of dimension 0, the last ranks with fewer rows or none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Replicate, Shard

from nbdist.errors import SwitchError
from nbdist.state.layouts.base import Layout, Place, bare, check_world

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

_CUTS = ((Shard(0),), (Replicate(), Shard(0)))
"""Placements by mesh axis: over all ranks, or inside a node and repeated across nodes."""


class Fsdp2(Layout):
    """What an optimizer steps is the DTensor; this rank's rows are its local tensor."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Return to shards first.

        An evaluation leaves the outermost unit whole; an error or Stop within a forward or a
        backward leaves any of them so, and torch then takes them to be still at work.
        """
        super().__init__(model, optimizers)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()  # noqa: SLF001
                if state._is_root and state._training_state != TrainingState.IDLE:  # noqa: SLF001
                    module.reset_iter_state()
                module.reshard()

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        """Whether any of a model's modules was given to `fully_shard`."""
        return any(isinstance(module, FSDPModule) for module in bare(model).modules())

    def places(self) -> Iterator[Place]:
        """Each parameter's rows on this rank; what FSDP was told to ignore is whole."""
        for name, parameter in self.named_parameters():
            if isinstance(parameter, DTensor):
                yield self._cut(name, parameter)
            else:
                yield self.replica(name, parameter)

    def _cut(self, name: str, parameter: DTensor) -> Place:
        """Find this rank's rows of a parameter."""
        _check_cut(name, parameter)
        mesh, shape = parameter.device_mesh, tuple(parameter.shape)
        cut = mesh.ndim - 1  # the axis of the shards
        with torch.no_grad():
            local = parameter.to_local().detach()
        rows = -(-shape[0] // mesh.size(cut))
        first = min(shape[0], mesh.get_local_rank(cut) * rows)
        here = min(shape[0], first + rows) - first
        if local.shape != (here, *shape[1:]) or not local.is_contiguous():
            self._refuse_version("DTensor", f"rows {first} to {first + here} of {name} here")
        return Place(
            name=name,
            shape=shape,
            weight=local.view(-1),
            start=first * math.prod(shape[1:]),
            copy=mesh.get_local_rank(0) if cut else 0,
            copies=mesh.size(0) if cut else 1,
            stepped=self.if_stepped(parameter),
        )

    def internals(self) -> Iterator[tuple[object, str]]:
        """Return what is used of DTensor, of all parameters, which also checks their cut."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield module, "reset_iter_state"
        for name, parameter in self.named_parameters():
            if isinstance(parameter, DTensor):
                _check_cut(name, parameter)
                yield parameter, "device_mesh placements to_local"


def _check_cut(name: str, parameter: DTensor) -> None:
    """Refuse a mesh of more axes and a cut along another dimension."""
    mesh = parameter.device_mesh
    if tuple(parameter.placements) not in _CUTS:
        cut = ", ".join(map(str, parameter.placements))
        message = (
            f"{name} is laid out as ({cut}) over {mesh.ndim} mesh axes; nbdist moves the state of"
            " FSDP2 models whose parameters are all cut along dimension 0 over the last axis, and"
            " repeated over one axis before it at most."
        )
        raise SwitchError(message)
    check_world(mesh.size(), "FSDP2")
