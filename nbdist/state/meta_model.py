"""A model without its data: kept from `prepare()` on, so that it can be made again.

An engine takes a model apart, each in its own way. What is needed to build it for another
engine is the module as it was before, without a byte of its parameters.
"""

from __future__ import annotations

import copy
import gc
import logging
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbdist.errors import SwitchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
"""What torch.compile, activation checkpointing, FSDP1 and DDP put into names."""
_OURS = frozenset({"forward", "gradient_checkpointing"})
"""Attributes that an engine or an option sets and the next one must not find."""
_LOOKED_AT = 10_000
"""Objects within one attribute of a module; beyond it the attribute is not taken for data."""
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
class Skeleton:
    """A module as it was before an engine took it."""

    model: nn.Module
    """On the meta device; tied parameters are one, as they were."""
    buffers: Mapping[str, torch.Tensor]
    """Buffers that are in no state dict (rotary frequencies, masks), copied to the host."""

    @property
    def names(self) -> list[str]:
        """Parameters by name, tied ones by their first."""
        return [name for name, _ in self.model.named_parameters()]

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters -> the first."""
        first = {id(one): name for name, one in self.model.named_parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: first[id(one)] for name, one in every if first[id(one)] != name}


def without_data(model: nn.Module) -> nn.Module:
    """Copy a module onto the meta device.

    Raises:
        SwitchError: it holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = _as(tensor, empty)
    try:
        copied: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # a module may hold anything, locks and sockets too
        message = f"{type(model).__name__} cannot be copied: {error}"
        raise SwitchError(message) from error
    return copied


def twin(model: nn.Module) -> nn.Module | None:
    """Copy a module onto the meta device; None where it cannot be copied."""
    try:
        return without_data(model)
    except SwitchError as error:
        log.info("%s", error)
        return None


def skeleton(model: nn.Module) -> Skeleton:
    """Keep what is needed to make a bare model again.

    Raises:
        SwitchError: it holds something that cannot be copied.
    """
    kept = set(model.state_dict(keep_vars=True))
    buffers = {
        name: one.detach().to("cpu", copy=True)
        for name, one in model.named_buffers()
        if name not in kept
    }
    return Skeleton(model=without_data(model), buffers=buffers)


def revived(kept: Skeleton) -> nn.Module:
    """Make the model again: parameters on the CPU with no values yet, buffers as they were.

    Memory of parameters is reserved and not touched, so that it costs nothing before an
    engine reads or fills it.
    """
    memo: dict[int, Any] = {}
    for tensor in (*kept.model.parameters(), *kept.model.buffers()):
        empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
        memo[id(tensor)] = _as(tensor, empty)
    model: nn.Module = copy.deepcopy(kept.model, memo)
    buffers = dict(model.named_buffers())
    for name, value in kept.buffers.items():
        buffers[name].copy_(value)
    return model


def _as(tensor: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Make a parameter of it where the other one is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def plain(name: str) -> str:
    """Name of a module or parameter in the bare model."""
    for part in _WRAPPERS[:-1]:
        name = name.replace(part, "").removesuffix("." + part[:-1])
    name = name.removeprefix(_WRAPPERS[-1])
    return "" if name in {part[:-1] for part in _WRAPPERS} else name


def modules(prepared: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules of what `prepare()` returned, wrappers before what they wrap, by plain name."""
    for name, module in prepared.named_modules():
        yield plain(name), module


def attributes(prepared: nn.Module, kept: Skeleton) -> dict[str, dict[str, object]]:
    """Plain data that modules hold now: module -> attribute -> value, `training` included.

    A module's config may have changed since `prepare()`, and a variable may hold it: the very
    object is carried. What leads to a module or a tensor is left as the skeleton has it.
    """
    living = dict(modules(prepared))
    found: dict[str, dict[str, object]] = {}
    for name, module in kept.model.named_modules():
        now = vars(living[name]) if name in living else {}
        found[name] = {
            key: now[key]
            for key in vars(module)
            if not key.startswith("_") and key not in _OURS and key in now and _is_data(now[key])
        }
    return found


def give_back(model: nn.Module, found: Mapping[str, Mapping[str, object]]) -> None:
    """Set attributes of a bare model's modules."""
    for name, values in found.items():
        vars(model.get_submodule(name)).update(values)


def trainable(prepared: nn.Module) -> dict[str, bool]:
    """Which parameters are trained now, by name; it may have changed since `prepare()`."""
    named = prepared.named_parameters(remove_duplicate=False)
    return {plain(name): one.requires_grad for name, one in named}


def set_trainable(model: nn.Module, found: Mapping[str, bool]) -> None:
    """Freeze and unfreeze parameters of a bare model."""
    for name, one in model.named_parameters(remove_duplicate=False):
        one.requires_grad_(found.get(name, one.requires_grad))


def _is_data(value: object) -> bool:
    """Whether nothing within it is a module or a tensor, as far as can be seen."""
    waiting, seen = [value], {id(value)}
    while waiting:
        one = waiting.pop()
        if isinstance(one, (nn.Module, torch.Tensor)) or len(seen) > _LOOKED_AT:
            return False
        if isinstance(one, _NOT_LOOKED_INTO):
            continue
        for inner in gc.get_referents(one):
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)
    return True
