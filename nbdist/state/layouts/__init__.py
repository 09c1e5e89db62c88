"""Layouts: where each engine stores the state of a prepared model, one module per engine.

    layout = layouts.layout_for(model, optimizers)
    layout.weights(owned=True)            this rank's shards of the weights
    layout.optimizer_state(owned=True)    this rank's shards of element-wise optimizer state
    layout.scalar_state()                 scalar optimizer state
    layout.allocate_optimizer_state(...)  before writing to the shards with owned=False
    layout.finalize_state(...)            after writing to them

The layouts use attributes of torch 2.13 and deepspeed 0.19; ``check_layout`` raises in advance if
one is missing.

``free_model`` frees the memory of an engine even if references to its objects remain. deepspeed
0.19.8: after `engine.destroy()` all tensors of a ZeRO-3 engine are still reachable from its
parameters, modules and hooks. A single variable or traceback that refers to one of them would keep
all of them alive.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from nbdist.errors import SwitchError
from nbdist.state.layouts.base import (
    DdpLayout,
    Layout,
    fsdp2_param_groups,
    innermost_optimizer,
    is_deepspeed_engine,
    unwrap_compiled,
    unwrap_engine,
)
from nbdist.state.layouts.deepspeed import (
    ZERO3_WITH_OPTIMIZER,
    ZERO3_WITHOUT_OPTIMIZER,
    ZERO12_ATTRIBUTES,
    Zero3Layout,
    Zero12Layout,
)
from nbdist.state.layouts.fsdp import Fsdp1Layout, Fsdp2Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Optimizer

__all__ = ["Layout", "check_layout", "free_engine", "free_model", "kind_of", "layout_for"]

log = logging.getLogger(__name__)

_TESTED_VERSIONS = {"torch": "2.13", "deepspeed": "0.19"}
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module, which printing and garbage collection need."""


def kind_of(model: nn.Module) -> type[Layout]:
    """Return the class of a model's layout, from the types of its modules."""
    prepared: Any = unwrap_compiled(model)
    if is_deepspeed_engine(prepared):
        optimizer = type(prepared.optimizer).__name__
        if optimizer in {ZERO3_WITH_OPTIMIZER, ZERO3_WITHOUT_OPTIMIZER}:
            return Zero3Layout
        if optimizer in ZERO12_ATTRIBUTES:
            return Zero12Layout
    modules = list(unwrap_engine(prepared).modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        return Fsdp1Layout
    return Fsdp2Layout if any(isinstance(m, FSDPModule) for m in modules) else DdpLayout


def layout_for(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Layout:
    """Return the layout of a prepared model; cheap, copies nothing.

    Args:
        model: model as returned by `prepare()`, compiled or not; a bare model is handled as DDP.
        optimizers: the model's optimizers, as returned by `prepare()` or the torch optimizers
            inside; ignored for DeepSpeed, whose engine has the optimizer.

    Raises:
        SwitchError: nbdist does not support the engine's optimizer.
    """
    prepared = unwrap_compiled(model)
    kind = kind_of(prepared)
    if kind is DdpLayout and is_deepspeed_engine(prepared):
        optimizer_class = type(getattr(prepared, "optimizer", None)).__name__
        raise SwitchError(
            f"nbdist cannot reshard the state of this model: DeepSpeed replaced the optimizer with"
            f" its {optimizer_class}. Use backend zero1, zero2 or zero3 without a config that"
            " replaces the optimizer."
        )
    return kind(prepared, optimizers)


def check_layout(model: nn.Module) -> None:
    """Check that the state of an engine can be read; changes nothing.

    Called before the state is needed, because private attributes of libraries change between
    releases.

    Raises:
        SwitchError: an attribute is missing, or the sharding is not supported.
    """
    library = kind_of(model).library
    try:
        layout = layout_for(model)
        for name in layout.used_by_refresh:
            getattr(layout.model.optimizer, name)
        for _ in layout.placements():
            pass
    except AttributeError as error:
        raise SwitchError(
            f"Cannot read the training state of {library} {version(library)}:"
            f" {type(error.obj).__name__} has no {error.name}. Install {library}"
            f" {_TESTED_VERSIONS[library]}, the tested version."
        ) from error


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
        free_engine(prepared)
    for module in modules:
        if isinstance(module, FSDPModule):
            _free_fsdp2(module)
        elif isinstance(module, FullyShardedDataParallel):
            parameters += _free_fsdp1(module)
    for parameter in parameters:
        parameter.grad = None
        if isinstance(parameter, DTensor):
            parameter._local_tensor = torch.empty(0)  # noqa: SLF001
        else:
            parameter.data = parameter.new_empty(0)
            vars(parameter).clear()  # the attributes that DeepSpeed added
    for module in modules:
        _free_module(module)


def _free_optimizer(optimizer: Any) -> None:
    """Free a torch optimizer; its groups keep their options."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []


def free_engine(engine: Any) -> None:
    """Free a DeepSpeed engine and its optimizer, but not the parameters of its module."""
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
    for name in vars(engine).keys() - _MODULE_ATTRIBUTES:
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
    for group in fsdp2_param_groups(module):
        for parameter in group.fsdp_params:
            vars(parameter).clear()
        vars(group.comm_ctx).clear()
        vars(group).clear()
    state._fsdp_param_groups = []  # noqa: SLF001
    vars(state._comm_ctx).clear()  # noqa: SLF001


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
