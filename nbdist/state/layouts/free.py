"""Emptying an engine, so that its memory is free whoever still refers to it.

deepspeed 0.19.8: after `engine.destroy()` all tensors of a ZeRO-3 engine are still reachable
from its parameters, modules and hooks; a variable, a traceback or a figure of the notebook
that holds one of them would hold them all.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from nbdist.state.layouts.base import innermost, inside_compiled, is_engine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

log = logging.getLogger(__name__)

_OF_MODULES = frozenset(vars(nn.Module()))
"""What any module has, and what printing or collecting one needs."""


@torch.no_grad()
def free(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
    """Let go of all tensors of a prepared model, its engine and its optimizers.

    The objects stay as empty shells that compute nothing any more; a second call does nothing.
    No collective. What the caller wants of them (`param_groups`, buffers) must have been taken
    before. Parameters are emptied in place: also for another model that shares them.

    Args:
        model: as `prepare()` returned it.
        optimizers: likewise, or torch's own.
    """
    modules, prepared = list(model.modules()), inside_compiled(model)
    parameters = [*model.parameters(), *model.buffers()]
    for optimizer in map(innermost, optimizers):
        _free_optimizer(optimizer)
    if is_engine(prepared):
        _free_deepspeed(prepared)
    for module in modules:
        if isinstance(module, FSDPModule):
            _free_fsdp2(module)
        elif isinstance(module, FullyShardedDataParallel):
            parameters += _free_fsdp1(module)
    for parameter in parameters:
        _free_tensor(parameter)
    for module in modules:
        _free_module(module)


def _free_optimizer(optimizer: Any) -> None:
    """Empty torch's own optimizer; its groups keep their options."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []


def _free_deepspeed(engine: Any) -> None:
    """Empty an engine and its optimizer."""
    zero = vars(engine).get("optimizer")
    try:
        engine.destroy()
    except Exception as error:  # noqa: BLE001 - half-built engines fail in their own ways
        log.debug("deepspeed could not end an engine: %s", error)
    inner = getattr(zero, "optimizer", None)
    if inner is not None:
        _free_optimizer(inner)
    for owned in (getattr(zero, "parameter_offload", None), zero):
        if hasattr(owned, "__dict__"):
            vars(owned).clear()
    for name in vars(engine).keys() - _OF_MODULES:
        vars(engine).pop(name)


def _free_fsdp1(module: FullyShardedDataParallel) -> list[torch.Tensor]:
    """Empty the flat parameter of a unit; returns what is to be emptied of it."""
    handle = getattr(module, "_handle", None)
    flat = getattr(handle, "flat_param", None)
    if flat is None:
        return []
    found = [one for one in vars(flat).values() if isinstance(one, torch.Tensor)]
    vars(handle).clear()
    return [flat, *found]


def _free_fsdp2(module: Any) -> None:
    """Empty the groups of a unit, whose objects hold shards beside the module's parameters."""
    state = module._get_fsdp_state()  # noqa: SLF001
    for group in state._fsdp_param_groups:  # noqa: SLF001
        for one in group.fsdp_params:
            vars(one).clear()
        vars(group.comm_ctx).clear()
        vars(group).clear()
    state._fsdp_param_groups.clear()  # noqa: SLF001
    vars(state._comm_ctx).clear()  # noqa: SLF001


def _free_tensor(tensor: torch.Tensor) -> None:
    """Take a tensor's storage and gradient away; what DeepSpeed hung on it goes too."""
    tensor.grad = None
    if isinstance(tensor, DTensor):
        tensor._local_tensor = torch.empty(0)  # noqa: SLF001
        return
    tensor.data = tensor.new_empty(0)
    vars(tensor).clear()


def _free_module(module: nn.Module) -> None:
    """Empty a module but for its children; DDP's reducer has a copy of all gradients."""
    attributes = vars(module)
    for name in ("reducer", "logger", "_original_parameters", "ds_inflight_param_registry"):
        attributes.pop(name, None)
    for name, value in list(attributes.items()):
        if name in {"_parameters", "_buffers"} or name.endswith("_hooks"):
            value.clear()
        elif isinstance(value, torch.Tensor):
            del attributes[name]
