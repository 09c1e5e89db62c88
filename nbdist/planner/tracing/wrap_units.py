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

EMBEDDING = "get_input_embeddings"
HEAD = "get_output_embeddings"

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
    # accelerate 1.15 makes the ends units by themselves and torch 2.13 refuses a unit's parameters
    # in another one that is made later, as they would be with ViTEmbeddings as a unit.
    own, every = set(own_ends(model).values()), set(ends(model).values())
    return [unit for unit in found if unit in own or every.isdisjoint(unit.modules())]


def ends(model: nn.Module) -> dict[str, nn.Module]:
    """Return input embedding and head of a transformers model, by the method that names them."""
    asked = {name: _asked(model, name) for name in (EMBEDDING, HEAD)}
    return {name: module for name, module in asked.items() if isinstance(module, nn.Module)}


def _asked(model: nn.Module, method: str) -> object:
    """Return what a method of the model names, if there is one."""
    try:
        return getattr(model, method, lambda: None)()
    except NotImplementedError:  # transformers 5.23: of a ResNet or CLIP, which have many or none
        return None


def are_tied(model: nn.Module) -> bool:
    """Whether the head's weight is the input embedding's; accelerate 1.15 groups them then."""
    found = ends(model)
    weight = getattr(found.get(EMBEDDING), "weight", None)
    return weight is not None and weight is getattr(found.get(HEAD), "weight", None)


def own_ends(model: nn.Module) -> dict[str, nn.Module]:
    """Return those of the ends that can be a group: the rest of the model has none of theirs.

    torch 2.13 refuses a parameter that two groups see: T5's embedding has one weight with its
    encoder's and decoder's, and the bias of BERT's head is also held beside the head.
    """
    found = ends(model)
    groups = [list(found)] if are_tied(model) else [[name] for name in found]
    own = [names for names in groups if not _reach_out(model, [found[name] for name in names])]
    return {name: found[name] for names in own for name in names}


def _reach_out(model: nn.Module, group: Collection[nn.Module]) -> bool:
    """Whether a parameter of some modules also stands elsewhere in the model."""
    inside = {module for one in group for module in one.modules()}
    held = {parameter for one in group for parameter in one.parameters()}
    outside = (module for module in model.modules() if module not in inside)
    return any(not held.isdisjoint(module.parameters(recurse=False)) for module in outside)


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
