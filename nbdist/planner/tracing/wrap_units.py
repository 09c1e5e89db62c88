"""Splits a model into units: block classes that it names itself, or modules by size.

Each unit becomes one FSDP group and one checkpointed block.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn

from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

MIN_UNIT_PARAMS = 10_000
"""Parameters; a smaller group costs more in communication than it saves in memory."""
MAX_UNIT_PARAMS = 100_000_000
TARGET_NUM_UNITS = 8
"""Minimum number of units that a plain module is split into, approximately."""

GET_EMBEDDING_METHOD = "get_input_embeddings"
GET_HEAD_METHOD = "get_output_embeddings"

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def block_class_names(model: nn.Module) -> frozenset[str]:
    """Return class names of the blocks that must not be split, of the model or models inside it.

    transformers' models list them in `_no_split_modules`; a wrapper such as a peft model contains
    such a model. Names without a module in this model are dropped.
    """
    present = {type(module).__name__ for module in model.modules()}
    named: set[str] = set()
    for module in model.modules():
        named |= set(getattr(module, "_no_split_modules", None) or ())
    return frozenset(named & present)


def find_wrap_units(
    model: nn.Module,
    *,
    names: Collection[str] | None = None,
    min_num_params: int | None = None,
) -> list[nn.Module]:
    """Return the modules that become units, outermost first, never the model itself.

    Args:
        model: the bare model, or one with checkpointed activations.
        names: class names of the blocks, if given by the user.
        min_num_params: minimum size of a unit, to split by size.

    Raises:
        OptionError: a given name is not a class of this model.
    """
    if names is not None:
        present = {type(module).__name__ for module in model.modules()}
        if missing := sorted(set(names) - present):
            raise OptionError(
                f"The model has no module of class {', '.join(missing)}. "
                f"It has {', '.join(sorted(present))}."
            )
    chosen = frozenset(names) if names is not None else block_class_names(model)
    if chosen and min_num_params is None:
        candidates = [m for m in model.modules() if m is not model and type(m).__name__ in chosen]
    else:
        smallest = max(MIN_UNIT_PARAMS, _num_params(model) // TARGET_NUM_UNITS)
        candidates = list(_by_size(model, min_num_params or min(MAX_UNIT_PARAMS, smallest)))
    # accelerate 1.15 makes the ends units by themselves and torch 2.13 rejects a unit's parameters
    # in another unit that is made later, which would happen with ViTEmbeddings as a unit.
    own, every = (
        set(separable_embedding_and_head(model).values()),
        set(embedding_and_head(model).values()),
    )
    return [unit for unit in candidates if unit in own or every.isdisjoint(unit.modules())]


def embedding_and_head(model: nn.Module) -> dict[str, nn.Module]:
    """Return input embedding and head of a transformers model, by the name of their getter."""
    found: dict[str, nn.Module] = {}
    for name in (GET_EMBEDDING_METHOD, GET_HEAD_METHOD):
        # transformers 5.23 raises for models with several or none (ResNet, CLIP).
        with contextlib.suppress(NotImplementedError):
            module = getattr(model, name, lambda: None)()
            if isinstance(module, nn.Module):
                found[name] = module
    return found


def has_tied_embeddings(model: nn.Module) -> bool:
    """Return whether embedding and head share a weight; accelerate 1.15 then groups them."""
    modules = embedding_and_head(model)
    weight = getattr(modules.get(GET_EMBEDDING_METHOD), "weight", None)
    return weight is not None and weight is getattr(modules.get(GET_HEAD_METHOD), "weight", None)


def separable_embedding_and_head(model: nn.Module) -> dict[str, nn.Module]:
    """Return the ends that can be a group: no other module shares their parameters."""
    # torch 2.13 rejects a parameter in two groups: T5's embedding shares its weight with encoder
    # and decoder, and the bias of BERT's head is also registered next to the head.
    modules = embedding_and_head(model)
    if hasattr(modules.get(GET_HEAD_METHOD), "modules_to_save"):
        # A head that PEFT 0.21 trains. TRL 1.16 multiplies by its weight outside of its forward,
        # where a weight of a unit of its own is sharded, and its gradient would not be reduced.
        del modules[GET_HEAD_METHOD]
    groups = [list(modules)] if has_tied_embeddings(model) else [[name] for name in modules]
    own = [
        names
        for names in groups
        if not _has_shared_parameters(model, [modules[name] for name in names])
    ]
    return {name: modules[name] for names in own for name in names}


def _has_shared_parameters(model: nn.Module, group: Collection[nn.Module]) -> bool:
    inside = {inner for module in group for inner in module.modules()}
    own_parameters = {parameter for module in group for parameter in module.parameters()}
    outside = (module for module in model.modules() if module not in inside)
    return any(
        not own_parameters.isdisjoint(module.parameters(recurse=False)) for module in outside
    )


def _num_params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _by_size(model: nn.Module, smallest: int) -> Iterator[nn.Module]:
    """Yield the innermost modules of at least a size, without shared parameters."""
    # torch 2.13 rejects a parameter in two FSDP groups.
    uses = Counter(
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    )

    def large(module: nn.Module) -> bool:
        return (
            _num_params(module) >= smallest
            and not isinstance(module, _CONTAINERS)
            and not any(uses[parameter] > 1 for parameter in module.parameters())
        )

    for module in model.modules():
        inner = (child for child in module.modules() if child is not module)
        if module is not model and large(module) and not any(map(large, inner)):
            yield module


def add_activation_checkpointing(model: nn.Module, chosen: Collection[nn.Module]) -> bool:
    """Enable activation checkpointing; return whether anything will be recomputed.

    Most transformers models support it themselves; in other models, the units are wrapped in
    torch's checkpoint wrapper.
    """
    # transformers 5.23 renamed it; models of other libraries have the old name.
    names = ("activation_checkpointing", "gradient_checkpointing")
    name = next((name for name in names if hasattr(model, f"{name}_enable")), None)
    if name is not None and getattr(model, "supports_gradient_checkpointing", True):
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            # transformers 5.23 would disable it with a warning at the first forward.
            config.use_cache = False
        enable = getattr(model, f"{name}_enable")
        enable(**{f"{name}_kwargs": {"use_reentrant": False}})
        return True
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    ids = frozenset(map(id, chosen))
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in ids)
    return bool(ids)
