"""Finds a rank's tensors by use: parameters, gradients, optimizer state and so on.

Covers torch's modules and optimizers, FSDP's internal parameters and DeepSpeed's ZeRO optimizers
(attribute names of torch 2.13 and deepspeed 0.19). Parts have the same names as in
`planner.memory`.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer as TorchOptimizer
from torch.utils._pytree import tree_leaves

from nbdist.state.layouts.base import fsdp2_parameters
from nbdist.worker.training import rebind_variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn
    from torch.optim import Optimizer

LabeledTensors = tuple[str, "Iterable[Any]"]
"""Name of the part, and an iterable of its tensors that may also contain other objects."""

_ZERO: dict[str, tuple[str, ...]] = {
    "parameters": ("bit16_groups_flat", "lp_param_buffer", "fp16_partitioned_groups_flat"),
    "master": ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"),
    "gradients": (
        "averaged_gradients",
        "grad_partitions_flat_buffer",
        "accumulated_grads_in_cpu",
        "all_grad_tensors",
    ),
    "buffers": ("temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload"),
}
"""Part -> attributes of DeepSpeed's ZeRO optimizers."""


def tensors_by_use(model: nn.Module, optimizer: Optimizer | None) -> Iterator[LabeledTensors]:
    """Yield the parts with their tensors; a tensor belongs to the last part that contains it.

    Args:
        optimizer: the innermost optimizer, which has the state.
    """
    yield "parameters", (*model.parameters(), *model.buffers())
    # FSDP1: unsharded parameters and their shards
    names = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
    flat = _flat_parameters(model)
    yield "gathered", [getattr(parameter, name, None) for parameter in flat for name in names]
    yield "parameters", [getattr(parameter, "_local_shard", None) for parameter in flat]
    # ZeRO-3: full parameters and this rank's partitions of them
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_tensor")]
    yield "gathered", partitioned
    yield "parameters", [parameter.ds_tensor for parameter in partitioned]
    for part, attributes in _ZERO.items():
        yield part, _zero_tensors(model, attributes)
    yield "buffers", zero_buckets(model)
    yield "gradients", gradients(model)
    if optimizer is not None:
        yield "optimizer", _state(optimizer)


def all_tensors() -> list[torch.Tensor]:
    """Return all tensors that Python tracks; those held only by C++, as DDP's buckets, are not."""
    tensors = _objects(torch.Tensor)
    real = [tensor for tensor in tensors if type(tensor) is not FakeTensor]  # from torch.compile
    return [tensor for tensor in real if tensor.layout == torch.strided and not tensor.is_meta]


def tensors_of_other_models(model: nn.Module, optimizer: Optimizer | None) -> list[torch.Tensor]:
    """Return the tensors of all other modules and optimizers; may include shared tensors."""
    own = set(map(id, (*model.modules(), optimizer)))
    tensors: list[Any] = []
    for item in _objects(Module, TorchOptimizer):
        if id(item) in own:
            continue
        if isinstance(item, Module):
            parameters = list(item.parameters(recurse=False))
            tensors += [*parameters, *item.buffers(recurse=False), *(p.grad for p in parameters)]
        elif not hasattr(item, "optimizer"):  # a wrapper shares the state of its inner optimizer
            tensors += _state(item)
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _objects(*classes: type) -> list[Any]:
    """Return all objects of these classes that Python tracks, except stale ones."""
    # type() instead of isinstance(): reading __class__ of lazy objects may trigger an import.
    objects = [item for item in gc.get_objects() if issubclass(type(item), classes)]
    return [item for item in objects if not rebind_variables.is_stale(item)]


def gradients(model: nn.Module) -> list[Any]:
    """Return the existing gradients, including those that the engine stores itself."""
    tensors: list[Any] = [parameter.grad for parameter in model.parameters()]
    for flat in _flat_parameters(model):
        tensors += [flat.grad, getattr(flat, "_saved_grad_shard", None)]
    # FSDP2's parameter objects hold unsharded gradients between micro-batches.
    for parameter in fsdp2_parameters(model):
        # There is no unsharded parameter before the first all-gather.
        unsharded = getattr(parameter, "_unsharded_param", None)
        tensors += [parameter.unsharded_accumulated_grad, getattr(unsharded, "grad", None)]
    return [*tensors, *_zero_tensors(model, _ZERO["gradients"])]


def zero_buckets(model: nn.Module) -> list[Any]:
    """Return DeepSpeed's gradient buckets; ZeRO-1 and 2 have them only during backward."""
    ipg_buckets = getattr(getattr(model, "optimizer", None), "ipg_buckets", {}).values()
    return [leaf for bucket in ipg_buckets for leaf in tree_leaves(bucket.buffer)]


def ddp_bucket_bytes(model: nn.Module) -> int:
    """Return the bytes of the buckets in which DDP's C++ reducer copies all gradients."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    return total_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flat_parameters(model: nn.Module) -> list[Any]:
    """Return FSDP1's flat parameters; the model's parameters are views of them."""
    units = [module for module in model.modules() if isinstance(module, Fsdp1)]
    handles = [getattr(unit, "_handle", None) for unit in units]
    return [handle.flat_param for handle in handles if handle is not None]


def _zero_tensors(model: nn.Module, attributes: Iterable[str]) -> list[Any]:
    """Return tensors of the model's ZeRO optimizer; an attribute may be a list or dict of them."""
    zero = getattr(model, "optimizer", None)
    return [leaf for name in attributes for leaf in tree_leaves(getattr(zero, name, None))]


def _state(optimizer: Optimizer) -> list[Any]:
    return [leaf for state in optimizer.state.values() for leaf in tree_leaves(dict(state))]
