"""Rebinds the user's variables from old objects to their replacements after a switch.

A switch rebuilds model, optimizer and their wrappers. Each variable that was bound to an old
object is bound to the new one, and so are attributes, lists and dicts inside of variables: those
of a Trainer, of the user's own one too. Other references to an old object (in a tuple or a closure)
cannot be changed: the old object is invalidated and raises SwitchError when it is used.
`state.layouts.free_model` frees its memory.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.errors import SwitchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping

_K = TypeVar("_K")


class ReplacementMap:
    """Map of old objects to their replacements; a replacement is None until it exists."""

    def __init__(self) -> None:
        self._pairs: dict[int, list[Any]] = {}

    def add_old(self, key: object, value: object) -> None:
        """Add an old object with the key that its replacement will have."""
        self._pairs.setdefault(id(value), [value, key, None])

    def add_replacements(self, found: Mapping[object, object]) -> None:
        """Set the replacement of each old object by its key."""
        for pair in self._pairs.values():
            pair[2] = found.get(pair[1], pair[2])

    def replacements(self) -> dict[int, object]:
        """Return a mapping from the id of an old object to its replacement."""
        return {identity: new for identity, (_, _, new) in self._pairs.items() if new is not None}

    def rebind_variables(self, names: MutableMapping[str, Any]) -> list[str]:
        """Rebind variables to the replacements; return their names, without private ones."""
        bound = _rebound(names, self.replacements())
        names.update(bound)
        return sorted(name for name in bound if not name.startswith("_"))

    def rebind_inside(self, holders: Iterable[object]) -> None:
        """Rebind the attributes of objects, and the entries of lists and dicts.

        A holder may be an invalidated module, so only its `__dict__` is used.
        """
        successors = self.replacements()
        for holder in holders:
            entries = _entries(holder)
            if isinstance(entries, list):
                for index, new in _rebound(dict(enumerate(entries)), successors).items():
                    entries[index] = new
            else:
                entries.update(_rebound(entries, successors))

    def invalidate(self, reason: str) -> None:
        """Make old objects raise SwitchError when they are used.

        Those without a replacement: modules, optimizers and tensors. Objects of other types are
        not changed. Modules and optimizers also lose what they refer to.

        Args:
            reason: error message: what happened and what to use instead.
        """
        for old, _, new in self._pairs.values():
            if new is not None or is_stale(old):
                continue
            if isinstance(old, (nn.Module, Optimizer)):
                vars(old).clear()
                old.__class__ = _stale_class(type(old), reason)
            elif isinstance(old, torch.Tensor) and type(old) in _TENSORS:
                old.__class__ = _stale_class(type(old), reason)


def reachable(values: Iterable[object]) -> Iterator[object]:
    """Yield objects, and those in their attributes, lists and dicts, such as `trainer.ema.model`.

    Goes `_DEPTH` attributes deep and into all modules of a module. Skips long lists and dicts,
    which are data. Runs no code of an object's class: a lazy mapping would import, a proxy raise.
    """
    seen: dict[int, object] = {}
    level = list(values)
    for _ in range(_DEPTH + 1):
        below: list[object] = []
        while level:
            value = level.pop()
            inside = _entries(value)
            is_container = inside is value
            if id(value) in seen or (is_container and len(inside) > _MAX_ENTRIES):
                continue
            seen[id(value)] = value
            yield value
            held = list(inside.values()) if isinstance(inside, dict) else inside
            (level if is_container else below).extend(held)
            if isinstance(inside, dict) and issubclass(type(value), nn.Module):
                level.append(inside.get("_modules"))
        level = below


def _entries(value: object) -> dict[Any, Any] | list[Any]:
    """Return a list or dict itself, and the attributes of other objects."""
    if type(value) in _CONTAINERS:
        return value  # type: ignore[return-value]
    if issubclass(type(value), _CLOSED):
        return {}
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001 - there are none, or it is a proxy that raises
        return {}
    return attributes if type(attributes) is dict else {}


def _rebound(entries: Mapping[_K, object], successors: Mapping[int, object]) -> dict[_K, object]:
    """Return the replacements of old objects among entries.

    A method of an old object is one too, such as a collator's `model.preprocess`.
    """
    bound: dict[_K, object] = {}
    for name, value in list(entries.items()):
        if id(value) in successors:
            bound[name] = successors[id(value)]
        elif type(value) is MethodType and id(value.__self__) in successors:
            bound[name] = MethodType(value.__func__, successors[id(value.__self__)])
    return bound


def is_stale(value: object) -> bool:
    """Return whether an object was invalidated, by a switch or another `prepare()`."""
    return "of_before" in vars(type(value))


def _stale_class(cls: type, reason: str) -> type:
    """Return a class of modules, optimizers or tensors that raise whenever they are used."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise SwitchError(reason)

    def attribute(self: object, name: str) -> Any:
        if name in _HARMLESS:
            return object.__getattribute__(self, name)
        raise SwitchError(reason)

    members: dict[str, Any] = {
        "of_before": True,
        "__repr__": lambda _: f"<{cls.__name__}: replaced>",
    }
    if issubclass(cls, torch.Tensor):
        members |= {"__slots__": (), "__torch_function__": classmethod(refuse)}
        return type(cls.__name__, (cls,), members)
    members |= dict.fromkeys(("__call__", "__setattr__", "__iter__", "__len__"), refuse)
    # DeepSpeed's engine would be destroyed again
    members |= {"__getattribute__": attribute, "__del__": lambda _: None}
    # A subclass: `__class__` takes only a class of the same layout, which mixins change.
    return type(cls.__name__, (cls,), members)


_HARMLESS = frozenset({"__class__", "__dict__", "__repr__", "__doc__", "__module__", "__weakref__"})
"""Attributes that Python, IPython and the garbage collector read from any object."""

_TENSORS = (nn.Parameter, torch.Tensor, DTensor)
"""Types of parameters and buffers; FSDP2's parameters are DTensors."""

_DEPTH = 3
"""trainer.callback_handler.callbacks[0].model is reached."""
_MAX_ENTRIES = 1000
_CONTAINERS = (list, dict, OrderedDict, defaultdict)
_CLOSED = (type, ModuleType, FunctionType, *weakref.ProxyTypes)
"""Types of objects that are not entered; a proxy may be dead."""
