"""ZeRO-3: each parameter is cut evenly by itself; a rank's parts of a group lie side by side.

Source: deepspeed 0.19.8, runtime/zero/stage3.py and partition_parameters.py: rank r has the
elements from r * ceil(numel / world size) on, the last rank's part is padded. `ds_tensor` of a
parameter is this rank's part in the type that DeepSpeed computes in; the fp32 masters of a
sub-group's parts (`fp16_groups`) follow each other in `fp32_partitioned_groups_flat`. A small
parameter is gathered between steps too (`persistent_parameters`). Of a sub-group that is
offloaded to NVMe, master and state are empty between steps; each is read into a buffer for its
step, whatever the tensors refer to by then, and written from whatever they refer to after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import SwitchError
from nbdist.state import collectives
from nbdist.state.layouts.base import Place, check_world, is_engine
from nbdist.state.layouts.zero12 import OfDeepSpeed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

_WITH_MASTERS = "DeepSpeedZeroOptimizer_Stage3"
_WITHOUT = "DeepSpeedZeRoOffload"
"""Engine's optimizer of a model that was prepared without one."""


class Zero3(OfDeepSpeed):
    """What an optimizer steps is a sub-group's flat master."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Look at an engine; between steps its optimizer's groups are empty."""
        super().__init__(model, optimizers)
        for index, (_, master) in enumerate(self._groups()):
            groups = self.zero.optimizer.param_groups
            number = self.zero.sub_group_to_group_id[index]
            # For Adagrad deepspeed 0.19 makes an optimizer of a single group.
            self._steppers[id(master)] = (
                self.zero.optimizer,
                groups[min(number, len(groups) - 1)],
            )

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        """Whether a model is an engine of stage 3."""
        return is_engine(model) and type(model.optimizer).__name__ in {_WITH_MASTERS, _WITHOUT}

    def _groups(self) -> Iterator[tuple[Sequence[Any], torch.Tensor]]:
        """Parameters that share a flat master, and the master; none without an optimizer."""
        if type(self.zero).__name__ == _WITH_MASTERS:
            yield from zip(
                self.zero.fp16_groups, self.zero.fp32_partitioned_groups_flat, strict=True
            )

    def _on_disk(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Sub-groups that are offloaded to NVMe, and their masters."""
        for index, (_, master) in enumerate(self._groups()):
            if self.zero._swappable_optimizer_subgroup(index):  # noqa: SLF001
                yield index, master

    def _bring_in(self) -> None:
        """Copy what is on disk to host memory, where it stays up to the next step."""
        for index, master in self._on_disk():
            if master.numel():
                continue
            self.zero._optimizer_states_and_gradient_swap_in(index)  # noqa: SLF001
            swapper = self.zero.optimizer_swapper
            tensors = swapper._get_param_swap_info(master).get_compute_tensors()  # noqa: SLF001
            copies = [one.detach().clone() for one in tensors]
            self.zero._release_swap_buffers(index)  # noqa: SLF001
            for one, copy in zip(tensors, copies, strict=True):
                one.data = copy

    def _bring_out(self) -> None:
        """Write to disk what was brought in, and let go of it."""
        for _, master in self._on_disk():
            if not master.numel():
                continue
            swapper = self.zero.optimizer_swapper
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

    def places(self) -> Iterator[Place]:
        """Each parameter's part: in its master, or where it is frozen in `ds_tensor`."""
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
        """Renew what DeepSpeed computes with from the masters, and gather small parameters."""
        if type(self.zero).__name__ == _WITH_MASTERS:
            self.zero._partition_all_parameters()  # noqa: SLF001
            for index in range(len(self.zero.fp16_groups)):
                self.zero._reassign_or_swap_out_partitioned_parameters(index)  # noqa: SLF001
            self._bring_out()
            self.zero.invalidate_secondary_tensor()
        else:
            self.zero.partition_all_parameters()
        small = self.zero.persistent_parameters
        if small:
            small[0].all_gather(small)

    def internals(self) -> Iterator[tuple[object, str]]:
        """Return what is used of the engine's optimizer and of all parameters."""
        yield self.zero, "persistent_parameters"
        if type(self.zero).__name__ == _WITH_MASTERS:
            yield self.zero, "optimizer fp16_groups fp32_partitioned_groups_flat"
            yield self.zero, "sub_group_to_group_id invalidate_secondary_tensor"
            yield self.zero, "_partition_all_parameters"
            yield self.zero, "_reassign_or_swap_out_partitioned_parameters"
            yield self.zero, "_swappable_optimizer_subgroup"
            if getattr(self.zero, "swap_optimizer", False):
                yield self.zero, "_optimizer_states_and_gradient_swap_in _release_swap_buffers"
                yield self.zero.optimizer_swapper, "swap_buffer_manager largest_numel aio_handle"
                yield self.zero.optimizer_swapper, "_get_param_swap_info _swap_out_unpinned_tensors"
            _check_kept_here(self.zero)
        else:
            yield self.zero, "partition_all_parameters"
        for _, parameter in self.named_parameters():
            yield parameter, "ds_tensor ds_shape ds_numel ds_process_group"
            yield parameter.ds_tensor, "ds_numel"  # type: ignore[attr-defined]
        for _ in self.places():
            pass


def _part(name: str, parameter: Any, master: tuple[torch.Tensor, int] | None) -> Place:
    """Find this rank's part of a parameter."""
    group = parameter.ds_process_group
    check_world(collectives.size(group), "ZeRO-3")
    size = parameter.ds_tensor.ds_numel
    start = min(collectives.rank(group) * size, parameter.ds_numel)
    stop = min(start + size, parameter.ds_numel)
    flat, offset = (parameter.ds_tensor, 0) if master is None else master
    if hasattr(flat, "ds_quant_scale"):
        message = (
            f"ZeRO-3 keeps the frozen {name} quantized; leave out"
            " zero_quantized_nontrainable_weights to move it."
        )
        raise SwitchError(message)
    if flat.numel() < offset + stop - start:
        _refuse_swapped()
    return Place(
        name=name,
        shape=tuple(parameter.ds_shape),
        weight=flat.detach().narrow(0, offset, stop - start),
        start=start,
        stepped=None if master is None else flat,
        offset=offset,
    )


def _check_kept_here(zero: Any) -> None:
    """Refuse an optimizer whose state lies in several places."""
    if getattr(zero, "backup_optimizer", None) is not None:
        message = (
            "ZeRO-3 keeps a part of the optimizer state on the GPU (offload_optimizer.ratio);"
            " nbdist moves it only as a whole: set ratio to 1."
        )
        raise SwitchError(message)


def _refuse_swapped() -> None:
    """Say that state on disk is out of reach."""
    message = (
        "ZeRO-3 has swapped a part of this model to NVMe, where nbdist cannot reach it; use offload"
        " cpu for a model that changes its engine."
    )
    raise SwitchError(message)
