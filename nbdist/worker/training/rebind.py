"""New objects in the place of old ones: in the user's variables, and nowhere else.

A switch makes model, optimizer and their wrappers anew. Each variable of the user's that was
bound to an old one is bound to the new one. What else refers to an old one (a list, a
closure) cannot be found with certainty: the old object is emptied, so that its memory is
free, and says what happened when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.errors import SwitchError
from nbdist.state import meta_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping


class Renewed:
    """Old objects, each with the one that took its place; None until it exists."""

    def __init__(self) -> None:
        """Know nothing."""
        self._pairs: dict[int, list[Any]] = {}

    def old(self, key: object, one: object) -> None:
        """Note an old object under a key that its successor will have as well."""
        self._pairs.setdefault(id(one), [one, key, None])

    def new(self, found: Mapping[object, object]) -> None:
        """Give each old object the successor with its key."""
        for pair in self._pairs.values():
            pair[2] = found.get(pair[1], pair[2])

    def successors(self) -> dict[int, object]:
        """Id of an old object -> its successor."""
        return {identity: new for identity, (_, _, new) in self._pairs.items() if new is not None}

    def unbound(self) -> list[object]:
        """Old objects whose successor does not exist yet."""
        return [old for old, _, new in self._pairs.values() if new is None]

    def bind(self, names: MutableMapping[str, Any]) -> list[str]:
        """Bind variables anew; returns those that were."""
        successors = self.successors()
        bound = [name for name, value in names.items() if id(value) in successors]
        for name in bound:
            names[name] = successors[id(names[name])]
        return sorted(name for name in bound if not name.startswith("_"))


def parts(number: int, prepared: nn.Module, bare: nn.Module | None) -> dict[object, object]:
    """What of a model a variable may hold: itself, its modules, parameters, buffers, by key.

    Args:
        number: of the model.
        prepared: as `prepare()` returned it.
        bare: as it was given to `prepare()`; modules of it count where it still has them.
    """
    found: dict[object, object] = {}
    for name, module in meta_model.modules(prepared):
        # A wrapper comes before what it wraps, and both have one plain name.
        found.setdefault((number, "module", name), module)
        found[number, "inside", name] = module
    for name, parameter in prepared.named_parameters():
        found[number, "parameter", meta_model.plain(name)] = parameter
    for name, buffer in prepared.named_buffers():
        found[number, "buffer", meta_model.plain(name)] = buffer
    if bare is not None:
        found[number, "bare"] = bare
    found[number, "prepared"] = prepared
    return found


def empty(olds: Iterable[object], reason: str) -> None:
    """Free what old objects hold, and let them say why they cannot be used.

    Args:
        olds: modules, optimizers, tensors; what cannot be emptied is left as it is.
        reason: what happened and what to use now.
    """
    for one in olds:
        if is_stale(one):
            continue
        if isinstance(one, (nn.Module, Optimizer)):
            vars(one).clear()
            one.__class__ = _stale(type(one), reason)
        elif isinstance(one, torch.Tensor) and type(one) in _TENSORS:
            if isinstance(one, DTensor):
                one._local_tensor = torch.empty(0)  # noqa: SLF001 - its memory
            else:
                one.data = torch.empty(0)
            one.grad = None
            one.__class__ = _stale_tensor(type(one), reason)


def is_stale(one: object) -> bool:
    """Whether an object was emptied by a switch."""
    return "of_before" in vars(type(one))


def _stale(cls: type, reason: str) -> type:
    """Make a class whose objects raise whenever they are used."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise SwitchError(reason)

    def attribute(self: object, name: str) -> Any:
        if name in _HARMLESS:
            return object.__getattribute__(self, name)
        raise SwitchError(reason)

    names = dict.fromkeys(("__call__", "__setattr__", "__iter__", "__len__"), refuse)
    return type(
        cls.__name__,
        (nn.Module,) if issubclass(cls, nn.Module) else (Optimizer,),
        {
            **names,
            "of_before": True,
            "__getattribute__": attribute,
            "__repr__": lambda _: f"<{cls.__name__} of before a switch>",
        },
    )


_HARMLESS = frozenset({"__class__", "__dict__", "__repr__", "__doc__", "__module__", "__weakref__"})
"""What Python, IPython and garbage collection ask of any object."""


def _stale_tensor(cls: type, reason: str) -> type:
    """Make a class of tensors that raise whenever they are used."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise SwitchError(reason)

    return type(
        cls.__name__,
        (cls,),
        {
            "__slots__": (),
            "of_before": True,
            "__torch_function__": classmethod(refuse),
            "__repr__": lambda _: f"<{cls.__name__} of before a switch>",
        },
    )


_TENSORS = (nn.Parameter, torch.Tensor, DTensor)
"""Parameters and buffers; FSDP2's parameters are DTensors."""
