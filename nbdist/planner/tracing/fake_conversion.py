"""Replaces a module's tensors with fake tensors: shapes and dtypes without data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch._subclasses.fake_tensor import FakeTensorMode


def replace_with_fakes(
    module: nn.Module,
    mode: FakeTensorMode,
    types: Mapping[nn.Parameter, torch.dtype],
    *,
    half: bool = False,
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace all parameters, buffers and tensor attributes with fake CPU tensors.

    Modifies the module: call it in a child process, or on a copy without data. Shared tensors
    stay shared. Returns the new parameter for each old one.

    Args:
        module: its tensors may be on any device, including meta; none is read.
        mode: mode that makes the tensors.
        types: dtypes of the parameters as loaded.
        half: True to make parameters bf16, as in an engine that computes in it.
    """
    fakes: dict[torch.Tensor, Any] = {
        old: _parameter(old, mode, torch.bfloat16 if half and old.is_floating_point() else dtype)
        for old, dtype in types.items()
    }
    for container, name, tensor in list(_tensors(module)):
        if tensor not in fakes:
            fakes[tensor] = _fake(tensor, mode, tensor.dtype)
        container[name] = fakes[tensor]
    return {old: fakes[old] for old in types}


def _tensors(module: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yield the containers and keys where a module and its children store tensors."""
    for submodule in module.modules():
        attributes = vars(submodule)
        lists = [value for value in attributes.values() if isinstance(value, list)]
        for container in (submodule._parameters, submodule._buffers, attributes, *lists):  # noqa: SLF001
            for name, value in _items(container):
                if isinstance(value, torch.Tensor):
                    yield container, name, value


def _items(place: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of a dict, or indices and values of a list."""
    return list(enumerate(place) if isinstance(place, list) else place.items())


def _parameter(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(_fake(tensor, mode, dtype), requires_grad=tensor.requires_grad)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    """Make a fake tensor with the same shape and strides."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")


def fake_like(values: Any, mode: FakeTensorMode) -> Any:
    """Return nested values with all tensors replaced by fake CPU tensors."""
    return tree_map_only(torch.Tensor, lambda tensor: _fake(tensor, mode, tensor.dtype), values)


def with_batch_size(values: Any, mode: FakeTensorMode, old: int, new: int) -> Any:
    """Return nested values with another batch size in the first dimension of tensors."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != old:
            return tensor
        with mode:
            return torch.empty((new, *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")

    return tree_map_only(torch.Tensor, resized, values)
