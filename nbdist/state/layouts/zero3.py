"""Layout of ZeRO-3: each parameter is partitioned evenly; a rank's parts are concatenated.

Source: deepspeed 0.19.8, runtime/zero/stage3.py and partition_parameters.py: rank r has the
elements from r * ceil(numel / world size) on, the last rank's part is padded. `ds_tensor` of a
parameter is this rank's part in DeepSpeed's compute dtype; the fp32 master weights of a
sub-group's parts (`fp16_groups`) are concatenated in `fp32_partitioned_groups_flat`. Small
parameters stay gathered between steps (`persistent_parameters`). If a sub-group is offloaded to
NVMe, its master weights and state are empty between steps: each is read into a buffer for the
step, whatever the tensors refer to at that time, and written back afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import SwitchError
from nbdist.state import collectives
from nbdist.state.layouts.base import ParameterPlacement, check_group_size, is_deepspeed_engine
from nbdist.state.layouts.zero12 import DeepSpeedLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

_WITH_MASTERS = "DeepSpeedZeroOptimizer_Stage3"
_WITHOUT = "DeepSpeedZeRoOffload"
"""Class of the engine's optimizer if the model was prepared without an optimizer."""


class Zero3Layout(DeepSpeedLayout):
    """Layout of ZeRO-3: the optimizer steps the flat master weights of a sub-group."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(model, optimizers)
        # Between steps the groups of the engine's optimizer are empty.
        for index, (_, master) in enumerate(self._groups()):
            groups = self.zero_optimizer.optimizer.param_groups
            number = self.zero_optimizer.sub_group_to_group_id[index]
            # For Adagrad deepspeed 0.19 creates an optimizer with a single group.
            self._steppers[id(master)] = (
                self.zero_optimizer.optimizer,
                groups[min(number, len(groups) - 1)],
            )

    @classmethod
    def is_layout_of(cls, model: nn.Module) -> bool:
        """Return whether a model is a DeepSpeed engine of stage 3."""
        return is_deepspeed_engine(model) and type(model.optimizer).__name__ in {
            _WITH_MASTERS,
            _WITHOUT,
        }

    def _groups(self) -> Iterator[tuple[Sequence[Any], torch.Tensor]]:
        """Yield the parameters of each flat master and the master; none without an optimizer."""
        if type(self.zero_optimizer).__name__ == _WITH_MASTERS:
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

    def _bring_in(self) -> None:
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

    def _bring_out(self) -> None:
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
        self._bring_in()
        masters: dict[int, tuple[torch.Tensor, int]] = {}
        for group, master in self._groups():
            offset = 0
            for parameter in group:
                masters[id(parameter)] = master, offset
                offset += parameter.ds_tensor.ds_numel
            if offset != master.numel():
                _refuse_swapped()
        for name, parameter in self.named_parameters():
            yield _part(name, parameter, masters.get(id(parameter)))

    def refresh(self) -> None:
        """Update the compute weights from the master weights, and gather small parameters."""
        if type(self.zero_optimizer).__name__ == _WITH_MASTERS:
            self.zero_optimizer._partition_all_parameters()  # noqa: SLF001
            for index in range(len(self.zero_optimizer.fp16_groups)):
                self.zero_optimizer._reassign_or_swap_out_partitioned_parameters(index)  # noqa: SLF001
            self._bring_out()
            self.zero_optimizer.invalidate_secondary_tensor()
        else:
            self.zero_optimizer.partition_all_parameters()
        small = self.zero_optimizer.persistent_parameters
        if small:
            small[0].all_gather(small)

    def required_attributes(self) -> Iterator[tuple[object, str]]:
        """Yield the required attributes of the engine's optimizer and of all parameters."""
        yield self.zero_optimizer, "persistent_parameters"
        if type(self.zero_optimizer).__name__ == _WITH_MASTERS:
            yield self.zero_optimizer, "optimizer fp16_groups fp32_partitioned_groups_flat"
            yield self.zero_optimizer, "sub_group_to_group_id invalidate_secondary_tensor"
            yield self.zero_optimizer, "_partition_all_parameters"
            yield self.zero_optimizer, "_reassign_or_swap_out_partitioned_parameters"
            yield self.zero_optimizer, "_swappable_optimizer_subgroup"
            if getattr(self.zero_optimizer, "swap_optimizer", False):
                yield (
                    self.zero_optimizer,
                    "_optimizer_states_and_gradient_swap_in _release_swap_buffers",
                )
                yield (
                    self.zero_optimizer.optimizer_swapper,
                    "swap_buffer_manager largest_numel aio_handle",
                )
                yield (
                    self.zero_optimizer.optimizer_swapper,
                    "_get_param_swap_info _swap_out_unpinned_tensors",
                )
            if getattr(self.zero_optimizer, "backup_optimizer", None) is not None:
                message = (
                    "ZeRO-3 keeps part of the optimizer state on the GPU (offload_optimizer.ratio)."
                    " nbdist can only reshard it as a whole: set ratio to 1."
                )
                raise SwitchError(message)
        else:
            yield self.zero_optimizer, "partition_all_parameters"
        for _, parameter in self.named_parameters():
            yield parameter, "ds_tensor ds_shape ds_numel ds_process_group"
            yield parameter.ds_tensor, "ds_numel"  # type: ignore[attr-defined]
        for _ in self.placements():
            pass


def _part(name: str, parameter: Any, master: tuple[torch.Tensor, int] | None) -> ParameterPlacement:
    """Return the placement of this rank's part of a parameter."""
    group = parameter.ds_process_group
    check_group_size(collectives.group_size(group), "ZeRO-3")
    size = parameter.ds_tensor.ds_numel
    start = min(collectives.rank(group) * size, parameter.ds_numel)
    stop = min(start + size, parameter.ds_numel)
    flat, offset = (parameter.ds_tensor, 0) if master is None else master
    if hasattr(flat, "ds_quant_scale"):
        message = (
            f"ZeRO-3 keeps the frozen parameter {name} quantized, so it cannot be resharded. Remove"
            " zero_quantized_nontrainable_weights."
        )
        raise SwitchError(message)
    if flat.numel() < offset + stop - start:
        _refuse_swapped()
    return ParameterPlacement(
        name=name,
        shape=tuple(parameter.ds_shape),
        weight=flat.detach().narrow(0, offset, stop - start),
        start=start,
        optimizer_tensor=None if master is None else flat,
        optimizer_offset=offset,
    )


def _refuse_swapped() -> None:
    """Raise the error for state that is swapped to NVMe."""
    message = (
        "ZeRO-3 has swapped a part of this model to NVMe, where nbdist cannot read it. Use offload"
        " cpu if you want to switch this model to another backend."
    )
    raise SwitchError(message)
