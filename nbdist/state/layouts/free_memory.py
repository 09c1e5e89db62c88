"""Freeing of an engine's memory even if references to its objects remain.

deepspeed 0.19.8: after `engine.destroy()` all tensors of a ZeRO-3 engine are still reachable
from its parameters, modules and hooks. A single variable or traceback that refers to one of them
would keep all of them alive.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from nbdist.state.layouts.base import innermost_optimizer, is_deepspeed_engine, unwrap_compiled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

log = logging.getLogger(__name__)

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module, which printing and garbage collection need."""


@torch.no_grad()
def free_model(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
    """Free all tensors of a prepared model, its engine and its optimizers.

    The objects remain as unusable empty shells; a second call does nothing. Not a collective. The
    caller must read what it needs (`param_groups`, buffers) before. Parameters are emptied in
    place, which also affects other models that share them.

    Args:
        model: model as returned by `prepare()`.
        optimizers: optimizers as returned by `prepare()`, or torch's own.
    """
    modules, prepared = list(model.modules()), unwrap_compiled(model)
    parameters = [*model.parameters(), *model.buffers()]
    for optimizer in map(innermost_optimizer, optimizers):
        _free_optimizer(optimizer)
    if is_deepspeed_engine(prepared):
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
    """Free a torch optimizer; its groups keep their options."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []


def _free_deepspeed(engine: Any) -> None:
    """Free a DeepSpeed engine and its optimizer."""
    zero = vars(engine).get("optimizer")
    try:
        engine.destroy()
    except Exception as error:  # noqa: BLE001 - partly built engines may raise anything
        log.debug("deepspeed could not destroy an engine: %s", error)
    inner = getattr(zero, "optimizer", None)
    if inner is not None:
        _free_optimizer(inner)
    for owned in (getattr(zero, "parameter_offload", None), zero):
        if hasattr(owned, "__dict__"):
            vars(owned).clear()
    for name in vars(engine).keys() - _OF_MODULES:
        vars(engine).pop(name)


def _free_fsdp1(module: FullyShardedDataParallel) -> list[torch.Tensor]:
    """Detach the flat parameter of an FSDP1 unit; return its tensors, to be freed."""
    handle = getattr(module, "_handle", None)
    flat = getattr(handle, "flat_param", None)
    if flat is None:
        return []
    tensors = [value for value in vars(flat).values() if isinstance(value, torch.Tensor)]
    vars(handle).clear()
    return [flat, *tensors]


def _free_fsdp2(module: Any) -> None:
    """Free the parameter groups of an FSDP2 unit, which refer to shards too."""
    state = module._get_fsdp_state()  # noqa: SLF001
    for group in state._fsdp_param_groups:  # noqa: SLF001
        for parameter in group.fsdp_params:
            vars(parameter).clear()
        vars(group.comm_ctx).clear()
        vars(group).clear()
    state._fsdp_param_groups.clear()  # noqa: SLF001
    vars(state._comm_ctx).clear()  # noqa: SLF001


def _free_tensor(tensor: torch.Tensor) -> None:
    """Free a tensor's storage and gradient, and the attributes that DeepSpeed added."""
    tensor.grad = None
    if isinstance(tensor, DTensor):
        tensor._local_tensor = torch.empty(0)  # noqa: SLF001
        return
    tensor.data = tensor.new_empty(0)
    vars(tensor).clear()


def _free_module(module: nn.Module) -> None:
    """Free a module's own tensors and hooks, not its children."""
    attributes = vars(module)
    # DDP's reducer has a copy of all gradients.
    for name in ("reducer", "logger", "_original_parameters", "ds_inflight_param_registry"):
        attributes.pop(name, None)
    for name, value in list(attributes.items()):
        if name in {"_parameters", "_buffers"} or name.endswith("_hooks"):
            value.clear()
        elif isinstance(value, torch.Tensor):
            del attributes[name]
