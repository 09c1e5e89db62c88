"""Which tensors of a rank are for what: parameters, gradients, optimizer state and so on.

Runs on a rank, for `worker.memory.memory_probe` and `worker.memory.oom_advice`. Knows where each
engine keeps what it
holds between steps: torch's modules and optimizers, FSDP1's flat parameters, DeepSpeed's
ZeRO optimizers (attribute names of torch 2.13 and deepspeed 0.19). Parts are named as in
`planner.memory_model`.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer as TorchOptimizer
from torch.utils._pytree import tree_leaves

from nbdist.worker.training import rebind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn
    from torch.optim import Optimizer

Part = tuple[str, "Iterable[Any]"]
"""Its name, and tensors among other things."""

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


def held(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Part]:
    """Parts and their tensors, in an order in which a later part knows better.

    Args:
        model: as `prepare()` returned it.
        optimizer: the innermost one, whose state holds tensors.
    """
    yield "parameters", (*model.parameters(), *model.buffers())
    yield from _of_fsdp1(model)
    yield from _of_zero3(model)
    yield from _of_zero(getattr(model, "optimizer", None))
    yield "buffers", buckets(model)
    yield "gradients", gradients(model)
    if optimizer is not None:
        yield "optimizer", _state(optimizer)


def everything() -> list[torch.Tensor]:
    """All tensors that Python knows; what only C++ holds, such as DDP's buckets, is missing.

    Asked by type: some libraries' lazy objects do things when asked for their class.
    """
    found = _objects(torch.Tensor)
    real = [one for one in found if type(one) is not FakeTensor]  # torch.compile keeps many
    return [one for one in real if one.layout == torch.strided and not one.is_meta]


def of_others(model: nn.Module, optimizer: Optimizer | None) -> list[torch.Tensor]:
    """Tensors of all other modules and optimizers that live here; some may be this model's too.

    Args:
        model: as `prepare()` returned it.
        optimizer: the innermost one.
    """
    own = set(map(id, (*model.modules(), optimizer)))
    living = _objects(Module, TorchOptimizer)
    found: list[Any] = []
    for one in living:
        if id(one) in own:
            continue
        if isinstance(one, Module):
            parameters = list(one.parameters(recurse=False))
            found += [*parameters, *one.buffers(recurse=False), *(p.grad for p in parameters)]
        elif not hasattr(one, "optimizer"):  # a wrapper's state is that of the optimizer inside
            found += _state(one)
    return [one for one in found if isinstance(one, torch.Tensor)]


def _objects(*classes: type) -> list[Any]:
    """All objects of these classes that Python tracks, but those that a switch has emptied."""
    found = [one for one in gc.get_objects() if issubclass(type(one), classes)]
    return [one for one in found if not rebind.is_stale(one)]


def gradients(model: nn.Module) -> list[Any]:
    """Gradients that exist now, wherever the engine keeps them."""
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    for flat in _flat_parameters(model):
        found += [flat.grad, getattr(flat, "_saved_grad_shard", None)]
    for one in _fsdp2_parameters(model):
        found += [one.unsharded_accumulated_grad, getattr(_whole(one), "grad", None)]
    zero = getattr(model, "optimizer", None)
    return [*found, *(one for name in _ZERO["gradients"] for one in _tensors(zero, name))]


def buckets(model: nn.Module) -> list[Any]:
    """What DeepSpeed reduces gradients in; ZeRO-1 and 2 have it during backward only."""
    found = getattr(getattr(model, "optimizer", None), "ipg_buckets", {}).values()
    return [one for bucket in found for one in tree_leaves(bucket.buffer)]


def ddp_bucket_bytes(model: nn.Module) -> int:
    """Bytes of the buckets in which DDP's C++ reducer keeps a copy of all gradients."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    return size(one for one in model.parameters() if one.requires_grad)


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(one.numel() * one.element_size() for one in tensors)


def _flat_parameters(model: nn.Module) -> list[Any]:
    """FSDP1's own parameters, of which the model's are views."""
    handles = [getattr(one, "_handle", None) for one in model.modules() if isinstance(one, Fsdp1)]
    return [handle.flat_param for handle in handles if handle is not None]


def _fsdp2_parameters(model: nn.Module) -> list[Any]:
    """FSDP2's own view of each parameter, which keeps whole gradients between micro-batches."""
    sharded = [one for one in model.modules() if isinstance(one, FSDPModule)]
    groups = [group for one in sharded for group in one._get_fsdp_state()._fsdp_param_groups]  # noqa: SLF001
    return [parameter for group in groups for parameter in group.fsdp_params]


def _whole(parameter: Any) -> Any:
    """FSDP2's whole parameter, where it was put together once."""
    return getattr(parameter, "_unsharded_param", None)


def _of_fsdp1(model: nn.Module) -> Iterator[Part]:
    """FSDP1's whole parameters and their shards."""
    whole = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
    flat = _flat_parameters(model)
    yield "gathered", [getattr(one, name, None) for one in flat for name in whole]
    yield "parameters", [getattr(one, "_local_shard", None) for one in flat]


def _of_zero3(model: nn.Module) -> Iterator[Part]:
    """ZeRO-3's whole parameters and a rank's own pieces of them."""
    cut = [one for one in model.parameters() if hasattr(one, "ds_tensor")]
    yield "gathered", cut
    yield "parameters", [one.ds_tensor for one in cut]


def _of_zero(zero: Any) -> Iterator[Part]:
    """What a ZeRO optimizer keeps itself."""
    for part, names in _ZERO.items():
        yield part, [one for name in names for one in _tensors(zero, name)]


def _tensors(owner: Any, name: str) -> list[Any]:
    """Tensors of an attribute: one, or a list or dictionary of them; none where it is missing."""
    return list(tree_leaves(getattr(owner, name, None)))


def _state(optimizer: Optimizer) -> list[Any]:
    """Tensors of an optimizer's state."""
    return [one for state in optimizer.state.values() for one in tree_leaves(dict(state))]
