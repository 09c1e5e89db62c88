"""The units a model is cut into: one FSDP group, or one checkpointed block, each.

Runs on a rank, called by the FSDP engines and by activation checkpointing. Units are the
block classes a transformers model names itself; for a plain module they are chosen by
size. DeepSpeed cuts by itself and uses units for activation checkpointing alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
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
        return [m for m in model.modules() if m is not model and type(m).__name__ in chosen]
    return list(_by_size(model, min_num_params or _smallest(model)))


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


class UnitPolicy:
    """Answers whether a module is a unit, in the ways that FSDP1 and FSDP2 ask."""

    def __init__(self, chosen: Collection[nn.Module]) -> None:
        """Remember the units by identity."""
        self._chosen = frozenset(map(id, chosen))

    def __call__(self, module: nn.Module, recurse: bool = False, **_: Any) -> bool:  # noqa: FBT001, FBT002
        """Return True for a unit, and for "look into its children?" (FSDP1) always."""
        return recurse or id(module) in self._chosen


def checkpoint_activations(model: nn.Module, chosen: Collection[nn.Module]) -> bool:
    """Recompute activations in the backward pass instead of keeping them.

    A transformers model does it itself; in any other, the units are wrapped by torch's own
    checkpoint wrapper. Returns whether anything will be recomputed.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        config: Any = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            # transformers 5.23 turns it off with a warning at the first forward.
            config.use_cache = False
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    wanted = frozenset(map(id, chosen))
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in wanted)
    return bool(wanted)


def with_checkpoint_wrappers(model: nn.Module, chosen: Collection[nn.Module]) -> list[nn.Module]:
    """Return the units, each replaced by its checkpoint wrapper where it has one."""
    wrapper_of = {
        id(module._checkpoint_wrapped_module): module  # noqa: SLF001
        for module in model.modules()
        if isinstance(getattr(module, "_checkpoint_wrapped_module", None), nn.Module)
    }
    return [wrapper_of.get(id(module), module) for module in chosen]


@torch.no_grad()
def same_start(model: nn.Module) -> None:
    """Give every rank rank 0's weights and buffers, as DDP and DeepSpeed do.

    A collective: all ranks call it with the same model. FSDP takes each rank's own piece
    of what that rank has, so models built without a common seed would be mixed.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            torch.distributed.broadcast(tensor.detach(), src=0)
