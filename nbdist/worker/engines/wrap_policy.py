"""What is done with a model's units: one FSDP group, or one checkpointed block, each.

Runs on a rank, called by the FSDP engines and by activation checkpointing. Which modules are
units, `planner.tracing.wrap_units` says. DeepSpeed cuts by itself and uses units for activation
checkpointing alone.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


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


_filled_later: list[bool] = []
"""Not empty while models are prepared whose values come afterwards."""


@contextlib.contextmanager
def filled_later() -> Iterator[None]:
    """Prepare models that have no values yet: none are exchanged between the ranks."""
    _filled_later.append(True)
    try:
        yield
    finally:
        _filled_later.pop()


def have_values() -> bool:
    """Whether models that are prepared now have their values already."""
    return not _filled_later


@torch.no_grad()
def same_start(model: nn.Module) -> None:
    """Give every rank rank 0's weights and buffers, as DDP and DeepSpeed do.

    A collective: all ranks call it with the same model. FSDP takes each rank's own piece
    of what that rank has, so models built without a common seed would be mixed.
    """
    if not have_values():
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            torch.distributed.broadcast(tensor.detach(), src=0)
