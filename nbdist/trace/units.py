"""The units a model is cut into: block classes that it names itself, or modules by size.

A unit becomes one FSDP group, and one checkpointed block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

SMALLEST_UNIT = 10_000
"""Parameters; below it a group costs more in messages than it saves in memory."""
LARGEST_UNIT = 100_000_000
UNITS_WANTED = 8
"""A plain module is cut into about so many units, or more."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def block_names(model: nn.Module) -> frozenset[str]:
    """Class names of the blocks that the model, or one inside it, must not be split in.

    transformers' models name them in `_no_split_modules`; a wrapper such as a peft model
    holds the model that does. Names without a module in this model are left out.
    """
    present = {type(module).__name__ for module in model.modules()}
    named: set[str] = set()
    for module in model.modules():
        named |= set(getattr(module, "_no_split_modules", None) or ())
    return frozenset(named & present)


def units(
    model: nn.Module,
    *,
    names: Collection[str] | None = None,
    min_num_params: int | None = None,
) -> list[nn.Module]:
    """Return the modules that become units, outermost first, never the model itself.

    Args:
        model: the bare model, or one whose activations are checkpointed.
        names: class names of the blocks, where the user gives them.
        min_num_params: for a cut by size, the smallest unit.

    Raises:
        OptionError: a given name is not a class of this model.
    """
    if names is not None:
        present = {type(module).__name__ for module in model.modules()}
        if missing := sorted(set(names) - present):
            message = (
                f"the model has no module of class {', '.join(missing)}; "
                f"it has {', '.join(sorted(present))}."
            )
            raise OptionError(message)
    chosen = frozenset(names) if names is not None else block_names(model)
    if chosen and min_num_params is None:
        found = [m for m in model.modules() if m is not model and type(m).__name__ in chosen]
    else:
        found = list(_by_size(model, min_num_params or _smallest(model)))
    ends = _ends(model)
    return [unit for unit in found if unit in ends or ends.isdisjoint(unit.modules())]


def _ends(model: nn.Module) -> set[nn.Module]:
    """Return the input embedding and the head of a transformers model.

    accelerate 1.15 makes them units by themselves and torch 2.13 refuses a unit's parameters
    in another one that is made later, as they would be with ViTEmbeddings as a unit.
    """
    asked = (
        getattr(model, name, lambda: None)()
        for name in ("get_input_embeddings", "get_output_embeddings")
    )
    return {module for module in asked if isinstance(module, nn.Module)}


def _smallest(model: nn.Module) -> int:
    """Return the number of parameters from which a module becomes a unit."""
    total = _num_params(model)
    return min(LARGEST_UNIT, max(SMALLEST_UNIT, total // UNITS_WANTED))


def _num_params(module: nn.Module) -> int:
    """Count the parameters of a module and its children."""
    return sum(parameter.numel() for parameter in module.parameters())


def _by_size(model: nn.Module, smallest: int) -> Iterator[nn.Module]:
    """Yield the innermost modules of at least a size; a shared parameter is never cut off."""
    shared = _shared_parameters(model)

    def large(module: nn.Module) -> bool:
        return (
            _num_params(module) >= smallest
            and not isinstance(module, _CONTAINERS)
            and not any(parameter in shared for parameter in module.parameters())
        )

    for module in model.modules():
        inner = (child for child in module.modules() if child is not module)
        if module is not model and large(module) and not any(map(large, inner)):
            yield module


def _shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that stand at more than one place of the model.

    torch 2.13 refuses a parameter that two FSDP groups see.
    """
    seen: set[nn.Parameter] = set()
    twice: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (twice if parameter in seen else seen).add(parameter)
    return twice
