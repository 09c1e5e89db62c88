"""Letting go of the models of earlier runs of a cell; runs on a rank.

Re-running the cell that prepares a model is the normal way to work in a notebook. Accelerate
1.15 keeps every model, optimizer, scheduler and loader that it ever prepared, and DeepSpeed
0.19 every engine, so a GPU would be full after a few runs. `worker.engines.accelerator` calls
`know`
for each Accelerator and `let_go` before a new model is prepared; `worker.engines.deepspeed` calls
`let_engines_go`.
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

from nbdist.signals import unstopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate import Accelerator

_KEPT = ("_models", "_optimizers", "_schedulers", "_dataloaders")
"""Lists of what an Accelerator of accelerate 1.15 has prepared."""

_NODES_LOOKED_AT = 64
"""Of one graph: a loss or a logit saves tensors within its last few operations."""


@dataclass(slots=True)
class State:
    """What is left to do."""

    again: bool = False
    """Something prepared earlier survived the last look."""


_known: weakref.WeakSet[Accelerator] = weakref.WeakSet()


_state = State()

_lists: list[list[Any]] = []
"""Of a library, which hold modules."""


def know(accelerator: Accelerator) -> None:
    """Remember an Accelerator whose lists `let_go` will look through."""
    _known.add(accelerator)


def known() -> list[Accelerator]:
    """Return the Accelerators that are in use."""
    return list(_known)


def forget_engines() -> None:
    """Empty the lists in which libraries keep modules of engines that are gone."""
    for kept in _lists:
        kept.clear()


def let_go_of_the_rest() -> None:
    """Look once more where something old was still in use when a model was prepared.

    In `model, optimizer = accelerator.prepare(build(), ...)` the old optimizer is in use until
    the call returns. To be called before the first use of what was prepared.
    """
    if _state.again:
        let_go()
        _state.again = False


def let_go() -> None:
    """Free what was prepared earlier and is in use no more, before a new model needs room.

    In use is what anything but an Accelerator still refers to: two models prepared on purpose
    both stay, and their order with them. Takes one garbage collection or two, 0.1-0.5 s.
    """
    with unstopped():
        _let_go()


def _let_go() -> None:
    living = known()
    lists = _lists + [getattr(one, name) for one in living for name in _KEPT]
    survivors = [[weakref.ref(item) for item in kept] for kept in lists]
    engines = [_take_engine(one) for one in living]
    for kept in lists:
        _tie_to_optimizers(kept)
        kept.clear()
    gc.collect()
    if any(one() is not None for references in survivors for one in references):
        _cut_used_up_graphs()
        gc.collect()
    _state.again = any(one() is not None for references in survivors for one in references)
    # In place: a scheduler may hold the very list of its Accelerator's optimizers.
    for kept, references in zip(lists, survivors, strict=True):
        kept.extend(item for item in (one() for one in references) if item is not None)
    for accelerator, give_back in zip(living, engines, strict=True):
        if (wrapped := give_back()) is not None:
            accelerator.deepspeed_engine_wrapped = wrapped


def _tie_to_optimizers(prepared: list[Any]) -> None:
    """Let wrappers live as long as the optimizer inside, which a cell may step by itself."""
    for one in prepared:
        inner = getattr(one, "scheduler", one)
        optimizer = getattr(inner, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            vars(optimizer).setdefault("_nbdist_wrappers", {})[id(one)] = one


def _cut_used_up_graphs() -> None:
    """Detach results, such as the last `loss`, from graphs that were gone backward through.

    Such a graph computes nothing any more, but keeps its model with gradients and engine.
    """
    results = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.grad_fn]
    for result in results:
        if _is_used_up(result.grad_fn):
            # torch refuses to detach a view in place; it keeps its graph then.
            with contextlib.suppress(RuntimeError):
                result.detach_()
                # FSDP2 and DeepSpeed put hooks of the model on what its forward returns.
                result._backward_hooks = None  # noqa: SLF001
                vars(result).pop("_backward_hook_managers", None)


def _is_used_up(node: Any) -> bool:
    """Whether `backward()` freed a graph: another one would raise. Looks at few nodes."""
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
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        nodes += following
    return False


def _has_hooks(node: Any) -> bool:
    """Whether a node saved tensors by hooks; backward takes those away with the tensors.

    To read such a tensor would call them: activation checkpointing would compute the forward
    again, with whatever is in the parameters now.
    """
    raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    saved = [one for part in raw for one in (part if isinstance(part, (list, tuple)) else [part])]
    return any(getattr(one, "unpack_hook", None) is not None for one in saved)


def _take_engine(accelerator: Accelerator) -> Callable[[], object]:
    """Take the engine of `backward()` away; the result wraps it anew where it still lives."""
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is None:
        return _nothing
    accelerator.deepspeed_engine_wrapped = None
    kind, reference = type(wrapped), weakref.ref(wrapped.engine)

    def give_back() -> object:
        engine = reference()
        return None if engine is None else kind(engine)

    return give_back


def _nothing() -> None:
    """Give back no engine."""


class HeldHook:
    """A gradient hook of DeepSpeed's, alive as long as its engine is.

    torch 2.13 hides a post-accumulate-grad hook from the garbage collector, so a hook that
    leads back to its parameter, as all of DeepSpeed's do, would keep the engine for ever.
    The parameter gets a hook that knows the real one weakly; the engine's own list of handles
    keeps the real one.
    """

    def __init__(
        self,
        register: Callable[[torch.Tensor, Callable[..., None]], Any],
        parameter: torch.Tensor,
        hook: Callable[..., None],
    ) -> None:
        """Register `hook` on `parameter` in DeepSpeed's way."""
        reference = weakref.ref(hook)

        def call(*args: Any) -> None:
            if (real := reference()) is not None:
                real(*args)

        self._hook = hook
        self._handle = register(parameter, call)

    def remove(self) -> None:
        """Take the hook off, as torch's own handle does."""
        self._handle.remove()


def let_engines_go() -> None:
    """Make the engines that are built from now on collectable; once in a process."""
    if _lists:
        return
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import parameter_offload, stage3, stage_1_and_2
    from deepspeed.utils.torch import register_grad_hook

    def register(parameter: torch.Tensor, hook: Callable[..., None]) -> HeldHook:
        return HeldHook(register_grad_hook, parameter, hook)

    for module in (bf16_optimizer, stage3, stage_1_and_2):
        module.register_grad_hook = register
    _lists.append(parameter_offload.FWD_MODULE_STACK)
    _remember_on_each_engine()


def _remember_on_each_engine() -> None:
    """Move a cache of ZeRO-3's from its class, where it keeps each engine, to the engine.

    deepspeed 0.19.8, partitioned_param_coordinator.py: an lru_cache around a method.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    cls = coordinator.PartitionedParameterCoordinator
    name = f"_{cls.__name__}__params_to_release"
    cached = inspect.getclosurevars(getattr(cls, name)).nonlocals["func"]
    original = cached.__wrapped__

    def params_to_release(self: Any, submodule: object, step: int) -> object:
        found = self.__dict__.setdefault("_nbdist_released", {})
        if (submodule, step) not in found:
            found[submodule, step] = original(self, submodule, step)
        return found[submodule, step]

    setattr(cls, name, params_to_release)
