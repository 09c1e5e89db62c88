"""Releases the models of earlier runs of a cell.

In a notebook, the cell that prepares a model is often run again. Accelerate 1.15 keeps references
to every prepared model, optimizer, scheduler and loader, and DeepSpeed 0.19 to every engine, so a
GPU would be full after a few runs. `worker.engines.accelerator` calls ``register_accelerator`` for
each Accelerator and ``release_unused_models`` before a new model is prepared;
`worker.engines.deepspeed` calls ``make_engines_collectable``.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from nbdist.signals import defer_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate import Accelerator

_KEPT = ("_models", "_optimizers", "_schedulers", "_dataloaders")
"""Lists of prepared objects in accelerate 1.15's Accelerator."""

_NODES_LOOKED_AT = 64
"""Maximum nodes inspected per graph: a loss saves tensors within its last few operations."""


@dataclass(slots=True)
class CleanupState:
    """State of the cleanup."""

    is_pending: bool = False
    """True if a previously prepared object was still in use at the last cleanup."""


_known: weakref.WeakSet[Accelerator] = weakref.WeakSet()


_state = CleanupState()

_lists: list[list[Any]] = []
"""Global lists of DeepSpeed that hold modules."""


def register_accelerator(accelerator: Accelerator) -> None:
    """Register an Accelerator for the cleanup."""
    _known.add(accelerator)


def registered_accelerators() -> list[Accelerator]:
    """Return the registered Accelerators that still exist."""
    return list(_known)


def clear_engine_registries() -> None:
    """Clear DeepSpeed's global lists, which hold modules of old engines."""
    for modules in _lists:
        modules.clear()


def release_remaining() -> None:
    """Repeat the cleanup if an old object was still in use at the last one.

    In `model, optimizer = accelerator.prepare(build(), ...)` the old optimizer is in use until
    the call returns. Call this before the first use of the prepared objects.
    """
    if _state.is_pending:
        release_unused_models()
        _state.is_pending = False


def release_unused_models() -> None:
    """Free prepared objects that are no longer in use, before a new model is allocated.

    An object is in use if anything other than an Accelerator refers to it: two models prepared on
    purpose are both kept, in the same order. Takes one or two garbage collections, 0.1-0.5 s.
    """
    with defer_interrupt():
        _release_models()


def _release_models() -> None:
    accelerators = registered_accelerators()
    lists = _lists + [getattr(accelerator, name) for accelerator in accelerators for name in _KEPT]
    survivors = [[weakref.ref(item) for item in prepared] for prepared in lists]
    engines = [_take_engine(accelerator) for accelerator in accelerators]
    for prepared in lists:
        _tie_to_optimizers(prepared)
        prepared.clear()
    gc.collect()
    if _any_alive(survivors):
        _cut_used_up_graphs()
        gc.collect()
    _state.is_pending = _any_alive(survivors)
    # In place: a scheduler may hold the list object of its Accelerator's optimizers.
    for prepared, references in zip(lists, survivors, strict=True):
        prepared.extend(
            item for item in (reference() for reference in references) if item is not None
        )
    for accelerator, restore_engine in zip(accelerators, engines, strict=True):
        if (wrapped := restore_engine()) is not None:
            accelerator.deepspeed_engine_wrapped = wrapped


def _any_alive(survivors: list[list[weakref.ref[Any]]]) -> bool:
    return any(reference() is not None for references in survivors for reference in references)


def _tie_to_optimizers(prepared: list[Any]) -> None:
    """Keep wrappers alive as long as their inner optimizer, which a cell may step directly."""
    for wrapper in prepared:
        inner = getattr(wrapper, "scheduler", wrapper)
        optimizer = getattr(inner, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            vars(optimizer).setdefault("_nbdist_wrappers", {})[id(wrapper)] = wrapper


def _cut_used_up_graphs() -> None:
    """Detach tensors, such as the last `loss`, from graphs that `backward()` has freed.

    Such a graph is useless, but keeps its model, gradients and engine alive.
    """
    results = [item for item in gc.get_objects() if type(item) is torch.Tensor and item.grad_fn]
    for result in results:
        if _is_used_up(result.grad_fn):
            # torch cannot detach a view in place; it keeps its graph.
            with contextlib.suppress(RuntimeError):
                result.detach_()
                # FSDP2 and DeepSpeed register hooks of the model on the outputs of its forward.
                result._backward_hooks = None  # noqa: SLF001
                vars(result).pop("_backward_hook_managers", None)


def _is_used_up(node: Any) -> bool:
    """Return whether `backward()` freed a graph's tensors; inspects a limited number of nodes."""
    nodes, seen = [node], {node}
    while nodes and len(seen) < _NODES_LOOKED_AT:
        node = nodes.pop()
        try:
            if _has_hooks(node):
                return False
            for name in dir(node):
                if name.startswith("_saved_") or name == "saved_tensors":
                    getattr(node, name)
        except RuntimeError:
            return True
        children = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= children
        nodes += children
    return False


def _has_hooks(node: Any) -> bool:
    """Return whether a node has saved-tensor hooks; backward removes them with the tensors.

    Reading such a tensor would call the hooks: activation checkpointing would recompute the
    forward with the current parameters.
    """
    raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    saved = [
        tensor for part in raw for tensor in (part if isinstance(part, (list, tuple)) else [part])
    ]
    return any(getattr(tensor, "unpack_hook", None) is not None for tensor in saved)


def _take_engine(accelerator: Accelerator) -> Callable[[], object]:
    """Remove the engine used by `backward()`; return a function that wraps it again if alive."""
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is None:
        return _nothing
    accelerator.deepspeed_engine_wrapped = None
    kind, reference = type(wrapped), weakref.ref(wrapped.engine)

    def restore_engine() -> object:
        engine = reference()
        return None if engine is None else kind(engine)

    return restore_engine


def _nothing() -> None:
    return None


class EngineBoundHook:
    """Gradient hook of DeepSpeed that lives as long as its engine.

    In torch 2.13 a post-accumulate-grad hook is not visible to the garbage collector, so a hook
    that references its parameter, as all of DeepSpeed's do, would keep the engine alive forever.
    The parameter gets a hook with a weak reference to the real one; the engine's list of handles
    holds the real one.
    """

    def __init__(
        self,
        register: Callable[[torch.Tensor, Callable[..., None]], Any],
        parameter: torch.Tensor,
        hook: Callable[..., None],
    ) -> None:
        """Register `hook` on `parameter` with DeepSpeed's `register`."""
        reference = weakref.ref(hook)

        def call(*args: Any) -> None:
            if (real := reference()) is not None:
                real(*args)

        self._hook = hook
        self._handle = register(parameter, call)

    def remove(self) -> None:
        """Remove the hook, as torch's handle does."""
        self._handle.remove()


def make_engines_collectable() -> None:
    """Patch DeepSpeed so that engines can be garbage collected; idempotent."""
    if _lists:
        return
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import parameter_offload, stage3, stage_1_and_2
    from deepspeed.utils.torch import register_grad_hook

    def register(parameter: torch.Tensor, hook: Callable[..., None]) -> EngineBoundHook:
        return EngineBoundHook(register_grad_hook, parameter, hook)

    for module in (bf16_optimizer, stage3, stage_1_and_2):
        module.register_grad_hook = register
    _lists.append(parameter_offload.FWD_MODULE_STACK)
    _move_cache_to_instance()


def _move_cache_to_instance() -> None:
    """Move a ZeRO-3 cache from its class, where it keeps each engine alive, to the instance.

    deepspeed 0.19.8, partitioned_param_coordinator.py: an lru_cache around a method.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    cls = coordinator.PartitionedParameterCoordinator
    name = f"_{cls.__name__}__params_to_release"
    cached = inspect.getclosurevars(getattr(cls, name)).nonlocals["func"]
    original = cached.__wrapped__

    def params_to_release(self: Any, submodule: object, step: int) -> object:
        cache = self.__dict__.setdefault("_nbdist_released", {})
        if (submodule, step) not in cache:
            cache[submodule, step] = original(self, submodule, step)
        return cache[submodule, step]

    setattr(cls, name, params_to_release)
