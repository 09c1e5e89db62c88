"""Fake tensors in the place of a module's own: shapes and types without data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch._subclasses.fake_tensor import FakeTensorMode


def fill(
    module: nn.Module,
    mode: FakeTensorMode,
    types: Mapping[nn.Parameter, torch.dtype],
    *,
    half: bool = False,
) -> dict[nn.Parameter, nn.Parameter]:
    """Put fake CPU tensors in the place of all parameters, buffers and attributes.

    Changes the module: call it in a child process, or on a copy without data. What is shared
    stays shared. Returns the new parameter of each old one.

    Args:
        module: its tensors may be on any device, meta included; none is read.
        mode: makes the tensors.
        types: of the parameters, as the model was loaded.
        half: parameters become bf16, as in an engine that computes in it.
    """
    made: dict[torch.Tensor, Any] = {
        old: _parameter(old, mode, torch.bfloat16 if half and old.is_floating_point() else dtype)
        for old, dtype in types.items()
    }
    for place, name, tensor in list(_tensors(module)):
        if tensor not in made:
            made[tensor] = _fake(tensor, mode, tensor.dtype)
        place[name] = made[tensor]
    return {old: made[old] for old in types}


def _tensors(module: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yield the places where a module and its children keep tensors."""
    for one in module.modules():
        lists = [value for value in vars(one).values() if isinstance(value, list)]
        for place in (one._parameters, one._buffers, vars(one), *lists):  # noqa: SLF001
            for name, value in _items(place):
                if isinstance(value, torch.Tensor):
                    yield place, name, value


def _items(place: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a dict, or indices and values of a list."""
    return list(enumerate(place) if isinstance(place, list) else place.items())


def _parameter(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Parameter:
    """Make a fake parameter."""
    return nn.Parameter(_fake(tensor, mode, dtype), requires_grad=tensor.requires_grad)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    """Make a fake tensor of the same shape and layout in memory."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")


def like(values: Any, mode: FakeTensorMode) -> Any:
    """Return nested values with fake CPU tensors in the place of tensors."""
    return tree_map_only(torch.Tensor, lambda one: _fake(one, mode, one.dtype), values)


def batched(values: Any, mode: FakeTensorMode, old: int, new: int) -> Any:
    """Return nested values with another batch size: their first dimension, where it is it."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != old:
            return tensor
        with mode:
            return torch.empty((new, *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")

    return tree_map_only(torch.Tensor, resized, values)
