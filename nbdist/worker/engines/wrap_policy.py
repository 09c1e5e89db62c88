"""Wraps and compiles the units of a model, which `planner.tracing.wrap_units` determines."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.other import is_compiled_module
from torch import nn

from nbdist.errors import OptionError
from nbdist.state import optimizer_properties

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch.optim import Optimizer

    from nbdist.strategies import Options


class UnitWrapPolicy:
    """Auto-wrap policy for FSDP1 and FSDP2 that wraps the given modules."""

    def __init__(self, chosen: Collection[nn.Module]) -> None:
        self._chosen = frozenset(map(id, chosen))

    def __call__(self, module: nn.Module, recurse: bool = False, **_: Any) -> bool:  # noqa: FBT001, FBT002
        """Return True for a unit; for FSDP1's question whether to recurse always True."""
        return recurse or id(module) in self._chosen


def compile_units(model: nn.Module, chosen: Collection[nn.Module]) -> None:
    """Compile each unit in place, or the model if it has none.

    Blocks of a class share their compiled code, and an engine's hooks, collectives and activation
    checkpointing stay outside of it. accelerate 1.15's `use_regional_compilation` would also
    compile each single layer, and its `unwrap_model()` returns the engine under DDP and FSDP1.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        # transformers 5.23 creates a cache in training too, and the blocks' indices in it would
        # cause one compilation for each block. `generate()` uses a cache all the same.
        config.use_cache = False
    for module in chosen or [model]:
        module.compile(backend="inductor")


def compile_in_place(value: Any) -> Any:
    """Return a model for the result of `torch.compile(model)`, compiled as by `model.compile()`.

    Its parameters have their own names, without `_orig_mod`, in which engines find them.
    """
    if not is_compiled_module(value) or getattr(value, "_is_accelerate_prepared", False):
        return value
    module: Any = value._orig_mod  # noqa: SLF001
    module._compiled_call_impl = value.dynamo_ctx(module._call_impl)  # noqa: SLF001
    return module


def with_checkpoint_wrappers(model: nn.Module, chosen: Collection[nn.Module]) -> list[nn.Module]:
    """Return the units, each replaced by its checkpoint wrapper if it has one."""
    wrapper_of = {
        id(module._checkpoint_wrapped_module): module  # noqa: SLF001
        for module in model.modules()
        if isinstance(getattr(module, "_checkpoint_wrapped_module", None), nn.Module)
    }
    return [wrapper_of.get(id(module), module) for module in chosen]


_filled_later: list[bool] = []
"""Non-empty while models are prepared whose weights are loaded afterwards."""


@contextlib.contextmanager
def defer_weights() -> Iterator[None]:
    """Prepare models without weights, which skips their broadcast between ranks."""
    _filled_later.append(True)
    try:
        yield
    finally:
        _filled_later.pop()


def has_weights() -> bool:
    """Return whether the models being prepared have their weights."""
    return not _filled_later


@torch.no_grad()
def broadcast_from_rank_0(model: nn.Module, *, without: Collection[int] = ()) -> None:
    """Broadcast rank 0's weights and buffers, as DDP and DeepSpeed do; collective.

    FSDP shards each rank's own weights, so a model built without a common seed would be a mix
    of different initializations.

    Args:
        without: id() of parameters that are loaded afterwards.
    """
    if not has_weights():
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and id(tensor) not in without:
            torch.distributed.broadcast(tensor.detach(), src=0)


def check_weight_types(model: nn.Module) -> None:
    """Raise OptionError for weights that no backend can broadcast and move."""
    for kind in {type(parameter) for parameter in model.parameters()}:
        if kind.__name__ == "DTensor":
            raise OptionError(
                f"{type(model).__name__} has DTensor parameters (from tp_plan, parallelize_module"
                " or fully_shard), which no backend can wrap. Build the model without them; the"
                " backend shards it."
            )
        # torchao 0.18: Int8Tensor implements neither view nor collectives.
        is_torchao = kind.__module__.partition(".")[0] == "torchao"
        if is_torchao and not hasattr(kind, "fsdp_pre_all_gather"):
            raise OptionError(
                f"{type(model).__name__} has weights of torchao's {kind.__name__}, which supports"
                " no collective operations, so no backend can train it. Quantize with"
                " BitsAndBytesConfig(load_in_4bit=True) instead."
            )


def warn_of_half_weights(model: nn.Module, options: Options | None, precision: str) -> None:
    """Warn if DDP trains a model whose weights FSDP and DeepSpeed would keep in float32.

    transformers 5 loads most models in bfloat16; accelerate 1.15 casts the weights back for FSDP
    only, and DeepSpeed has a float32 copy.
    """
    if options is None or options.strategy.shards or precision == "no":
        return
    trained = [each for each in model.parameters() if each.requires_grad]
    half = [each for each in trained if each.dtype in {torch.bfloat16, torch.float16}]
    if 2 * len(half) > len([*model.parameters()]):
        warnings.warn(
            f"{len(half)} weights of {type(model).__name__} are {half[0].dtype}, and under ddp the"
            " optimizer loses small updates to them. Load the model with dtype=torch.float32, or"
            " use fsdp or ZeRO, which keep trained weights in float32.",
            stacklevel=2,
        )


def warn_of_flattened_parameters(optimizer: Optimizer, options: Options | None) -> None:
    """Warn if the engine flattens parameters whose shape or norm the optimizer uses."""
    # measured under every backend, before the engine changes the groups
    is_elementwise = optimizer_properties.properties_of(optimizer).is_elementwise
    if options and options.strategy.steps_flat_parameters and is_elementwise is False:
        warnings.warn(
            f"{type(optimizer).__name__} updates an element from others of its parameter, and"
            f" {options.backend} gives it parts of flattened parameters, so it trains differently"
            " than under ddp. Use an element-wise optimizer such as AdamW, or ddp.",
            stacklevel=2,
        )


def keep_4bit_layout(model: nn.Module) -> None:
    """Keep bitsandbytes 0.50 from packing 4-bit weights in place in an evaluation on the CPU.

    It does so on processors with AVX512-BF16. Products with packed weights have no gradient, and
    FSDP and ZeRO-3 mix up the shards.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False
            module.state_dict()  # unpacks weights that are packed already
