"""ZeRO-1 and ZeRO-2: each parameter group is one flat tensor, of which each rank steps a part.

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, and runtime/bf16_optimizer.py, which
takes the place of stage 1 where a user's config has bf16 and `grad_accum_dtype` fp32. A
group's parameters follow each other, in another order under `round_robin_gradients`, and each
rank has the master of an equal part of that in a flat fp32 tensor. `_hp_mapping`, by which a
parameter should find its part, forgets that order. Frozen parameters are whole on every rank,
in the type that DeepSpeed computes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nbdist.state import collectives
from nbdist.state.layouts.base import Layout, Place, check_world, is_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

_WITH_ORDER = "DeepSpeedZeroOptimizer"
_ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    _WITH_ORDER: ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
}
"""Class of the engine's optimizer -> its parameters in order by group, its masters by group."""


class OfDeepSpeed(Layout):
    """What all stages have in common: the engine's own optimizer, and torch's inside it."""

    library: ClassVar[str] = "deepspeed"

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:  # noqa: ARG002 - the engine's own one counts
        """Look at an engine; for Adagrad deepspeed 0.19 makes another optimizer than the given."""
        self.zero: Any = model.optimizer
        inner = getattr(self.zero, "optimizer", None)
        super().__init__(model, () if inner is None else (inner,))

    def _state_dtype(self, stepped: torch.Tensor, named: torch.dtype) -> torch.dtype:
        """As everywhere; DeepSpeed's CPU optimizers may keep fp32 state for bf16 masters."""
        if named.is_floating_point and getattr(self.optimizers[0], "fp32_optimizer_states", False):
            return torch.float32
        return super()._state_dtype(stepped, named)


class Zero(OfDeepSpeed):
    """What an optimizer steps is this rank's part of a group's flat master."""

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        """Whether a model is an engine of stage 1 or 2."""
        return is_engine(model) and type(model.optimizer).__name__ in _ATTRIBUTES

    def _groups(self) -> Iterator[_Group]:
        """Parameter groups with this rank's part of each."""
        names = _ATTRIBUTES[type(self.zero).__name__]
        ordered, masters = (getattr(self.zero, name) for name in names)
        processes = self.zero.real_dp_process_group
        offsets = getattr(self.zero, "round_robin_bit16_offsets", None)
        for index, (parameters, master) in enumerate(zip(ordered, masters, strict=True)):
            check_world(collectives.size(processes[index]), "DeepSpeed")
            sizes = [one.numel() for one in parameters]
            starts = [0, *accumulate(sizes)][:-1] if offsets is None else offsets[index]
            first = collectives.rank(processes[index]) * master.numel()
            yield _Group(dict(zip(map(id, parameters), starts, strict=True)), master, first)

    def places(self) -> Iterator[Place]:
        """Each trainable parameter's part of the master; all others in the module."""
        groups = {one: group for group in self._groups() for one in group.starts}
        for name, parameter in self.named_parameters():
            if id(parameter) in groups:
                yield groups[id(parameter)].place(name, parameter)
            else:
                yield self.replica(name, parameter)

    def refresh(self) -> None:
        """Renew weights from the masters on all ranks, and the parameters' links to state.

        deepspeed 0.19.8, stage_1_and_2.py, `_lazy_init_hp_params_optimizer_state`: links once,
        right after group 0 was stepped, so that of later groups is missing.
        """
        ordered = getattr(self.zero, _ATTRIBUTES[type(self.zero).__name__][0])
        if not all(hasattr(one, "_hp_mapping") for group in ordered for one in group):
            # Of its own Adagrad, made with one group, deepspeed links that group alone. A view
            # of the master that was made without gradients cannot be looked at after a step.
            with torch.enable_grad():
                self.zero._link_all_hp_params()  # noqa: SLF001
        self.zero._hp_optimizer_states_linked = False  # noqa: SLF001
        if all(self.zero.optimizer.state.get(group.master) for group in self._groups()):
            self.zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001
        self.zero.update_lp_params()

    def internals(self) -> Iterator[tuple[object, str]]:
        """Return what is used of the engine's optimizer and of its parameters."""
        yield self.zero, "optimizer update_lp_params _lazy_init_hp_params_optimizer_state"
        yield self.zero, " ".join(_ATTRIBUTES[type(self.zero).__name__])
        yield self.zero, "real_dp_process_group"
        if type(self.zero).__name__ == _WITH_ORDER:
            yield self.zero, "round_robin_bit16_offsets"


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that follow each other, and one rank's part of all of them."""

    starts: dict[int, int]
    """Identity of a parameter -> where its elements begin in the group."""
    master: torch.Tensor
    first: int
    """Where the master's elements begin in the group."""

    def place(self, name: str, parameter: torch.Tensor) -> Place:
        """Find a parameter's part in this rank's master."""
        begin = self.starts[id(parameter)]
        low = max(begin, self.first)
        high = min(begin + parameter.numel(), self.first + self.master.numel())
        if low >= high:
            low = high = self.first
        return Place(
            name=name,
            shape=tuple(parameter.shape),
            weight=self.master.detach().narrow(0, low - self.first, high - low),
            start=low - begin if low < high else 0,
            stepped=self.master,
            offset=low - self.first,
        )
