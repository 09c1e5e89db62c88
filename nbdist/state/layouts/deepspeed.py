"""Layouts of DeepSpeed: ZeRO-1 and ZeRO-2, which partition optimizer state, and ZeRO-3.

ZeRO-1 and 2: each parameter group is a flat tensor, and each rank steps a part of it. Source:
deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, and runtime/bf16_optimizer.py, which
replaces stage 1 if the user's config has bf16 and `grad_accum_dtype` fp32. The parameters of a
group are concatenated, in another order with `round_robin_gradients`, and each rank has the fp32
master weights of an equal part in a flat tensor. DeepSpeed's own map from parameters to parts,
`_hp_mapping`, ignores that order. Frozen parameters are whole on every rank, in DeepSpeed's
compute dtype.

ZeRO-3: each parameter is partitioned evenly, and a rank's parts are concatenated. Source:
runtime/zero/stage3.py and partition_parameters.py: rank r has the elements from
r * ceil(numel / world size) on, the last rank's part is padded. `ds_tensor` of a parameter is this
rank's part in DeepSpeed's compute dtype; the fp32 master weights of a sub-group's parts
(`fp16_groups`) are concatenated in `fp32_partitioned_groups_flat`. Small parameters stay gathered
after a step (`persistent_parameters`). If a sub-group is offloaded to NVMe, its master weights and
state are empty between steps: each is read into a buffer for the step, whatever the tensors refer
to at that time, and written back afterwards.
"""

from __future__ import annotations

import contextlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nbdist.errors import SwitchError
from nbdist.state import collectives
from nbdist.state.layouts.base import (
    Layout,
    ParameterPlacement,
    check_group_size,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from nbdist.state.shards import Shard

ZERO12_ATTRIBUTES: Mapping[str, tuple[str, str, str]] = {
    "DeepSpeedZeroOptimizer": (
        "round_robin_bit16_groups",
        "single_partition_of_fp32_groups",
        "parallel_partitioned_bit16_groups",
    ),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition", "bf16_partitioned_groups"),
}
"""Class of the engine's optimizer -> its attributes with, for each group, the parameters, this
rank's master weights, and the parts of the flat parameters that the ranks step."""

_VERSIONS = "_nbdist_versions"
"""Attribute of the engine's optimizer: sum of the version counters of its parameters."""

ZERO3_WITH_OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
ZERO3_WITHOUT_OPTIMIZER = "DeepSpeedZeRoOffload"
"""Class of the engine's optimizer if the model was prepared without an optimizer."""


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


@torch.no_grad()
def update_masters(zero_optimizer: Any) -> None:
    """Copy weights that the user's code has written to the master weights; not a collective.

    DeepSpeed would overwrite them from the master weights in the next step. Changes through `.data`
    are not seen: torch does not count them in a parameter's version.

    Args:
        zero_optimizer: optimizer of a ZeRO-1 or ZeRO-2 engine; others are left as they are.
    """
    names = ZERO12_ATTRIBUTES.get(type(zero_optimizer).__name__)
    if names is None:
        return
    groups, masters, parts = (getattr(zero_optimizer, name) for name in names)
    versions = sum(parameter._version for group in groups for parameter in group)  # noqa: SLF001
    if versions == vars(zero_optimizer).get(_VERSIONS):
        return
    vars(zero_optimizer)[_VERSIONS] = versions
    processes = zero_optimizer.real_dp_process_group
    for index, master in enumerate(masters):
        written = parts[index][collectives.rank(processes[index])].to(master.device)
        # A master weight is more precise than the parameter that was computed from it.
        is_same = written == master.to(written.dtype)
        master.copy_(torch.where(is_same, master, written))


class Zero12Layout(DeepSpeedLayout):
    """Layout of ZeRO-1 and 2: the optimizer steps this rank's part of a group's flat master."""

    used_by_refresh = ("update_lp_params", "_lazy_init_hp_params_optimizer_state")

    def weights(self, *, owned: bool) -> dict[str, Shard]:
        """Return the shards of the master weights; those to be read have what code has written."""
        if owned:
            update_masters(self.zero_optimizer)
        return super().weights(owned=owned)

    def _groups(self) -> Iterator[tuple[dict[int, int], torch.Tensor, int]]:
        """Yield the parameter groups.

        Each has the index of the first element of each parameter by its id(), this rank's part of
        the flat master, and the index of the first element of that part.
        """
        names = ZERO12_ATTRIBUTES[type(self.zero_optimizer).__name__]
        ordered, masters, _ = (getattr(self.zero_optimizer, name) for name in names)
        processes = self.zero_optimizer.real_dp_process_group
        has_order = type(self.zero_optimizer).__name__ == "DeepSpeedZeroOptimizer"
        offsets = self.zero_optimizer.round_robin_bit16_offsets if has_order else None
        for index, (parameters, master) in enumerate(zip(ordered, masters, strict=True)):
            check_group_size(collectives.group_size(processes[index]), "DeepSpeed")
            sizes = [parameter.numel() for parameter in parameters]
            starts = [0, *accumulate(sizes)][:-1] if offsets is None else offsets[index]
            first = collectives.rank(processes[index]) * master.numel()
            yield dict(zip(map(id, parameters), starts, strict=True)), master, first

    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield placements: trainable parameters in the master weights, others in the module."""
        groups = {parameter_id: group for group in self._groups() for parameter_id in group[0]}
        for name, parameter in self.named_parameters():
            if id(parameter) not in groups:
                yield self.whole_placement(name, parameter)
                continue
            starts, master, first = groups[id(parameter)]
            begin = starts[id(parameter)]
            low = max(begin, first)
            high = min(begin + parameter.numel(), first + master.numel())
            if low >= high:
                low = high = first
            yield ParameterPlacement(
                name=name,
                shape=tuple(parameter.shape),
                weight=master.detach().narrow(0, low - first, high - low),
                start=low - begin if low < high else 0,
                optimizer_tensor=master,
                optimizer_offset=low - first,
            )

    def refresh(self) -> None:
        """Update weights from the master weights, and the parameters' references to state."""
        # deepspeed 0.19.8, stage_1_and_2.py: _lazy_init_hp_params_optimizer_state runs once, right
        # after the step of group 0, when the state of later groups does not exist.
        ordered = getattr(
            self.zero_optimizer, ZERO12_ATTRIBUTES[type(self.zero_optimizer).__name__][0]
        )
        if not all(hasattr(parameter, "_hp_mapping") for group in ordered for parameter in group):
            # For its own Adagrad, created with one group, deepspeed links only that group. Grad
            # mode: a view of the master made under no_grad cannot be accessed after a step.
            with torch.enable_grad():
                self.zero_optimizer._link_all_hp_params()  # noqa: SLF001
        self.zero_optimizer._hp_optimizer_states_linked = False  # noqa: SLF001
        if all(self.zero_optimizer.optimizer.state.get(master) for _, master, _ in self._groups()):
            self.zero_optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001
        self.zero_optimizer.update_lp_params()


class Zero3Layout(DeepSpeedLayout):
    """Layout of ZeRO-3: the optimizer steps the flat master weights of a sub-group."""

    shards_parameters: ClassVar[bool] = True

    used_by_refresh: tuple[str, ...] = (
        "invalidate_secondary_tensor",
        "_partition_all_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
        "_set_fp32_optimizer_param_groups",
        "_clear_fp32_optimizer_param_groups",
    )

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(model, optimizers)
        if type(self.zero_optimizer).__name__ != ZERO3_WITH_OPTIMIZER:
            self.used_by_refresh = ("partition_all_parameters",)
        # Between steps the groups of the engine's optimizer are empty.
        for index, (_, master) in enumerate(self._groups()):
            groups = self.zero_optimizer.optimizer.param_groups
            number = self.zero_optimizer.sub_group_to_group_id[index]
            # For Adagrad deepspeed 0.19 creates an optimizer with a single group.
            self._steppers[id(master)] = (
                self.zero_optimizer.optimizer,
                groups[min(number, len(groups) - 1)],
            )

    @contextlib.contextmanager
    def other_optimizers(self, num_stored: int = 0) -> Iterator[tuple[Optimizer, ...]]:
        """Yield the optimizers whose state cannot be resharded, with the masters as parameters."""
        # Between steps the groups are empty: deepspeed 0.19.8, stage3.py, _rigid_state_dict.
        if type(self.zero_optimizer).__name__ == ZERO3_WITH_OPTIMIZER:
            self.zero_optimizer._set_fp32_optimizer_param_groups()  # noqa: SLF001
        try:
            with super().other_optimizers(num_stored) as optimizers:
                yield optimizers
        finally:
            if type(self.zero_optimizer).__name__ == ZERO3_WITH_OPTIMIZER:
                self.zero_optimizer._clear_fp32_optimizer_param_groups()  # noqa: SLF001

    @classmethod
    @contextlib.contextmanager
    def full_parameters(cls, model: nn.Module) -> Iterator[None]:
        """Gather all parameters, without DeepSpeed's hooks.

        In deepspeed 0.19.8 the hooks would free the parameters after a forward, and compare its
        order of modules with that of the other ranks.
        """
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        zero: Any = model.optimizer
        offload = getattr(zero, "parameter_offload", zero)
        with GatheredParameters(list(model.parameters())):
            offload._remove_module_hooks()  # noqa: SLF001
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()
                parameter_offload.FWD_MODULE_STACK.pop()  # it was appended a second time

    def _groups(self) -> Iterator[tuple[Sequence[Any], torch.Tensor]]:
        """Yield the parameters of each flat master and the master; none without an optimizer."""
        if type(self.zero_optimizer).__name__ == ZERO3_WITH_OPTIMIZER:
            yield from zip(
                self.zero_optimizer.fp16_groups,
                self.zero_optimizer.fp32_partitioned_groups_flat,
                strict=True,
            )

    def _on_disk(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the indices and master weights of sub-groups that are offloaded to NVMe."""
        for index, (_, master) in enumerate(self._groups()):
            if self.zero_optimizer._swappable_optimizer_subgroup(index):  # noqa: SLF001
                yield index, master

    def _swap_in(self) -> None:
        """Copy offloaded sub-groups from NVMe to host memory until the next step."""
        for index, master in self._on_disk():
            if master.numel():
                continue
            self.zero_optimizer._optimizer_states_and_gradient_swap_in(index)  # noqa: SLF001
            swapper = self.zero_optimizer.optimizer_swapper
            tensors = swapper._get_param_swap_info(master).get_compute_tensors()  # noqa: SLF001
            copies = [tensor.detach().clone() for tensor in tensors]
            self.zero_optimizer._release_swap_buffers(index)  # noqa: SLF001
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.data = copy

    def _swap_out(self) -> None:
        """Write the sub-groups in host memory back to NVMe and free the memory."""
        for _, master in self._on_disk():
            if not master.numel():
                continue
            swapper = self.zero_optimizer.optimizer_swapper
            info = swapper._get_param_swap_info(master)  # noqa: SLF001
            pool = swapper.swap_buffer_manager
            buffers = pool.allocate_all(num_elems=swapper.largest_numel, dtype=swapper.dtype)
            swapper._swap_out_unpinned_tensors(  # noqa: SLF001
                aio_handle=swapper.aio_handle,
                unpinned_tensors=info.get_compute_tensors(),
                dest_paths=info.get_swap_paths(),
                pinned_buffers=buffers,
            )
            pool.free(buffers)
            info.release_memory()

    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield placements: trainable parameters in the masters, frozen ones in `ds_tensor`."""
        if getattr(self.zero_optimizer, "backup_optimizer", None) is not None:
            raise SwitchError(
                "ZeRO-3 keeps part of the optimizer state on the GPU (offload_optimizer.ratio)."
                " nbdist can only reshard it as a whole: set ratio to 1."
            )
        self._swap_in()
        masters: dict[int, tuple[torch.Tensor, int]] = {}
        for group, master in self._groups():
            offset = 0
            for parameter in group:
                masters[id(parameter)] = master, offset
                offset += parameter.ds_tensor.ds_numel
            if offset != master.numel():
                _refuse_swapped()
        parameters: Iterator[tuple[str, Any]] = self.named_parameters()
        for name, parameter in parameters:
            group = parameter.ds_process_group
            check_group_size(collectives.group_size(group), "ZeRO-3")
            size = parameter.ds_tensor.ds_numel
            start = min(collectives.rank(group) * size, parameter.ds_numel)
            count = min(size, parameter.ds_numel - start)
            flat, offset = masters.get(id(parameter), (parameter.ds_tensor, 0))
            if hasattr(flat, "ds_quant_scale"):
                raise SwitchError(
                    f"ZeRO-3 keeps the frozen parameter {name} quantized, so it cannot be"
                    " resharded. Remove zero_quantized_nontrainable_weights."
                )
            if flat.numel() < offset + count:
                _refuse_swapped()
            yield ParameterPlacement(
                name=name,
                shape=tuple(parameter.ds_shape),
                weight=flat.detach().narrow(0, offset, count),
                start=start,
                optimizer_tensor=flat if id(parameter) in masters else None,
                optimizer_offset=offset,
            )

    def refresh(self) -> None:
        """Update the compute weights from the master weights, and partition all parameters.

        The next forward gathers small ones again. DeepSpeed then sees which are used outside of
        their module's forward (`torch.nn.utils.spectral_norm`), and keeps these for the backward.
        """
        if type(self.zero_optimizer).__name__ == ZERO3_WITH_OPTIMIZER:
            self.zero_optimizer._partition_all_parameters()  # noqa: SLF001
            for index in range(len(self.zero_optimizer.fp16_groups)):
                self.zero_optimizer._reassign_or_swap_out_partitioned_parameters(index)  # noqa: SLF001
            self._swap_out()
            self.zero_optimizer.invalidate_secondary_tensor()
        else:
            self.zero_optimizer.partition_all_parameters()


def _refuse_swapped() -> None:
    raise SwitchError(
        "ZeRO-3 has swapped a part of this model to NVMe, where nbdist cannot read it. Use offload"
        " cpu if you want to switch this model to another backend."
    )
