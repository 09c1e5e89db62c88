"""Layouts: where each engine stores the state of a prepared model, one module per engine.

    layout = layouts.layout_for(model, optimizers)
    layout.weights(owned=True)            this rank's shards of the weights
    layout.optimizer_state(owned=True)    this rank's shards of element-wise optimizer state
    layout.scalar_state()                 scalar optimizer state
    layout.allocate_optimizer_state(...)  before writing to the shards with owned=False
    layout.finalize_state(...)            after writing to them

The layouts use attributes of torch 2.13 and deepspeed 0.19; ``check_layout`` raises in advance if
one is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nbdist.errors import SwitchError
from nbdist.state.layouts.base import DdpLayout, Layout, is_deepspeed_engine, unwrap_compiled
from nbdist.state.layouts.deepspeed import Zero3Layout, Zero12Layout
from nbdist.state.layouts.free_memory import free_model
from nbdist.state.layouts.fsdp1 import Fsdp1Layout
from nbdist.state.layouts.fsdp2 import Fsdp2Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Layout", "check_layout", "free_model", "kind_of", "layout_for"]

_KINDS: Final[tuple[type[Layout], ...]] = (
    Zero3Layout,
    Zero12Layout,
    Fsdp1Layout,
    Fsdp2Layout,
    DdpLayout,
)
"""Layouts in the order in which they are tried; the last one accepts any model."""


def kind_of(model: nn.Module) -> type[Layout]:
    """Return the class of a model's layout, from the types of its modules."""
    prepared = unwrap_compiled(model)
    return next(kind for kind in _KINDS if kind.is_layout_of(prepared))


def layout_for(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Layout:
    """Return the layout of a prepared model; cheap, copies nothing.

    Args:
        model: model as returned by `prepare()`, compiled or not; a bare model is handled as DDP.
        optimizers: the model's optimizers, as returned by `prepare()` or the torch optimizers
            inside; ignored for DeepSpeed, whose engine has the optimizer.

    Raises:
        SwitchError: nbdist does not support the engine's optimizer.
    """
    prepared = unwrap_compiled(model)
    kind = kind_of(prepared)
    if kind is DdpLayout and is_deepspeed_engine(prepared):
        optimizer_class = type(getattr(prepared, "optimizer", None)).__name__
        message = (
            f"nbdist cannot reshard the state of this model: DeepSpeed replaced the optimizer with"
            f" its {optimizer_class}. Use backend zero1, zero2 or zero3 without a config that"
            " replaces the optimizer."
        )
        raise SwitchError(message)
    return kind(prepared, optimizers)


def check_layout(model: nn.Module) -> None:
    """Check that an engine has the attributes that its layout uses; changes nothing.

    Called before the state is needed, because private attributes of libraries change between
    releases.

    Raises:
        SwitchError: an attribute is missing, or the sharding is not supported.
    """
    layout = layout_for(model)
    for owner, names in layout.required_attributes():
        for name in names.split():
            if not hasattr(owner, name):
                layout.refuse_version(type(owner).__name__, name)
