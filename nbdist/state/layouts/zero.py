"""ZeRO-1 and ZeRO-2: each parameter group is one flat tensor, of which each rank steps a part.

Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, and runtime/bf16_optimizer.py, which
takes the place of stage 1 where a user's config has bf16 and `grad_accum_dtype` fp32. The
master of a rank's part is a flat fp32 tensor; `_hp_mapping` of a parameter says where in it
the parameter's part lies (utils/tensor_fragment.py), and is None where the rank has none.
Frozen parameters are whole on every rank, in the type that DeepSpeed computes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nbdist.state.layouts.layout import Layout, Place, is_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

_ATTRIBUTES: Mapping[str, tuple[str, str]] = {
    "DeepSpeedZeroOptimizer": ("bit16_groups", "single_partition_of_fp32_groups"),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
}
"""Class of the engine's optimizer -> its parameters by group, its masters by group."""


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

    def _groups(self) -> Iterator[tuple[Sequence[nn.Parameter], torch.Tensor]]:
        """Parameters that share a flat master, and this rank's part of it."""
        parameters, masters = _ATTRIBUTES[type(self.zero).__name__]
        yield from zip(getattr(self.zero, parameters), getattr(self.zero, masters), strict=True)

    def places(self) -> Iterator[Place]:
        """Each trainable parameter's part of the master; all others in the module."""
        masters = {id(one): master for group, master in self._groups() for one in group}
        for name, parameter in self.named_parameters():
            if id(parameter) in masters:
                yield _in_master(name, parameter, masters[id(parameter)])
            else:
                yield self.replica(name, parameter)

    def refresh(self) -> None:
        """Renew weights from the masters on all ranks, and the parameters' links to state.

        deepspeed 0.19.8, stage_1_and_2.py, `_lazy_init_hp_params_optimizer_state`: links once,
        right after group 0 was stepped, so that of later groups is missing.
        """
        self.zero._hp_optimizer_states_linked = False  # noqa: SLF001
        if all(self.zero.optimizer.state.get(master) for _, master in self._groups()):
            self.zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001
        self.zero.update_lp_params()

    def internals(self) -> Iterator[tuple[object, str]]:
        """Return what is used of the engine's optimizer and of its parameters."""
        yield self.zero, "optimizer update_lp_params _lazy_init_hp_params_optimizer_state"
        yield self.zero, " ".join(_ATTRIBUTES[type(self.zero).__name__])
        for group, _ in self._groups():
            for parameter in group:
                yield parameter, "_hp_mapping"
                if (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]  # noqa: SLF001
                    yield mapping, "lp_fragment_address hp_fragment_address"
                    yield mapping.lp_fragment_address, "start numel"
                    yield mapping.hp_fragment_address, "start numel"


def _in_master(name: str, parameter: Any, master: torch.Tensor) -> Place:
    """Find a parameter's part in this rank's part of the master."""
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping  # noqa: SLF001
    if mapping is None:
        return Place(name=name, shape=shape, weight=master.detach()[:0], stepped=master)
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Place(
        name=name,
        shape=shape,
        weight=master.detach().narrow(0, there.start, there.numel),
        start=here.start,
        stepped=master,
        offset=there.start,
    )
