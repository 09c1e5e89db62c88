"""Patches of DeepSpeed: gradients add up as in torch, scalars are broadcast, engines are freed.

`worker.engines.deepspeed` applies them when DeepSpeed is initialized, and uses the functions about
the gradients that a ZeRO optimizer keeps.
"""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch

from nbdist.worker.library_patches import patch
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


def apply() -> None:
    """Apply all patches; idempotent."""
    engine = "deepspeed.runtime.engine:DeepSpeedEngine"
    stage_1_and_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
    partitioning = "deepspeed.runtime.zero.partition_parameters"
    coordinator = "PartitionedParameterCoordinator"

    # gradients
    patch(f"{engine}.zero_grad", _drop_gradients_too)
    patch(f"{engine}._backward_prologue", _begin_backward_once)
    patch(f"{engine}._backward_post_hook", _end_without_gradients)
    patch(
        "deepspeed.runtime.utils:OutputBackwardHookManager._make_backward_hook",
        _let_each_backward_begin,
    )
    patch(f"{stage_1_and_2}.independent_gradient_partition_epilogue", _add_to_earlier_gradients)
    patch(f"{stage_1_and_2}.copy_grads_in_partition", _add_to_offloaded_gradients)
    patch(
        "deepspeed.runtime.swap_tensor.optimizer_utils:"
        "OptimizerSwapper._adjust_for_misaligned_lengths",
        _keep_gradients_in_memory,
    )

    # scalar parameters
    patch(
        f"{engine}._broadcast_model",
        _with_vectors_for_scalars(lambda engine: engine.module.parameters()),
    )
    patch(
        f"{partitioning}:GatheredParameters._exit",
        _with_vectors_for_scalars(lambda gathered: gathered.params),
    )
    patch(f"{partitioning}:Init._convert_to_deepspeed_param", _make_scalar_a_vector)

    # references that would keep an engine alive
    for module in ("bf16_optimizer", "zero.stage3", "zero.stage_1_and_2"):
        patch(f"deepspeed.runtime.{module}:register_grad_hook", _bind_to_engine)
    patch(
        "deepspeed.runtime.zero.partitioned_param_coordinator:"
        f"{coordinator}._{coordinator}__params_to_release",
        _cache_on_instance,
    )

    for name in ("train", "eval"):
        patch(f"{engine}.{name}", _return_self)


def has_gradients(zero: Any) -> bool:
    """Return whether there was a `backward()` since the last `step()` or `zero_grad()`."""
    if (flags := getattr(zero, "fp32_groups_has_gradients", None)) is not None:  # BF16_Optimizer
        return any(map(any, flags))
    if hasattr(zero, "grad_partitions_flat_buffer"):  # stage 3 counts in the next forward
        return bool(zero.micro_step_id > 0 or zero._epilogue_ran_this_backward)  # noqa: SLF001
    return bool(getattr(zero, "micro_step_id", 0) >= 0)  # unknown in stage 0


def are_reduced(zero: Any) -> bool:
    """Return whether the last micro-batch had a `backward()`, which reduces those of all."""
    if getattr(zero, "cpu_offload", True) or hasattr(zero, "grad_partitions_flat_buffer"):
        return True
    return any(gradients is not None for gradients in zero.averaged_gradients.values())


def drop_gradients(zero: Any) -> None:
    """Drop the gradients that a ZeRO optimizer keeps; its own `zero_grad()` drops part of them."""
    had_gradients = has_gradients(zero)
    zero.zero_grad()
    if not had_gradients or not hasattr(zero, "averaged_gradients"):
        return
    zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
    zero.reset_cpu_buffers()
    if hasattr(zero, "grad_partitions_flat_buffer"):
        zero.grad_partitions_flat_buffer.zero_()
    else:
        zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
        zero.micro_step_id, zero.ready_for_gradients = -1, False


def drop_earlier_offloaded(zero: Any) -> None:
    """Zero offloaded gradients of parameters that have none in this step, but had one before."""
    if getattr(zero, "cpu_offload", False):
        groups, partitions = zero.params_in_partition, zero.single_partition_of_fp32_groups
    elif getattr(zero, "offload_optimizer", False):
        groups, partitions = zero.fp16_groups, zero.fp32_partitioned_groups_flat
    else:
        return
    for parameter in (each for group in groups for each in group):
        number = zero.get_param_id(parameter)
        if number in zero.norm_for_param_grads or number not in zero.grad_position:
            continue
        index, *_, offset, count = zero.grad_position[number]
        if (gradient := partitions[index].grad) is not None:  # None if it is on NVMe
            gradient.view(-1).narrow(0, offset, count).zero_()


def _drop_gradients_too(zero_grad: Callable[[Any], None]) -> Callable[..., None]:
    def drop(self: Any, set_to_none: bool = True) -> None:  # noqa: ARG001, FBT001, FBT002
        zero_grad(self)
        if hasattr(self.optimizer, "zero_grad"):
            drop_gradients(self.optimizer)
            prepared_models.reset_micro_batches(self)

    return drop


def _begin_backward_once(prologue: Callable[[Any], None]) -> Callable[[Any], None]:
    """Begin a `loss.backward()` of several forwards once; it then ends after the last of them.

    deepspeed 0.19.8 calls the prologue for each forward, and takes all but the first for nested
    passes, which it does not end: gradients in the last bucket are not reduced.
    """
    last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self: Any) -> None:
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - as deepspeed
        if last.get(self) != task:
            last[self] = task
            prologue(self)

    return begin


def _end_without_gradients(end: Callable[[Any], None]) -> Callable[[Any], None]:
    """Reduce nothing after a `torch.autograd.grad()`, which leaves no gradients of parameters."""

    def end_backward(self: Any) -> None:
        counts_hooks = hasattr(self.optimizer, "averaged_gradients")  # BF16_Optimizer does not
        state = self.optimizer._backward_hook_state  # noqa: SLF001
        if not counts_hooks or state.hooks_fired_this_backward or self._running_engine_backward:
            end(self)
        else:
            state.exit_backward()
            state.reset_for_new_step()

    return end_backward


def _let_each_backward_begin(make_hook: Callable[..., Any]) -> Callable[..., Any]:
    """Begin a second backward of the same forward too, as a gradient penalty has it."""

    def make(self: Any, tensor: torch.Tensor) -> Callable[..., Any]:
        hook = make_hook(self, tensor)

        def begin(gradient: torch.Tensor) -> Any:
            self.preprocess_done = False  # deepspeed 0.19.8 begins only the first
            return hook(gradient)

        return begin

    return make


def _add_to_earlier_gradients(epilogue: Callable[[Any], None]) -> Callable[[Any], None]:
    """Add the gradients of a backward to those of the ones before, as all other engines do.

    deepspeed 0.19.8 replaces them (stage_1_and_2.py:1047) unless the ones before were within
    `accumulate()`, or the buffer is a single tensor to which it adds.
    """

    def adding(self: Any) -> None:
        earlier = dict(self.averaged_gradients)
        epilogue(self)
        for group, pieces in self.averaged_gradients.items():
            if earlier.get(group) is not None and pieces is not earlier[group]:
                for piece, before in zip(pieces, earlier[group], strict=True):
                    piece.add_(before)

    return adding


def _add_to_offloaded_gradients(copy_gradient: Callable[..., None]) -> Callable[..., None]:
    """Add a gradient to the one that an earlier backward has moved to the CPU, or to its partition.

    deepspeed 0.19.8 would replace it, or add what an earlier step has left (stage_1_and_2.py:2166).
    """

    def adding(self: Any, param: torch.Tensor, group_idx: int | None = None) -> None:
        number = self.get_param_id(param)
        if not self.cpu_offload or number in self._offload_accumulated_param_ids:
            copy_gradient(self, param, group_idx)
            return
        if number in self.norm_for_param_grads:
            group, start, offset, count = self.grad_position[number]
            partition = self.single_partition_of_fp32_groups[group].grad.view(-1)
            gradient = self.get_param_gradient_attribute(param).view(-1).narrow(0, start, count)
            gradient.add_(partition.narrow(0, offset, count).to(gradient))
        micro_step, self.micro_step_id = self.micro_step_id, 0
        try:
            copy_gradient(self, param, group_idx)
        finally:
            self.micro_step_id = micro_step

    return adding


def _keep_gradients_in_memory(adjust: Callable[..., Any]) -> Callable[..., Any]:
    """Keep gradients in host memory when optimizer state and parameters are offloaded to NVMe.

    With deepspeed 0.19.8 and gradients larger than `aio.block_size` on NVMe, about half of the
    elements of such a weight silently moved in the wrong direction at the first step (measured;
    the cause in DeepSpeed is unknown). With gradients in memory the results match those without
    offload. This takes 4 bytes per parameter divided by the world size.
    """

    def adjusted(self: Any, *, tensors: Any, offsets: Any) -> Any:
        pieces, new_offsets = adjust(self, tensors=tensors, offsets=offsets)
        copies = [piece.clone() for piece in pieces]
        for piece in copies:
            piece.swappable = False
        return copies, new_offsets

    return adjusted


def _with_vectors_for_scalars(
    parameters_of: Callable[[Any], Iterable[nn.Parameter]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Broadcast scalar parameters as vectors; deepspeed 0.19.8 views each parameter as bytes."""

    def patched(broadcast: Callable[..., Any]) -> Callable[..., Any]:
        def broadcast_vectors(self: Any, *args: Any) -> Any:
            scalars = [each for each in parameters_of(self) if not each.dim()]
            for parameter in scalars:
                parameter.data = parameter.data.reshape(1)
            try:
                return broadcast(self, *args)
            finally:
                for parameter in scalars:
                    if parameter.numel():  # none if ZeRO-3 has partitioned it
                        parameter.data = parameter.data.reshape(())

        return broadcast_vectors

    return patched


def _make_scalar_a_vector(convert: Callable[..., None]) -> Callable[..., None]:
    """Do the same for what ZeRO-3 broadcasts between converting a parameter and partitioning it."""

    def convert_parameter(self: Any, param: nn.Parameter) -> None:
        convert(self, param)
        if not param.dim():
            param.data = param.data.reshape(1)

    return convert_parameter


def _bind_to_engine(register: Callable[..., Any]) -> Callable[..., Any]:
    """Make a gradient hook live as long as its engine, whose list of handles then refers to it.

    In torch 2.13 a post-accumulate-grad hook is not visible to the garbage collector, so a hook
    that references its parameter, as all of DeepSpeed's do, would keep the engine alive forever.
    """

    def register_bound(parameter: torch.Tensor, hook: Callable[..., None]) -> Any:
        reference = weakref.ref(hook)

        def call(*args: Any) -> None:
            if (real := reference()) is not None:
                real(*args)

        handle = register(parameter, call)
        handle.hook = hook
        return handle

    return register_bound


def _cache_on_instance(cached: Callable[..., Any]) -> Callable[..., Any]:
    """Move a ZeRO-3 cache from its class, where it keeps each engine alive, to the instance."""
    # deepspeed 0.19.8, partitioned_param_coordinator.py: an lru_cache in a closure
    original = inspect.getclosurevars(cached).nonlocals["func"].__wrapped__

    def params_to_release(self: Any, submodule: object, step: int) -> object:
        cache = self.__dict__.setdefault("_nbdist_released", {})
        if (submodule, step) not in cache:
            cache[submodule, step] = original(self, submodule, step)
        return cache[submodule, step]

    return params_to_release


def _return_self(original: Callable[..., object]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        return self

    return method
