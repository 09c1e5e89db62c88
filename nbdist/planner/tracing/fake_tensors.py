"""Fake tensors in place of a module's own, and CUDA's behaviour on them.

A fake tensor has a shape and a dtype but no data. torch 2.13 aborts the process when a fake CUDA
tensor requires a gradient on a CPU-only build, so a GPU's step is traced with CPU tensors.
`emulate_cuda` emulates three differences that affect memory: autocast computes norms, softmax and
powers in fp32, dropout keeps a mask of one byte per element, and attention with dropout stays
fused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch._subclasses.fake_tensor import FakeTensorMode

FP32_OPERATIONS = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "softplus", "logsumexp", "renorm"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
    *("layer_norm", "native_layer_norm", "group_norm", "rms_norm"),
    *("cosine_similarity", "dist", "pdist"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
)
"""Operations whose arguments autocast casts to fp32 on a GPU but not on a CPU, torch 2.13
(aten/src/ATen/autocast_mode.h)."""
TO_FP32 = (
    *("softmax.int", "log_softmax.int", "cumsum", "cumprod"),
    *("sum", "sum.dim_IntList", "linalg_vector_norm"),
)
"""Operations whose results autocast makes fp32 on a GPU but not on a CPU."""


@contextlib.contextmanager
def emulate_cuda() -> Iterator[None]:
    """Make CPU operations of this process save what a GPU's would."""
    library = torch.library.Library("aten", "IMPL")
    for name in FP32_OPERATIONS:
        run = functools.partial(_run_with_fp32_arguments, _operation(name))
        library.impl(name, run, "AutocastCPU")
    for name in TO_FP32:
        run = functools.partial(_run_with_fp32_result, _operation(name))
        library.impl(name, run, "AutocastCPU")
    # A torch function mode would miss calls inside torch's own functions, such as those of
    # `nn.MultiheadAttention`, and recomputation in a backward.
    attention = functools.partial(_attention, functional.scaled_dot_product_attention)
    fused: dict[str, Any] = {"dropout": _dropout, "scaled_dot_product_attention": attention}
    # The Triton kernels of trl 1.16's loss allocate nothing per tile.
    kernels: Any = sys.modules.get("trl.kernels.chunked_logprob")
    names = ("_forward_tile", "_backward_tile", "_addmm_fp32") if kernels else ()
    try:
        with (
            _patched(functional, fused),
            _patched(kernels, dict.fromkeys(names, lambda *_, **__: None)),
        ):
            yield
    finally:
        library._destroy()  # noqa: SLF001 - torch 2.13 has no public way to unregister it


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    """Disable autocast in nested calls, as its kernels do."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # noqa: SLF001
    return torch._C._ExcludeDispatchKeyGuard(keys)  # noqa: SLF001


def _casts_to_fp32(tensor: torch.Tensor) -> bool:
    return tensor.dtype in {torch.bfloat16, torch.float16}


def _run_with_fp32_arguments(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Autocast's policy fp32."""
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.float() if _casts_to_fp32(tensor) else tensor,
        (args, kwargs),
    )
    with _without_autocast():
        return operation(*args, **kwargs)


def _run_with_fp32_result(operation: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Autocast's policy fp32_set_opt_dtype."""
    names = [argument.name for argument in operation._schema.arguments[1:]]  # noqa: SLF001
    bound = dict(zip(names, args, strict=False)) | kwargs
    with _without_autocast():
        if _casts_to_fp32(tensor) and bound.get("dtype") is None:
            bound["dtype"] = torch.float32
        return operation(tensor, **bound)


@contextlib.contextmanager
def _patched(module: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a module."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _dropout(
    input: torch.Tensor,  # noqa: A002 - torch's name
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    inplace: bool = False,  # noqa: ARG001, FBT001, FBT002 - does not affect what is saved
) -> torch.Tensor:
    """Dropout as in torch's fused kernel, with a mask of one byte per element."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input  # noqa: FBT003


def _attention(
    plain: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - unsupported by the CPU's fused kernel
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Attention whose fused kernel supports dropout, for which a GPU saves nothing."""
    return plain(query, key, value, attn_mask, 0.0, *rest, **named)


# -- conversion ------------------------------------------------------------------------------


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
        old: nn.Parameter(
            _fake(old, mode, torch.bfloat16 if half and old.is_floating_point() else dtype),
            requires_grad=old.requires_grad,
        )
        if old.is_floating_point()
        else old
        for old, dtype in types.items()
    }
    for container, name, tensor in list(_tensors(module)):
        if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
            continue  # bitsandbytes 0.50 needs its own class, with the scales
        if tensor not in fakes:
            fakes[tensor] = _fake(tensor, mode, tensor.dtype)
        container[name] = fakes[tensor]
    return {old: fakes[old] for old in types}


def _tensors(module: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yield the containers and keys where a module and its children store tensors."""
    for submodule in module.modules():
        attributes = vars(submodule)
        lists = [value for value in attributes.values() if isinstance(value, list)]
        containers: list[Any] = [submodule._parameters, submodule._buffers, attributes, *lists]  # noqa: SLF001
        for container in containers:
            pairs = enumerate(container) if isinstance(container, list) else container.items()
            for name, value in list(pairs):
                if isinstance(value, torch.Tensor):
                    yield container, name, value


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
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
