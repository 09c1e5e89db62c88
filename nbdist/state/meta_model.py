"""Copy of a model on the meta device, made in `prepare()`, to rebuild it for another engine.

Each engine modifies the module in its own way. To build it for another engine, the module is
needed as it was before, without the data of its parameters.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbdist.errors import SwitchError
from nbdist.state.layouts import base

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

_OURS = frozenset({"forward", "gradient_checkpointing"})
"""Attributes that an engine or an option sets and that are not carried to the next engine."""
_LOOKED_AT = 10_000
"""Maximum number of objects within an attribute; a larger one is not treated as plain data."""
_NOT_LOOKED_INTO = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetaModel:
    """A module as it was before `prepare()`, without parameter data except 8-bit weights."""

    model: nn.Module
    """Copy on the meta device; tied parameters stay tied."""
    buffers: Mapping[str, torch.Tensor]
    """Non-persistent buffers (rotary frequencies, masks), copied to the host."""

    @property
    def names(self) -> list[str]:
        """Names of the parameters; the first name of tied ones."""
        return [name for name, _ in self.model.named_parameters()]

    @property
    def aliases(self) -> dict[str, str]:
        """Additional names of tied parameters -> their first name."""
        first = first_names(self.model)
        every = self.model.named_parameters(remove_duplicate=False)
        return {
            name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name
        }


def first_names(model: nn.Module) -> dict[int, str]:
    """Return id() -> name of all parameters and buffers; the first name of tied ones."""
    return {
        id(tensor): name
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    }


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a module to the meta device.

    Raises:
        SwitchError: the module contains an object that cannot be copied.
    """
    try:
        return _copy_without_data(model, "meta")
    except Exception as error:  # a module may contain anything, even locks and sockets
        raise SwitchError(f"{type(model).__name__} cannot be copied: {error}") from error


def try_meta_copy(model: nn.Module) -> nn.Module | None:
    """Copy a module to the meta device; return None if it cannot be copied."""
    try:
        return meta_copy(model)
    except SwitchError as error:
        log.info("%s", error)
        return None


def capture_meta_model(model: nn.Module, *, before_engine: MetaModel | None = None) -> MetaModel:
    """Capture what is needed to rebuild a bare model.

    Args:
        before_engine: the capture of a model that was in an engine of DeepSpeed since, which has
            changed its dtype: that of this capture is kept.

    Raises:
        SwitchError: the module contains an object that cannot be copied.
    """
    persistent = set(model.state_dict(keep_vars=True))
    buffers = {
        name: buffer.detach().to("cpu", copy=True)
        for name, buffer in model.named_buffers()
        if name not in persistent
    }
    copied = meta_copy(model)
    if before_engine is not None:
        buffers |= {n: each for n, each in before_engine.buffers.items() if n in buffers}
        tensors = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
        earlier = before_engine.model
        for name, before in (*earlier.named_parameters(), *earlier.named_buffers()):
            if name in tensors:
                tensors[name].data = tensors[name].data.to(before.dtype)
    return MetaModel(model=copied, buffers=buffers)


def materialize(meta_model: MetaModel) -> nn.Module:
    """Rebuild the model on the CPU with uninitialized parameters and the captured buffers.

    The memory of parameters is allocated but not touched, so it is not resident until an engine
    accesses it.
    """
    model = _copy_without_data(meta_model.model, "cpu")
    buffers = dict(model.named_buffers())
    for name, value in meta_model.buffers.items():
        buffers[name].copy_(value)
    return model


def _copy_without_data(model: nn.Module, device: str) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, "SCB"):  # 8-bit, with scales
            memo[id(tensor)] = _share_8_bit(tensor)
            continue
        memo[id(tensor)] = _empty_copy(tensor, device)
    for module in model.modules():  # the scales of bitsandbytes, which training does not change
        if (scales := vars(module).get("quant_state")) is not None:
            memo[id(scales)] = scales
        if hasattr(state := vars(module).get("state"), "SCB"):
            memo[id(state)] = copy.copy(state)
    copied: nn.Module = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name, value in vars(module).items():
            if isinstance(value, types.MethodType):
                vars(module)[name] = types.MethodType(_rebound(value.__func__, memo), module)
    return copied


def _empty_copy(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    if (shape := getattr(tensor, "ds_shape", None)) is not None:
        empty = empty.new_empty(shape)  # partitioned by ZeRO-3, in an earlier prepare()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _share_8_bit(weight: torch.Tensor) -> torch.Tensor:
    """Return a parameter with the data and the scales of an 8-bit weight of bitsandbytes 0.50.

    It cannot be empty: the layer holds the data in further variables, and sets the parameter's data
    to them in each forward.
    """
    shared = torch.Tensor._make_subclass(type(weight), weight.data, False)  # noqa: FBT003, SLF001
    vars(shared).update(vars(weight))
    return shared


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a function, method or module for the copies in a memo of `copy.deepcopy`.

    The patched forward of TRL 1.16 has the original method in its closure, which a deep copy
    shares: the copy would call the original module, and keep its parameters alive.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(_rebound(value.__func__, memo), memo[id(value.__self__)])
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    memo[id(value)] = rebound = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    rebound.__kwdefaults__ = value.__kwdefaults__
    vars(rebound).update(vars(value))
    for cell, before in zip(cells, value.__closure__, strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            cell.cell_contents = _rebound(before.cell_contents, memo)
    return rebound


def bare_name(name: str) -> str:
    """Return the name in the bare model of a module or parameter of a prepared one."""
    name = base.bare_name(name).removeprefix("module.")  # of DDP or DeepSpeed
    return "" if name == "module" else name


def named_modules(prepared: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules of a prepared model by bare name, wrappers before the wrapped module."""
    for name, module in prepared.named_modules():
        yield bare_name(name), module


def module_attributes(prepared: nn.Module, meta_model: MetaModel) -> dict[str, dict[str, object]]:
    """Return plain data attributes of modules: module -> attribute -> value, with `training`.

    A module's config may have changed since `prepare()` and variables may refer to it, so values
    are not copied. Attributes that contain modules or tensors are skipped.
    """
    prepared_modules = dict(named_modules(prepared))
    values: dict[str, dict[str, object]] = {}
    for name, module in meta_model.model.named_modules():
        current = vars(prepared_modules[name]) if name in prepared_modules else {}
        values[name] = {
            key: current[key]
            for key in vars(module)
            if not key.startswith("_")
            and key not in _OURS
            and key in current
            and _is_data(current[key])
        }
    return values


def restore_attributes(model: nn.Module, found: Mapping[str, Mapping[str, object]]) -> None:
    """Set the attributes of a bare model's modules, as returned by ``module_attributes``."""
    for name, values in found.items():
        vars(model.get_submodule(name)).update(values)


def _is_data(value: object) -> bool:
    """Return whether a value contains no module or tensor, as far as `gc` can see."""
    waiting, seen_ids = [value], {id(value)}
    while waiting:
        current = waiting.pop()
        if isinstance(current, (nn.Module, torch.Tensor)) or len(seen_ids) > _LOOKED_AT:
            return False
        if isinstance(current, _NOT_LOOKED_INTO):
            continue
        for inner in gc.get_referents(current):
            if id(inner) not in seen_ids:
                seen_ids.add(id(inner))
                waiting.append(inner)
    return True
