"""Optimizers: bytes of state, and temporaries of a step.

Unless another source is given, figures are those of torch 2.13 (torch/optim), measured by counting
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import PlanError
from nbdist.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from nbdist.planner.model_spec import ModelSpec, WeightShape

_FLATTENING = tuple(name for name, row in STRATEGIES.items() if row.steps_flat_parameters)

OptimizerImplementation = Literal["foreach", "fused", "loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Memory of an optimizer per trainable parameter element, for fp32 parameters."""

    name: str
    state_bytes_per_element: float
    """Bytes of state per element: 8 for two fp32 moments."""
    implementation: OptimizerImplementation
    """foreach: all tensors at once; fused: in place; loop: one tensor after another."""
    foreach_copies: float = 1
    """Temporaries of a foreach step, in copies of all updated tensors."""
    loop_copies: float = 2
    """Temporaries of a loop, in copies of its largest tensor."""
    flat_state_bytes_per_element: float | None = None
    """Bytes of state per element of a flattened parameter, if it differs."""
    follows_param_dtype: bool = True
    """True if the state has the parameter's data type: half the size for bf16 parameters."""
    has_cpu_version: bool = False
    """True if DeepSpeed has an in-place CPU version, which it uses for offload."""
    is_factored: bool = False
    """True if a matrix has a row and a column of fp32 state instead."""
    min_quantized_size: int = 0
    """Smaller tensors keep two fp32 moments."""
    cannot_step: tuple[str, ...] = ()
    """Strategies whose sharded parameters it cannot step. torch 2.13: Muon needs matrices, but ZeRO
    and FSDP1 step parts of flattened parameters; Adafactor's row and column norms fail on DTensors,
    and so do the kernels of bitsandbytes 0.50 ("got mixed torch.Tensor and DTensor"). schedulefree
    1.4 evaluates with other weights, and under DeepSpeed only the master weights change to them."""

    def state_bytes(
        self,
        elements: int,
        *,
        element: int = 4,
        flat: bool = False,
        shapes: Iterable[tuple[int, WeightShape]] = (),
    ) -> int:
        """Return the bytes of state for parameters of `element` bytes each.

        Args:
            elements: number of parameter elements.
            element: bytes per element, 4 for fp32.
            flat: True if the engine has flattened them into one one-dimensional tensor.
            shapes: number and shape of the parameters, if known and not flattened.
        """
        depends_on_shape = self.is_factored or self.min_quantized_size
        if depends_on_shape and (known := list(shapes)):
            return round(sum(count * self._tensor_bytes(shape) for count, shape in known))
        each = (
            self.flat_state_bytes_per_element
            if flat and self.flat_state_bytes_per_element is not None
            else self.state_bytes_per_element
        )
        return round(each * elements * (element / 4 if self.follows_param_dtype else 1))

    def _tensor_bytes(self, shape: WeightShape) -> float:
        columns = shape.num_elements // shape.rows
        if self.is_factored:
            # A vector has rows of one element, and a full second moment.
            return 4 * (shape.rows + (columns if columns > 1 else 0))
        small = shape.num_elements < self.min_quantized_size
        return shape.num_elements * (8 if small else self.state_bytes_per_element)

    def num_temporaries(
        self, elements: int, largest: int, shapes: Iterable[tuple[int, WeightShape]] = ()
    ) -> int:
        """Return the elements of the temporaries of one step.

        Args:
            elements: elements of all tensors updated in one call.
            largest: elements of the largest of them.
            shapes: number and shape of each, in order, if known.
        """
        if self.implementation == "fused":
            return 0
        if self.implementation == "foreach":
            return round(self.foreach_copies * elements)
        if not self.loop_copies:
            return 0
        sizes = [shape.num_elements for _, shape in shapes] or [min(largest, elements)]
        # A variable of the loop still holds the last temporary of the previous tensor.
        return round(max(self.loop_copies * size + held for held, size in pairwise([0, *sizes])))


_ADAM = OptimizerSpec(
    name="adam", state_bytes_per_element=8, implementation="foreach", has_cpu_version=True
)
"""exp_avg and exp_avg_sq; foreach keeps a list of square roots, the loop root and quotient."""
_SGD = OptimizerSpec(
    name="sgd", state_bytes_per_element=0, implementation="foreach", foreach_copies=0, loop_copies=0
)
_SCHEDULE_FREE = OptimizerSpec(
    name="sgd_schedulefree",
    state_bytes_per_element=4,
    implementation="foreach",
    cannot_step=("zero1", "zero2", "zero3"),
)
"""Defazio et al. 2024 (arXiv 2405.15682): a second copy of the weights. AdamW adds exp_avg_sq."""

_ROWS = (
    replace(_ADAM, name="adamw"),
    replace(_ADAM, name="adamw_fused", implementation="fused"),
    replace(_ADAM, name="adamw_loop", implementation="loop"),
    _ADAM,
    replace(_ADAM, name="adam_fused", implementation="fused"),
    replace(_ADAM, name="adam_loop", implementation="loop"),
    # Dettmers et al. 2022 (arXiv 2110.02861), bitsandbytes: two states of one byte and, for
    # each block of 256 elements, one fp32 scale each; an in-place kernel.
    OptimizerSpec(
        name="adamw_8bit",
        state_bytes_per_element=2 + 2 * 4 / 256,
        implementation="fused",
        follows_param_dtype=False,
        min_quantized_size=4096,  # bitsandbytes 0.50, optim/optimizer.py
        cannot_step=("fsdp2",),
    ),
    replace(_SCHEDULE_FREE, name="adamw_schedulefree", state_bytes_per_element=8),
    _SGD,
    replace(_SGD, name="sgd_momentum", state_bytes_per_element=4),
    _SCHEDULE_FREE,
    # Chen et al. 2023 (arXiv 2302.06675): one momentum; the update is the only temporary.
    OptimizerSpec(name="lion", state_bytes_per_element=4, implementation="loop", loop_copies=1),
    # The sum of squares; foreach keeps root and quotient.
    OptimizerSpec(
        name="adagrad",
        state_bytes_per_element=4,
        implementation="foreach",
        foreach_copies=2,
        loop_copies=1,
        has_cpu_version=True,
    ),
    # The mean of squares.
    OptimizerSpec(
        name="rmsprop", state_bytes_per_element=4, implementation="foreach", loop_copies=1
    ),
    # Shazeer and Stern 2018 (arXiv 1804.04235): a row and a column for an n x m matrix, that is
    # 4 (n + m) / (n m) bytes per element: 0.004 for 2048 x 2048, used where shapes are unknown.
    # One-dimensional parameters have a full second moment. The update is the only temporary.
    OptimizerSpec(
        name="adafactor",
        state_bytes_per_element=0.004,
        implementation="loop",
        loop_copies=1,
        flat_state_bytes_per_element=4,
        follows_param_dtype=False,
        is_factored=True,
        cannot_step=("fsdp2",),
    ),
    # One momentum. Its step makes the update in fp32, and in bf16 two of its orthogonalized form
    # and two products of its smaller dimension: 3 copies for a square matrix.
    OptimizerSpec(
        name="muon",
        state_bytes_per_element=4,
        implementation="loop",
        loop_copies=3,
        cannot_step=_FLATTENING,
    ),
)

OPTIMIZERS: Mapping[str, OptimizerSpec] = {row.name: row for row in _ROWS}

_CLASSES: Mapping[str, str] = {
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
    "Optimizer8bit": "adamw_8bit",  # base class
    "AdamWScheduleFree": "adamw_schedulefree",
    "RAdamScheduleFree": "adamw_schedulefree",
    "SGD": "sgd",
    "SGDScheduleFree": "sgd_schedulefree",
    "Lion": "lion",
    "Adagrad": "adagrad",
    "RMSprop": "rmsprop",
    "Adafactor": "adafactor",
    "Muon": "muon",
}
"""Class names of torch, transformers, bitsandbytes, schedulefree and DeepSpeed."""
_NAMES: Mapping[str, str] = {
    **{name.lower(): row for name, row in _CLASSES.items()},
    **{name: name for name in OPTIMIZERS},
}
"""Accepted names in lower case -> name of the row."""


def find_optimizer(name: object) -> OptimizerSpec:
    """Return the optimizer of a name or class: "adamw", "torch.optim.AdamW".

    Raises:
        PlanError: an unknown optimizer.
    """
    if isinstance(name, OptimizerSpec):
        return name
    requested = name.__name__ if isinstance(name, type) else str(name)
    key = requested.rpartition(".")[2].strip().lower()
    if key not in _NAMES:
        close_names = list(
            dict.fromkeys(_NAMES[match] for match in get_close_matches(key, _NAMES, n=3))
        )
        hint = f"Did you mean {' or '.join(close_names)}? " if close_names else ""
        raise PlanError(
            f"Unknown optimizer {requested!r}. {hint}Use one of {', '.join(OPTIMIZERS)}."
        )
    return OPTIMIZERS[_NAMES[key]]


def refusal(refused: Collection[str], name: str, backend: str) -> str:
    """Return why an optimizer cannot train with a backend, and what can; empty if it can.

    Args:
        refused: the strategies that it cannot train with.
        name: its name in the message.
    """
    if backend not in refused:
        return ""
    others = [other for other in STRATEGIES if other not in refused]
    return (
        f"{name} cannot step parameters that {backend} shards. Use {', '.join(others)} or another"
        " optimizer."
    )


def refusal_of_class(cls: type, backend: str) -> str:
    """Return why optimizers of a class cannot train with a backend; empty if they can."""
    bases = {base.__name__ for base in cls.__mro__}
    refused = {
        name for base in bases & _CLASSES.keys() for name in OPTIMIZERS[_CLASSES[base]].cannot_step
    }
    if bases & {"LAMB", "Lamb", "FusedLAMB"}:  # it takes the norm of each parameter
        refused = set(_FLATTENING)
    if "LBFGS" in bases:
        # It keeps the parameters that FSDP2 replaces, and takes the dot products of its shards.
        refused = STRATEGIES.keys() - {"ddp"}
    return refusal(refused, cls.__name__, backend)


def trained_shapes(model: ModelSpec, shards: int = 1) -> list[tuple[int, WeightShape]]:
    """Return number and shape of a model's trainable parameters, cut by rows."""
    return [
        (group.count, shape.shard(shards))
        for group in model.groups
        for shape in group.tensors
        if shape.trainable
    ]


def optimizer_for_device(optimizer: OptimizerSpec, kind: Literal["cuda", "cpu"]) -> OptimizerSpec:
    """Return the variant that a device kind uses by default."""
    # torch's foreach default is for GPUs only.
    loops = optimizer.implementation == "foreach" and kind == "cpu"
    return replace(optimizer, implementation="loop") if loops else optimizer


def optimizer_from_torch(
    described: Mapping[str, Any], kind: Literal["cuda", "cpu"] = "cuda"
) -> OptimizerSpec:
    """Return the planner's optimizer for a torch optimizer.

    Args:
        described: its `defaults`, and its class name as "class"; AdamW if there is none. Unknown
            classes need "state_bytes_per_element", and "is_elementwise" if it is known.
        kind: kind of its device.

    Raises:
        PlanError: an unknown class, without bytes of state.
    """
    class_name = described.get("class", "AdamW")
    if class_name not in _CLASSES and described.get("state_bytes_per_element") is not None:
        return OptimizerSpec(
            name=class_name,
            state_bytes_per_element=described["state_bytes_per_element"],
            implementation="loop",
            cannot_step=_FLATTENING if described.get("is_elementwise") is False else (),
        )
    if class_name not in _CLASSES:
        raise PlanError(
            f"Unknown optimizer class {class_name}. Use the nearest of these:"
            f" {', '.join(OPTIMIZERS)}."
        )
    row = OPTIMIZERS[_CLASSES[class_name]]
    # amsgrad keeps the largest second moment, RMSprop and SGD a momentum, Adafactor a first moment.
    further = () if row is _SCHEDULE_FREE else ("amsgrad", "momentum", "beta1")
    state = row.state_bytes_per_element + 4 * sum(bool(described.get(option)) for option in further)
    row = replace(
        row,
        state_bytes_per_element=state,
        flat_state_bytes_per_element=None
        if row.flat_state_bytes_per_element is None
        else row.flat_state_bytes_per_element + state - row.state_bytes_per_element,
    )
    if row.name == "sgd" and described.get("weight_decay"):
        row = replace(row, foreach_copies=1, loop_copies=1)
    if described.get("fused"):
        return replace(row, implementation="fused")
    if described.get("foreach") is None:
        return optimizer_for_device(row, kind)
    return replace(row, implementation="foreach" if described["foreach"] else "loop")
