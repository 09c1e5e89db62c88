"""Where each engine keeps the state of a prepared model: one module for each engine.

    layout = layouts.of(model, optimizers)
    layout.weights(owned=True), layout.states(owned=True), layout.counts()     what there is
    layout.allocate(names); fill layout.weights(owned=False) and .states(owned=False);
    layout.settle(counts)                                                      what is taken over

Knows attributes of torch 2.13 and deepspeed 0.19; `check` says in time when they are missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nbdist.errors import SwitchError
from nbdist.state.layouts.base import Layout, inside_compiled, is_engine
from nbdist.state.layouts.ddp import Ddp
from nbdist.state.layouts.free import free
from nbdist.state.layouts.fsdp1 import Fsdp1
from nbdist.state.layouts.fsdp2 import Fsdp2
from nbdist.state.layouts.zero3 import Zero3
from nbdist.state.layouts.zero12 import Zero

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Layout", "check", "free", "of"]

_KINDS: Final[tuple[type[Layout], ...]] = (Zero3, Zero, Fsdp1, Fsdp2, Ddp)
"""In the order of asking; the last takes any model."""


def of(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Layout:
    """Return the layout of a prepared model; cheap, copies nothing.

    Args:
        model: as `prepare()` returned it, compiled or not; a bare one counts as under DDP.
        optimizers: those of its parameters, as `prepare()` returned them or torch's own inside;
            under DeepSpeed the engine's own one counts.

    Raises:
        SwitchError: an engine whose state nbdist cannot describe.
    """
    prepared = inside_compiled(model)
    kind = next(kind for kind in _KINDS if kind.holds(prepared))
    if kind is Ddp and is_engine(prepared):
        made = type(getattr(prepared, "optimizer", None)).__name__
        message = (
            f"DeepSpeed trains this model with its {made}, whose state nbdist cannot move; use one"
            " of the session's backends zero1, zero2 and zero3 without a config that replaces it."
        )
        raise SwitchError(message)
    return kind(prepared, optimizers)


def check(model: nn.Module) -> None:
    """Find out whether an engine keeps its state where nbdist will look for it.

    Touches nothing. To be called before the state is needed: libraries move such things
    between releases.

    Raises:
        SwitchError: an attribute is missing, or the model is cut in a way that nbdist cannot
            describe.
    """
    of(model).check()
