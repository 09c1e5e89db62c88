"""Copy of a model on the meta device, made in `prepare()`, to rebuild it for another engine.

Each engine modifies the module in its own way. To build it for another engine, the module is
needed as it was before, without the data of its parameters.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
    from collections.abc import Collection, Iterator, Mapping

log = logging.getLogger(__name__)

_ENGINE_ATTRIBUTES = frozenset({"forward", "gradient_checkpointing"})
"""Attributes that an engine or an option sets and that are not carried to the next engine."""
_MAX_SEARCHED_OBJECTS = 10_000
"""Maximum number of objects within an attribute; a larger one is not treated as plain data."""
_ATOMIC_TYPES = (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float)
_ENGINE_LIBRARIES = {"torch", "accelerate", "deepspeed", "transformers", "peft", "nbdist"}
"""Packages whose hooks are registered again by the next engine, or were registered before."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module with the functions that users register."""


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
    memo = _tensor_copies(model, device)
    copied: nn.Module = copy.deepcopy(model, memo)
    for module in copied.modules():
        for functions in (vars(module), *(vars(module)[name] for name in _HOOKS)):
            for name, value in functions.items():
                if isinstance(value, types.FunctionType | types.MethodType):
                    functions[name] = _rebound(value, memo)
    return copied


def _tensor_copies(model: nn.Module, device: str) -> dict[int, Any]:
    """Return copies of a model's tensors without data, by id, as a memo for `copy.deepcopy`."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_8_bit = hasattr(tensor, "SCB")  # with scales
        memo[id(tensor)] = _share_8_bit(tensor) if is_8_bit else _empty_copy(tensor, device)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                # Computed from parameters before each forward, as by pruning and weight_norm.
                memo[id(value)] = _empty_copy(value, device)
        # The scales of bitsandbytes, which training does not change.
        if (scales := vars(module).get("quant_state")) is not None:
            memo[id(scales)] = scales
        if hasattr(state := vars(module).get("state"), "SCB"):
            memo[id(state)] = copy.copy(state)
    return memo


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

    A deep copy shares functions: `self.mlpf = lambda x: m.c_proj(x)` of minGPT and the patched
    forward of TRL 1.16 would call the modules of the original, and keep its parameters alive.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        owner = memo.get(id(value.__self__), value.__self__)
        return types.MethodType(_rebound(value.__func__, memo), owner)
    if not isinstance(value, types.FunctionType) or not _refers_to(value, memo, set()):
        return value
    cells = tuple(types.CellType() for _ in value.__closure__ or ())
    memo[id(value)] = rebound = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, None, cells
    )
    rebound.__defaults__ = tuple(_rebound(each, memo) for each in value.__defaults__ or ()) or None
    rebound.__kwdefaults__ = value.__kwdefaults__
    vars(rebound).update(vars(value))
    for cell, before in zip(cells, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            cell.cell_contents = _rebound(before.cell_contents, memo)
    return rebound


def _refers_to(value: Any, memo: Mapping[int, Any], seen: set[int]) -> bool:
    """Return whether a function, or one that it refers to, uses an object in a memo."""
    if id(value) in memo:
        return True
    if isinstance(value, types.MethodType):
        return _refers_to(value.__self__, memo, seen) or _refers_to(value.__func__, memo, seen)
    if not isinstance(value, types.FunctionType) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_refers_to(each, memo, seen) for each in _bound_values(value))


def _bound_values(function: types.FunctionType) -> list[Any]:
    """Return the values in the closure and the defaults of a function."""
    values: list[Any] = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    return values


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
    are not copied. Attributes that contain modules or tensors with a gradient are skipped.
    """
    prepared_modules = dict(named_modules(prepared))
    own = {id(tensor) for tensor in (*prepared.parameters(), *prepared.buffers())}
    values: dict[str, dict[str, object]] = {}
    for name, module in meta_model.model.named_modules():
        current = vars(prepared_modules[name]) if name in prepared_modules else {}
        values[name] = {
            key: current[key]
            for key in vars(module)
            if not key.startswith("_")
            and key not in _ENGINE_ATTRIBUTES
            and key in current
            and _is_data(current[key], own)
        }
    return values


def modules_with_new_hooks(prepared: nn.Module, meta_model: MetaModel) -> list[str]:
    """Return the names of modules with hooks of the user that the captured model does not have."""
    captured = dict(meta_model.model.named_modules())
    return [
        name or type(module).__name__
        for name, module in named_modules(prepared)
        if name in captured
        for hooks in _HOOKS
        for key, hook in vars(module)[hooks].items()
        if key not in vars(captured[name])[hooks] and not _is_of_library(hook)
    ]


def _is_of_library(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = str(getattr(hook, "__module__", None) or type(hook).__module__)
    return module.partition(".")[0] in _ENGINE_LIBRARIES


def restore_attributes(model: nn.Module, found: Mapping[str, Mapping[str, object]]) -> None:
    """Set the attributes of a bare model's modules, as returned by ``module_attributes``."""
    for name, values in found.items():
        vars(model.get_submodule(name)).update(values)


def _is_data(value: object, own: Collection[int]) -> bool:
    """Return whether a value contains no module, and only tensors that are plain data.

    Args:
        own: ids of the model's parameters and buffers.
    """
    waiting, seen_ids = [value], {id(value)}
    while waiting:
        current = waiting.pop()
        if isinstance(current, nn.Module) or len(seen_ids) > _MAX_SEARCHED_OBJECTS:
            return False
        if isinstance(current, torch.Tensor):
            if type(current) is not torch.Tensor or current.requires_grad or id(current) in own:
                return False
            continue
        if isinstance(current, _ATOMIC_TYPES):
            continue
        function = current if isinstance(current, types.FunctionType) else None
        for inner in _bound_values(function) if function else gc.get_referents(current):
            if id(inner) not in seen_ids:
                seen_ids.add(id(inner))
                waiting.append(inner)
    return True
