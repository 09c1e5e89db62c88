"""What the layouts have in common: everything but where the pieces are.

An engine's own module says for each parameter in which `Place` it is; here weights, optimizer
state and counts are read off the places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.errors import SwitchError
from nbdist.state import collectives
from nbdist.state.shards import Piece, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Names = dict[str, dict[str, torch.dtype]]
"""Parameter -> element-wise state -> its type."""
Counts = dict[str, dict[str, float]]
"""Parameter -> scalar state -> its value."""

_TESTED: Mapping[str, str] = {"torch": "2.13", "deepspeed": "0.19"}
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Modules that torch.compile, activation checkpointing and FSDP1 put in between."""
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Of torch 2.13's optimizers; one number a parameter, of its shape where that is ()."""
_NONE = torch.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Where an engine keeps what this rank has of one parameter."""

    name: str
    """In the bare model."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    weight: torch.Tensor
    """Live elements [start, start + numel); the fp32 master where there is one. One dimension,
    or for a whole parameter its own."""
    start: int = 0
    whole: bool = False
    """Every rank has all of it."""
    copy: int = 0
    """Which of the copies of these elements this is."""
    copies: int = 1
    """Ranks that have these same elements, where not every rank has all."""
    stepped: torch.Tensor | None = None
    """What an optimizer steps and has state for; None where none does."""
    offset: int = 0
    """Of the first element in what is stepped."""

    @property
    def stop(self) -> int:
        """One after the last element."""
        return self.start + self.weight.numel()


class Layout(ABC):
    """One engine's state of one model, on this rank.

    Buffers are no part of it: all engines have them whole on every rank. Made anew whenever
    it is needed; it must not outlive the model.
    """

    library: ClassVar[str] = "torch"
    """Whose attributes are relied on."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Look at a model that `holds` said yes to."""
        self.model = model
        self.optimizers = tuple(map(innermost, optimizers))
        self._steppers = {
            id(one): (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for one in group["params"]
        }
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    @abstractmethod
    def holds(cls, model: nn.Module) -> bool:
        """Whether a model (not compiled) is under this engine."""

    @abstractmethod
    def places(self) -> Iterator[Place]:
        """Where each parameter is, tied ones once, frozen ones too."""

    @abstractmethod
    def internals(self) -> Iterator[tuple[object, str]]:
        """Objects of the engine, each with the names of attributes that are relied on."""

    def refresh(self) -> None:  # noqa: B027 - most engines have nothing to renew
        """Renew what the engine derives from what was filled; a collective."""

    # -- for everybody

    def weights(self, *, owned: bool) -> dict[str, Shard]:
        """Every parameter, trainable or frozen, as this rank has it. Live.

        Args:
            owned: each element on exactly one rank, whole ones split evenly; else all that this
                rank must be given.
        """
        return {
            place.name: self._shard(place, place.weight, owned=owned) for place in self.places()
        }

    def states(self, *, owned: bool) -> dict[str, dict[str, Shard]]:
        """Element-wise optimizer state that exists now: parameter -> name -> shard. Live.

        A collective under FSDP1, where a rank does not know of state that it has nothing of.

        Raises:
            SwitchError: state that is not one number for each weight.
        """
        found: dict[str, dict[str, Shard]] = {}
        for place in self.places():
            tensors = dict(self._tensors(place))
            if tensors:
                found[place.name] = {
                    name: self._shard(place, tensor, owned=owned)
                    for name, tensor in tensors.items()
                }
        return found

    def counts(self) -> Counts:
        """Scalar state of optimizers: parameter -> name -> value. A collective under FSDP1."""
        found = {place.name: dict(self._scalars(place)) for place in self.places()}
        return {name: scalars for name, scalars in found.items() if scalars}

    @torch.no_grad()
    def allocate(self, names: Mapping[str, Mapping[str, torch.dtype]]) -> None:
        """Make zeroed optimizer state of these names where there is none yet.

        Its type is the one that the engine's optimizer would make: that of what it steps, also
        where another type is named. State beside it (of parameters that share a flat tensor
        with a named one) comes into being with it.

        Args:
            names: parameter -> name -> type, the same on all ranks.
        """
        for place in self.places():
            if place.stepped is None:
                continue
            state = self._optimizer_of(place)[0].state[place.stepped]
            for name, dtype in names.get(place.name, {}).items():
                # torch 2.13: Adagrad makes its state before FSDP1 cuts the parameter.
                if state.get(name) is None or state[name].shape != place.stepped.shape:
                    kind = self._state_dtype(place.stepped, dtype)
                    state[name] = torch.zeros_like(place.stepped, dtype=kind, requires_grad=False)

    @torch.no_grad()
    def settle(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Take over what was filled; a collective.

        Sets scalar state and renews the engine's copies: low-precision and gathered weights,
        DeepSpeed's links to the state.

        Args:
            counts: as `counts()` gave them, the same on all ranks.

        Raises:
            SwitchError: parameters that share one flat tensor have different counts.
        """
        for tensor, staged in self._staged.values():
            tensor.copy_(staged.view(tensor.shape))
        self._staged.clear()
        wanted: dict[int, dict[str, float]] = {}
        for place in self.places():
            if place.stepped is None or place.name not in counts:
                continue
            optimizer, group = self._optimizer_of(place)
            given = dict(counts[place.name])
            if wanted.setdefault(id(place.stepped), given) != given:
                _refuse_counts(place.name, given, wanted[id(place.stepped)])
            for name, value in given.items():
                _set_scalar(optimizer, group, place.stepped, name, value)
        self.refresh()

    def check(self) -> None:
        """Raise SwitchError where an attribute that is relied on is missing."""
        for owner, names in self.internals():
            for name in names.split():
                if not hasattr(owner, name):
                    self._refuse_version(type(owner).__name__, name)

    # -- for the engines

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the bare model, tied ones once."""
        for name, parameter in bare(self.model).named_parameters():
            yield plain(name), parameter

    def replica(self, name: str, parameter: torch.Tensor) -> Place:
        """Place of a parameter that every rank has whole."""
        return Place(
            name=name,
            shape=tuple(parameter.shape),
            weight=parameter.detach(),
            whole=True,
            stepped=self.if_stepped(parameter),
        )

    def if_stepped(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor that an optimizer steps; None for another one."""
        return tensor if id(tensor) in self._steppers else None

    def _optimizer_of(self, place: Place) -> tuple[Optimizer, dict[str, Any]]:
        """Return the optimizer that steps what is at a place, and its group."""
        return self._steppers[id(place.stepped)]

    def _state_dtype(self, stepped: torch.Tensor, named: torch.dtype) -> torch.dtype:
        """Type of state for what is stepped."""
        return stepped.dtype if named.is_floating_point else named

    def _state(self, place: Place) -> Mapping[str, Any]:
        """Return an optimizer's state of what is at a place; reading makes none."""
        if place.stepped is None:
            return {}
        found = [one.state[place.stepped] for one in self.optimizers if place.stepped in one.state]
        return found[0] if found else {}

    def _tensors(self, place: Place) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the element-wise state of a place: the whole tensor, or its part of a flat one."""
        for name, value in self._state(place).items():
            if _is_scalar(place, name, value):
                continue
            kind = type(value)
            if kind not in {torch.Tensor, DTensor} or value.shape != _shape(place.stepped):
                _refuse_state(place.name, name, value)
            local = value.to_local() if isinstance(value, DTensor) else value
            if not place.whole or local.shape != place.shape:
                local = local.view(-1).narrow(0, place.offset, place.weight.numel())
            yield name, local

    def _scalars(self, place: Place) -> Iterator[tuple[str, float]]:
        """Return the scalar state of a place."""
        for name, value in self._state(place).items():
            if value is not None and _is_scalar(place, name, value):
                yield name, float(value)

    def _shard(self, place: Place, tensor: torch.Tensor, *, owned: bool) -> Shard:
        """Describe what is at a place, in its own weight or in a state's tensor."""
        start, stop = place.start, place.stop
        if place.whole:
            tensor = self._flat(tensor, keep=not owned)
        if owned:
            low, high = even(stop - start, *_which_copy(place))
            tensor = tensor[low:high]
            start, stop = start + low, start + high
        pieces = (Piece(start, stop, tensor.detach()),) if start < stop else ()
        return Shard(shape=place.shape, dtype=tensor.dtype, pieces=pieces)

    def _flat(self, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Flatten row by row; a tensor in another memory order by a copy, written back later."""
        if tensor.is_contiguous():
            return tensor.view(-1)
        staged = tensor.reshape(-1)
        if keep:
            self._staged[id(tensor)] = (tensor, staged)
        return staged

    def _refuse_version(self, owner: str, missing: str) -> NoReturn:
        """Say that a library is not as it was."""
        message = (
            f"{self.library} {version(self.library)} keeps its training state otherwise than"
            f" {self.library} {_TESTED[self.library]} ({owner} has no {missing}), so nbdist cannot"
            f" take it to another engine; install {self.library} {_TESTED[self.library]}."
        )
        raise SwitchError(message)


def _which_copy(place: Place) -> tuple[int, int]:
    """Number and count of the copies of a place; each of their ranks owns an even part."""
    return (collectives.rank(), collectives.size()) if place.whole else (place.copy, place.copies)


def even(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's share of something whole: as ZeRO-3 cuts, so that little has to move."""
    size = -(-numel // world_size)
    return min(numel, rank * size), min(numel, (rank + 1) * size)


def inside_compiled(model: nn.Module) -> nn.Module:
    """Return what torch.compile has wrapped."""
    inner = getattr(model, "_orig_mod", None)
    return inside_compiled(inner) if isinstance(inner, nn.Module) else model


def is_engine(model: nn.Module) -> bool:
    """Whether a model is a DeepSpeed engine; without importing DeepSpeed."""
    return hasattr(model, "set_gradient_accumulation_boundary")


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside an engine's wrapper of the whole."""
    model = inside_compiled(model)
    wrapped = is_engine(model) or isinstance(model, nn.parallel.DistributedDataParallel)
    return bare(model.module) if wrapped else model  # type: ignore[arg-type]  # a module's is one


def plain(name: str) -> str:
    """Name in the bare model of a parameter or module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return torch's own optimizer inside Accelerate's wrappers."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer


def _shape(stepped: torch.Tensor | None) -> torch.Size:
    """Shape of what is stepped; of nothing, that of nothing."""
    return (_NONE if stepped is None else stepped).shape


def _is_scalar(place: Place, name: str, value: object) -> bool:
    """Whether state is one number a parameter, or nothing at all."""
    if value is None or name in _SCALARS or not isinstance(value, torch.Tensor):
        if isinstance(value, (bool, int, float, torch.Tensor, type(None))):
            return True
        _refuse_state(place.name, name, value)
    return value.numel() == 1 and value.shape != _shape(place.stepped)


def _set_scalar(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    stepped: torch.Tensor,
    name: str,
    value: float,
) -> None:
    """Set scalar state in the form that the optimizer keeps it in."""
    state = optimizer.state[stepped]
    old = state.get(name)
    if isinstance(old, torch.Tensor):
        old.fill_(value)
    elif old is not None:
        state[name] = type(old)(value)
    elif _keeps_tensors(optimizer):
        # torch 2.13, optimizer.py: _get_scalar_dtype, and where each optimizer makes "step"
        on_device = group.get("fused") or group.get("capturable")
        wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        state[name] = torch.tensor(
            float(value),
            dtype=torch.float64 if wide else torch.float32,
            device=stepped.device if on_device else "cpu",
        )
    else:
        state[name] = int(value) if float(value).is_integer() else value


def _keeps_tensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's, or made of one; they count in tensors."""
    bases = type(optimizer).__mro__
    ours = [one for one in bases if one.__module__.startswith("torch.optim.")]
    return any(one is not Optimizer for one in ours)


def _refuse_counts(name: str, given: Mapping[str, float], others: Mapping[str, float]) -> NoReturn:
    """Say that one flat tensor cannot have two counts."""
    message = (
        f"{name} was stepped {given.get('step', 0):g} times and others of its parameter group"
        f" {others.get('step', 0):g} times, but DeepSpeed keeps one count for all of them; use ddp,"
        " fsdp2 or fsdp1, or give it a parameter group of its own."
    )
    raise SwitchError(message)


def _refuse_state(parameter: str, name: str, value: object) -> NoReturn:
    """Say that optimizer state is not element-wise."""
    what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    message = (
        f"the optimizer keeps {name!r} of {parameter} as {what}, not as one number for each weight,"
        " so it cannot be cut in another way; use an optimizer such as AdamW or SGD."
    )
    raise SwitchError(message)


def check_world(group_size: int, what: str) -> None:
    """Refuse a cut over fewer ranks than there are."""
    if group_size != collectives.size():
        message = (
            f"{what} cuts this model over {group_size} of {collectives.size()} ranks and repeats it"
            " on"
            " the others; nbdist moves state that is cut over all ranks: leave out that option."
        )
        raise SwitchError(message)
