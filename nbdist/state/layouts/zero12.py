"""Layout of ZeRO-1 and ZeRO-2: each parameter group is a flat tensor; each rank steps a part.

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, and runtime/bf16_optimizer.py, which
replaces stage 1 if the user's config has bf16 and `grad_accum_dtype` fp32. The parameters of a
group are concatenated, in another order with `round_robin_gradients`, and each rank has the fp32
master weights of an equal part in a flat tensor. DeepSpeed's own map from parameters to parts,
`_hp_mapping`, ignores that order. Frozen parameters are whole on every rank, in DeepSpeed's
compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nbdist.state import collectives
from nbdist.state.layouts.base import (
    Layout,
    ParameterPlacement,
    check_group_size,
    is_deepspeed_engine,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

_WITH_ORDER = "DeepSpeedZeroOptimizer"
_ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    _WITH_ORDER: ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
}
"""Class of the engine's optimizer -> attributes with parameters and master weights per group."""


class DeepSpeedLayout(Layout):
    """Base of the layouts of all ZeRO stages: the engine's optimizer and torch's inside it."""

    library: ClassVar[str] = "deepspeed"

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:  # noqa: ARG002 - see below
        # The engine's optimizer, not the user's: deepspeed 0.19 replaces Adagrad.
        self.zero_optimizer: Any = model.optimizer
        inner = getattr(self.zero_optimizer, "optimizer", None)
        super().__init__(model, () if inner is None else (inner,))

    def _state_dtype(self, stepped: torch.Tensor, named: torch.dtype) -> torch.dtype:
        """Return the state dtype; DeepSpeed's CPU optimizers may use fp32 for bf16 masters."""
        if named.is_floating_point and getattr(self.optimizers[0], "fp32_optimizer_states", False):
            return torch.float32
        return super()._state_dtype(stepped, named)


class Zero12Layout(DeepSpeedLayout):
    """Layout of ZeRO-1 and 2: the optimizer steps this rank's part of a group's flat master."""

    @classmethod
    def is_layout_of(cls, model: nn.Module) -> bool:
        """Return whether a model is a DeepSpeed engine of stage 1 or 2."""
        return is_deepspeed_engine(model) and type(model.optimizer).__name__ in _ATTRIBUTES

    def _groups(self) -> Iterator[_FlatParamGroup]:
        """Yield the parameter groups with this rank's part of each."""
        names = _ATTRIBUTES[type(self.zero_optimizer).__name__]
        ordered, masters = (getattr(self.zero_optimizer, name) for name in names)
        processes = self.zero_optimizer.real_dp_process_group
        offsets = getattr(self.zero_optimizer, "round_robin_bit16_offsets", None)
        for index, (parameters, master) in enumerate(zip(ordered, masters, strict=True)):
            check_group_size(collectives.group_size(processes[index]), "DeepSpeed")
            sizes = [parameter.numel() for parameter in parameters]
            starts = [0, *accumulate(sizes)][:-1] if offsets is None else offsets[index]
            first = collectives.rank(processes[index]) * master.numel()
            yield _FlatParamGroup(
                dict(zip(map(id, parameters), starts, strict=True)), master, first
            )

    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield placements: trainable parameters in the master weights, others in the module."""
        groups = {parameter_id: group for group in self._groups() for parameter_id in group.starts}
        for name, parameter in self.named_parameters():
            if id(parameter) in groups:
                yield groups[id(parameter)].place(name, parameter)
            else:
                yield self.whole_placement(name, parameter)

    def refresh(self) -> None:
        """Update weights from the master weights, and the parameters' references to state."""
        # deepspeed 0.19.8, stage_1_and_2.py: _lazy_init_hp_params_optimizer_state runs once, right
        # after the step of group 0, when the state of later groups does not exist.
        ordered = getattr(self.zero_optimizer, _ATTRIBUTES[type(self.zero_optimizer).__name__][0])
        if not all(hasattr(parameter, "_hp_mapping") for group in ordered for parameter in group):
            # For its own Adagrad, created with one group, deepspeed links only that group. Grad
            # mode: a view of the master made under no_grad cannot be accessed after a step.
            with torch.enable_grad():
                self.zero_optimizer._link_all_hp_params()  # noqa: SLF001
        self.zero_optimizer._hp_optimizer_states_linked = False  # noqa: SLF001
        if all(self.zero_optimizer.optimizer.state.get(group.master) for group in self._groups()):
            self.zero_optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001
        self.zero_optimizer.update_lp_params()

    def required_attributes(self) -> Iterator[tuple[object, str]]:
        """Yield the required attributes of the engine's optimizer."""
        yield self.zero_optimizer, "optimizer update_lp_params _lazy_init_hp_params_optimizer_state"
        yield self.zero_optimizer, " ".join(_ATTRIBUTES[type(self.zero_optimizer).__name__])
        yield self.zero_optimizer, "real_dp_process_group"
        if type(self.zero_optimizer).__name__ == _WITH_ORDER:
            yield self.zero_optimizer, "round_robin_bit16_offsets"


@dataclass(frozen=True, slots=True)
class _FlatParamGroup:
    """Concatenated parameters of a group, and one rank's part of them."""

    starts: dict[int, int]
    """id() of a parameter -> index of its first element in the group."""
    master: torch.Tensor
    first: int
    """Index of the master's first element in the group."""

    def place(self, name: str, parameter: torch.Tensor) -> ParameterPlacement:
        """Return the placement of a parameter in this rank's master weights."""
        begin = self.starts[id(parameter)]
        low = max(begin, self.first)
        high = min(begin + parameter.numel(), self.first + self.master.numel())
        if low >= high:
            low = high = self.first
        return ParameterPlacement(
            name=name,
            shape=tuple(parameter.shape),
            weight=self.master.detach().narrow(0, low - self.first, high - low),
            start=low - begin if low < high else 0,
            optimizer_tensor=self.master,
            optimizer_offset=low - self.first,
        )
