"""Releases the models of earlier runs of a cell.

In a notebook, the cell that prepares a model is often run again. Accelerate 1.15 keeps references
to every prepared model, optimizer, scheduler and loader, and DeepSpeed 0.19 to every engine, so a
GPU would be full after a few runs. `worker.engines.accelerator_patch` adds each Accelerator and
calls ``release_unused_models`` before a new model is prepared.

Only references of the libraries are dropped. A variable with an output or a loss keeps the
parameters of its model alive, as in any PyTorch program, until it is bound to another value.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from nbdist.signal_handling import defer_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelerate import Accelerator

_PREPARED_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")
"""Lists of prepared objects in accelerate 1.15's Accelerator."""

accelerators: weakref.WeakValueDictionary[int, Accelerator] = weakref.WeakValueDictionary()
"""The Accelerators of this rank by id(), in the order in which they were created."""

_is_pending = False
"""True if a previously prepared object was still in use at the last cleanup."""


def engine_registries() -> list[list[Any]]:
    """Return DeepSpeed's global lists, which hold modules of engines."""
    offload: Any = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    return [] if offload is None else [offload.FWD_MODULE_STACK]


def add_accelerator(accelerator: Accelerator) -> None:
    """Add an Accelerator; what it has prepared may be in reference cycles after it is gone."""
    accelerators[id(accelerator)] = accelerator
    weakref.finalize(accelerator, _request_cleanup).atexit = False


@contextlib.contextmanager
def unchanged_lists(accelerator: Accelerator) -> Iterator[None]:
    """Within this context, an Accelerator does not keep what it prepares."""
    before = {name: list(vars(accelerator)[name]) for name in _PREPARED_LISTS}
    yield
    for name, objects in before.items():
        vars(accelerator)[name][:] = objects


def _request_cleanup() -> None:
    global _is_pending  # noqa: PLW0603 - of this rank
    _is_pending = True


def release_remaining() -> None:
    """Repeat the cleanup if an old object was still in use at the last one.

    In `model, optimizer = accelerator.prepare(build(), ...)` the old optimizer is in use until
    the call returns, and a variable with the last loss until the first loss of the new model. Call
    this before the first use of the prepared objects.
    """
    global _is_pending  # noqa: PLW0603 - of this rank
    if _is_pending:
        release_unused_models()
        _is_pending = False


def release_unused_models() -> None:
    """Free prepared objects that are no longer in use, before a new model is allocated.

    An object is in use if anything other than an Accelerator refers to it: two models prepared on
    purpose are both kept, in the same order. Takes one garbage collection, 0.1-0.3 s.
    """
    global _is_pending  # noqa: PLW0603 - of this rank
    with defer_interrupt():
        lists = engine_registries()
        engines: list[tuple[weakref.ref[Any], type, weakref.ref[Any]]] = []
        for accelerator in list(accelerators.values()):
            lists += [getattr(accelerator, name) for name in _PREPARED_LISTS]
            wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
            if wrapped is not None:  # the engine that `backward()` uses
                engine_reference = weakref.ref(wrapped.engine)
                engines.append((weakref.ref(accelerator), type(wrapped), engine_reference))
                accelerator.deepspeed_engine_wrapped = wrapped = None
            del accelerator  # one of a function that has returned may be in a cycle with its models
        references = [[weakref.ref(item) for item in prepared] for prepared in lists]
        for prepared in lists:
            _release_with_optimizers(prepared)
            prepared.clear()
        gc.collect()
        # In place: a scheduler may hold the list object of its Accelerator's optimizers.
        for prepared, before in zip(lists, references, strict=True):
            prepared += [item for reference in before if (item := reference()) is not None]
        for owner_reference, wrapper, engine_reference in engines:
            owner, engine = owner_reference(), engine_reference()
            if owner is not None and engine is not None:
                owner.deepspeed_engine_wrapped = wrapper(engine)
        _is_pending = any(lists)


def _release_with_optimizers(prepared: list[Any]) -> None:
    """Keep wrappers alive as long as their inner optimizer, which a cell may step directly."""
    for wrapper in prepared:
        inner = getattr(wrapper, "scheduler", wrapper)
        optimizer = getattr(inner, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            vars(optimizer).setdefault("_nbdist_wrappers", {})[id(wrapper)] = wrapper
