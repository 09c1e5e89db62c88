"""Optimizers as the planner sees them: bytes of state, and what a step needs besides.

Figures are of torch 2.13's code (torch/optim), measured with tensors that are counted where
no other source is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

How = Literal["foreach", "fused", "loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Bytes per trainable parameter element, for fp32 parameters."""

    name: str
    state: float
    """Bytes of state per element: two fp32 moments are 8."""
    how: How
    """foreach: all tensors at once; fused: in place; loop: tensor by tensor."""
    elementwise: bool = True
    """State has the parameter's shape, so that it shards with it."""
    together: float = 1
    """Temporaries of a foreach step, in copies of all that it updates."""
    alone: float = 2
    """Temporaries of a loop, in copies of its largest tensor."""
    flat: float | None = None
    """Bytes of state per element of a flattened parameter, where it differs from `state`."""
    follows: bool = True
    """State has the parameter's type: half of `state` for parameters loaded in bf16."""
    cpu_version: bool = False
    """DeepSpeed has one for the CPU, which works in place; an offload takes it."""

    def state_bytes(self, elements: int, *, element: int = 4, flat: bool = False) -> int:
        """Bytes of state for parameters of `element` bytes each.

        Args:
            elements: of the parameters.
            element: 4 for fp32.
            flat: the engine has made one tensor of one dimension of them.
        """
        each = self.flat if flat and self.flat is not None else self.state
        return round(each * elements * (element / 4 if self.follows else 1))

    def scratch(self, elements: int, largest: int) -> int:
        """Elements of the temporaries of one step.

        Args:
            elements: of all tensors that are updated in one call.
            largest: of the largest of these tensors.
        """
        if self.how == "fused":
            return 0
        if self.how == "foreach":
            return round(self.together * elements)
        return round(self.alone * min(largest, elements))


_ADAM = Optimizer(name="adam", state=8, how="foreach", cpu_version=True)
"""exp_avg and exp_avg_sq; foreach keeps a list of square roots, the loop root and quotient."""
_SGD = Optimizer(name="sgd", state=0, how="foreach", together=0, alone=0)

_ROWS = (
    replace(_ADAM, name="adamw"),
    replace(_ADAM, name="adamw_fused", how="fused"),
    replace(_ADAM, name="adamw_loop", how="loop"),
    _ADAM,
    replace(_ADAM, name="adam_fused", how="fused"),
    replace(_ADAM, name="adam_loop", how="loop"),
    # Dettmers et al. 2022 (arXiv 2110.02861), bitsandbytes: two states of one byte and, for
    # each block of 256 elements, an fp32 scale each; a kernel that works in place.
    Optimizer(name="adamw_8bit", state=2 + 2 * 4 / 256, how="fused", follows=False),
    _SGD,
    replace(_SGD, name="sgd_momentum", state=4),
    # Chen et al. 2023 (arXiv 2302.06675): one momentum; the update is the one temporary.
    Optimizer(name="lion", state=4, how="loop", alone=1),
    # The sum of squares; foreach keeps root and quotient.
    Optimizer(name="adagrad", state=4, how="foreach", together=2, alone=1, cpu_version=True),
    # The mean of squares.
    Optimizer(name="rmsprop", state=4, how="foreach", alone=1),
    # Shazeer and Stern 2018 (arXiv 1804.04235): a row and a column for a matrix of n x m, that
    # is 4 (n + m) / (n m) bytes an element: 0.004 for 2048 x 2048, which stands for all. What
    # has one dimension has a full second moment.
    Optimizer(name="adafactor", state=0.004, how="loop", elementwise=False, flat=4, follows=False),
)

OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType({one.name: one for one in _ROWS})

_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "Adam": "adam",
        "AdamW": "adamw",
        "NAdam": "adam",
        "RAdam": "adam",
        "Adamax": "adam",
        "FusedAdam": "adamw_fused",
        "DeepSpeedCPUAdam": "adamw_fused",
        "Adam8bit": "adamw_8bit",
        "AdamW8bit": "adamw_8bit",
        "PagedAdam8bit": "adamw_8bit",
        "PagedAdamW8bit": "adamw_8bit",
        "SGD": "sgd",
        "Lion": "lion",
        "Adagrad": "adagrad",
        "RMSprop": "rmsprop",
        "Adafactor": "adafactor",
    }
)
"""Class names of torch, transformers, bitsandbytes and DeepSpeed."""
_NAMES: Mapping[str, str] = MappingProxyType(
    {name.lower(): row for name, row in _CLASSES.items()} | {name: name for name in OPTIMIZERS}
)
"""What may be written, in small letters -> name of its row."""


def lookup(name: object) -> Optimizer:
    """Return the optimizer of a name, or of a class or its name: "adamw", "torch.optim.AdamW".

    Raises:
        PlanError: no such optimizer is known.
    """
    given = name.__name__ if isinstance(name, type) else str(name)
    key = given.rpartition(".")[2].strip().lower()
    if key not in _NAMES:
        near = list(dict.fromkeys(_NAMES[one] for one in get_close_matches(key, _NAMES, n=3)))
        hint = f"did you mean {' or '.join(near)}? It knows" if near else "use"
        message = (
            f"{given!r} is not an optimizer the planner knows; {hint} {', '.join(OPTIMIZERS)}."
        )
        raise PlanError(message)
    return OPTIMIZERS[_NAMES[key]]


def for_kind(optimizer: Optimizer, kind: Literal["cuda", "cpu"]) -> Optimizer:
    """Return what a plain `AdamW(...)` becomes: torch's foreach default is for GPUs only."""
    return replace(optimizer, how="loop") if _loops(optimizer, kind) else optimizer


def _loops(optimizer: Optimizer, kind: Literal["cuda", "cpu"]) -> bool:
    return optimizer.how == "foreach" and kind == "cpu"


def of_torch(
    class_name: str, defaults: Mapping[str, Any], kind: Literal["cuda", "cpu"] = "cuda"
) -> Optimizer:
    """Return the optimizer that a real one is, by its class's name and its `defaults`.

    Raises:
        PlanError: a class that the planner does not know.
    """
    if class_name not in _CLASSES:
        message = (
            f"{class_name} is not an optimizer the planner knows; name the nearest one: "
            f"{', '.join(OPTIMIZERS)}."
        )
        raise PlanError(message)
    return _flagged(OPTIMIZERS[_CLASSES[class_name]], defaults, kind)


def _flagged(
    row: Optimizer, defaults: Mapping[str, Any], kind: Literal["cuda", "cpu"]
) -> Optimizer:
    """Return a row as an optimizer's own options have it."""
    # amsgrad keeps the largest second moment; RMSprop and SGD a momentum; Adafactor a first one.
    further = ("amsgrad", "momentum", "beta1")
    state = row.state + 4 * sum(bool(defaults.get(one)) for one in further)
    row = replace(row, state=state, flat=None if row.flat is None else row.flat + state - row.state)
    if row.name == "sgd" and defaults.get("weight_decay"):
        row = replace(row, together=1, alone=1)
    if defaults.get("fused"):
        return replace(row, how="fused")
    if defaults.get("foreach") is None:
        return for_kind(row, kind)
    return replace(row, how="foreach" if defaults["foreach"] else "loop")
