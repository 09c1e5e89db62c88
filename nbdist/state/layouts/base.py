"""Base class of the layouts.

The module of each engine returns a ``ParameterPlacement`` for each parameter. The base class reads
and writes weights, optimizer state and scalar state from the placements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nbdist.errors import SwitchError
from nbdist.state import collectives, optimizer_properties, optimizer_recipes
from nbdist.state.shards import Shard, ShardPiece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.optim import Optimizer

ScalarState = dict[str, dict[str, float]]
"""Parameter -> name of scalar optimizer state -> value."""

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Name components that torch.compile, activation checkpointing and FSDP1 insert."""
_NONE = torch.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterPlacement:
    """Location of this rank's elements of one parameter."""

    name: str
    """Name in the bare model."""
    shape: tuple[int, ...]
    weight: torch.Tensor
    """Live elements [start, start + numel), from the fp32 master weights if there are any. 1-D;
    a whole parameter has its own shape."""
    start: int = 0
    is_whole: bool = False
    """Every rank has the whole parameter."""
    replica_index: int = 0
    """Index of this rank's copy among the copies of these elements."""
    num_replicas: int = 1
    """Number of ranks with the same elements, if not every rank has the whole parameter."""
    optimizer_tensor: torch.Tensor | None = None
    """Tensor that an optimizer steps and has state for; None if there is none."""
    optimizer_offset: int = 0
    """Index of the first element in the stepped tensor."""

    @property
    def stop(self) -> int:
        """End of the interval (exclusive)."""
        return self.start + self.weight.numel()


class Layout(ABC):
    """State of one model under one engine, on this rank.

    Does not include buffers, which every engine has whole on every rank. Create a new layout
    whenever it is needed; it must not outlive the model.
    """

    library: ClassVar[str] = "torch"
    """Library whose private attributes the layout uses."""
    shards_parameters: ClassVar[bool] = False
    """A forward of the model gathers parameters from the other ranks."""
    is_replicated: ClassVar[bool] = False
    """Every rank has the whole state of all optimizers."""
    used_by_refresh: tuple[str, ...] = ()
    """Methods of DeepSpeed's optimizer that ``refresh`` calls."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model = model
        self.optimizers = tuple(map(innermost_optimizer, optimizers))
        # id() of a tensor that an optimizer steps -> the optimizer and the parameter group
        self._steppers = {
            id(parameter): (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def full_parameters(cls, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG003
        """Return a context in which every rank has all parameters, and a forward is local.

        Entering it is a collective. Changes to sharded parameters are discarded at its end.
        """
        return nullcontext()

    @classmethod
    def root_parameters(cls, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG003
        """Return a context for calls of modules inside of the engine, not of the model itself.

        The parameters that are in no unit are gathered in it, as in a forward of the model.
        Entering it is a collective.
        """
        return nullcontext()

    @abstractmethod
    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield the placement of each parameter; tied ones once, including frozen ones.

        Raises:
            SwitchError: the sharding is not supported.
            AttributeError: the library has another version.
        """

    def refresh(self) -> None:  # noqa: B027 - optional
        """Update what the engine derives from the written tensors; a collective."""

    # -- public

    def weights(self, *, owned: bool) -> dict[str, Shard]:
        """Return this rank's live shards of every parameter, trainable or frozen.

        Args:
            owned: if True each element is on exactly one rank (whole parameters are split
                evenly), otherwise all elements that this rank stores.
        """
        return {
            place.name: self._shard(place, place.weight, owned=owned) for place in self.placements()
        }

    def optimizer_state(self, *, owned: bool) -> dict[str, dict[str, Shard]]:
        """Return the live element-wise optimizer state: parameter -> name -> shard.

        A collective under FSDP1, where a rank has no entry for state without elements on it.

        Args:
            owned: as for `weights`.

        Raises:
            SwitchError: optimizer state is not element-wise.
        """
        states: dict[str, dict[str, Shard]] = {}
        for place in self.placements():
            tensors = dict(self._tensors(place))
            if tensors:
                states[place.name] = {
                    name: self._shard(place, tensor, owned=owned)
                    for name, tensor in tensors.items()
                }
        return states

    def scalar_state(self) -> ScalarState:
        """Return the scalar optimizer state: parameter -> name -> value. A collective in FSDP1."""
        counts: ScalarState = {}
        for place in self.placements():
            for name, value in self._state(place).items():
                if value is not None and _is_scalar(place, name, value):
                    counts.setdefault(place.name, {})[name] = float(value)
        return counts

    @torch.no_grad()
    def allocate_optimizer_state(self, names: Mapping[str, Mapping[str, torch.dtype]]) -> None:
        """Create missing optimizer state, filled with zeros.

        The dtype is the one that the engine's optimizer would use: that of the stepped tensor,
        even if another floating-point dtype is given. Parameters that share a flat tensor with a
        given one get the state too.

        Args:
            names: parameter -> name -> dtype, the same on all ranks.
        """
        for place in self.placements():
            if place.optimizer_tensor is None:
                continue
            optimizer, _ = self._steppers[id(place.optimizer_tensor)]
            if not optimizer_properties.properties_of(optimizer).is_reshardable:
                continue
            state = optimizer.state[place.optimizer_tensor]
            for name, dtype in names.get(place.name, {}).items():
                # torch 2.13: Adagrad creates its state before FSDP1 shards the parameter.
                if state.get(name) is None or state[name].shape != place.optimizer_tensor.shape:
                    kind = self._state_dtype(place.optimizer_tensor, dtype)
                    state[name] = torch.zeros_like(
                        place.optimizer_tensor, dtype=kind, requires_grad=False
                    )

    @torch.no_grad()
    def finalize_state(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Set scalar state and update what the engine derives; a collective.

        To be called after writing to the shards. Derived data: low-precision and gathered
        weights, DeepSpeed's references to the state.

        Args:
            counts: result of ``scalar_state()``, the same on all ranks.

        Raises:
            SwitchError: parameters that share one flat tensor have different scalar state.
        """
        for tensor, staged in self._staged.values():
            tensor.copy_(staged.view(tensor.shape))
        self._staged.clear()
        counts_of_tensor: dict[int, dict[str, float]] = {}
        for place in self.placements():
            if place.optimizer_tensor is None or place.name not in counts:
                continue
            optimizer, group = self._steppers[id(place.optimizer_tensor)]
            scalars = dict(counts[place.name])
            others = counts_of_tensor.setdefault(id(place.optimizer_tensor), scalars)
            if others != scalars:
                raise SwitchError(
                    f"{place.name} was stepped {scalars.get('step', 0):g} times and others of its"
                    f" parameter group {others.get('step', 0):g} times, but DeepSpeed keeps one"
                    " step count per group. Use ddp, fsdp2 or fsdp1, or put it in its own parameter"
                    " group."
                )
            for name, value in scalars.items():
                optimizer_recipes.set_scalar(optimizer, group, place.optimizer_tensor, name, value)
        self.refresh()

    @contextmanager
    def other_optimizers(self, num_stored: int = 0) -> Iterator[tuple[Optimizer, ...]]:
        """Yield the optimizers whose state cannot be resharded, with all their parameters.

        The methods above do not include their state.

        Args:
            num_stored: number of state dicts in a checkpoint. If it is that of all optimizers, all
                are yielded: nbdist once stored those of optimizers that it reshards now.
        """
        yield tuple(
            optimizer
            for optimizer in self.optimizers
            if num_stored == len(self.optimizers)
            or not optimizer_properties.properties_of(optimizer).is_reshardable
        )

    # -- for subclasses

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names in the bare model, tied ones once."""
        for name, parameter in unwrap_engine(self.model).named_parameters():
            yield bare_name(name), parameter

    def whole_placement(self, name: str, parameter: torch.Tensor) -> ParameterPlacement:
        """Return the placement of a parameter that every rank has whole."""
        return ParameterPlacement(
            name=name,
            shape=tuple(parameter.shape),
            weight=parameter.detach(),
            is_whole=True,
            optimizer_tensor=self.optimizer_tensor_or_none(parameter),
        )

    def optimizer_tensor_or_none(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor if an optimizer steps it, otherwise None."""
        return tensor if id(tensor) in self._steppers else None

    def _state_dtype(self, stepped: torch.Tensor, named: torch.dtype) -> torch.dtype:
        """Return the dtype of optimizer state for a stepped tensor."""
        return stepped.dtype if named.is_floating_point else named

    def _state(self, place: ParameterPlacement) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter, without creating it."""
        if place.optimizer_tensor is None:
            return {}
        states = [
            optimizer.state[place.optimizer_tensor]
            for optimizer in self.optimizers
            if place.optimizer_tensor in optimizer.state
            and optimizer_properties.properties_of(optimizer).is_reshardable
        ]
        return states[0] if states else {}

    def _tensors(self, place: ParameterPlacement) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield element-wise state: the whole tensor, or the parameter's part of a flat one."""
        for name, value in self._state(place).items():
            if _is_scalar(place, name, value):
                continue
            kind = type(value)
            if kind not in {torch.Tensor, DTensor} or value.shape != _shape(place.optimizer_tensor):
                _refuse_state(place.name, name, value)
            local = value.to_local() if isinstance(value, DTensor) else value
            if not place.is_whole or local.shape != place.shape:
                local = local.view(-1).narrow(0, place.optimizer_offset, place.weight.numel())
            yield name, local

    def _shard(self, place: ParameterPlacement, tensor: torch.Tensor, *, owned: bool) -> Shard:
        """Return the shard of a parameter's weight or of a tensor of its optimizer state."""
        start, stop = place.start, place.stop
        if place.is_whole:
            flat = tensor.reshape(-1)
            if not owned and not tensor.is_contiguous():
                # another memory format: a copy, which `finalize_state` writes back
                self._staged[id(tensor)] = (tensor, flat)
            tensor = flat
        if owned:
            # Each rank with a copy owns an even part of it.
            index, num_copies = place.replica_index, place.num_replicas
            if place.is_whole:
                index, num_copies = collectives.rank(), collectives.group_size()
            # split like ZeRO-3, to reduce transfers
            size = -(-(stop - start) // num_copies)
            low, high = (min(stop - start, size * number) for number in (index, index + 1))
            tensor = tensor[low:high]
            start, stop = start + low, start + high
        pieces = (ShardPiece(start, stop, tensor.detach()),) if start < stop else ()
        return Shard(shape=place.shape, dtype=tensor.dtype, pieces=pieces)


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper."""
    inner = getattr(model, "_orig_mod", None)
    return unwrap_compiled(inner) if isinstance(inner, nn.Module) else model


def fsdp2_units(model: nn.Module) -> list[Any]:
    """Return the units of a model under FSDP2, the root first; of modules in one unit, the last."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(module._get_fsdp_state()): module for module in modules}.values())  # noqa: SLF001


def fsdp2_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's own objects for the parameters of a model."""
    for unit in fsdp2_units(model):
        for group in fsdp2_param_groups(unit):
            yield from group.fsdp_params


def fsdp2_param_groups(unit: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 unit or of its state.

    There may be several in torch 2.13, and one in torch 2.11.
    """
    state = getattr(unit, "_get_fsdp_state", lambda: unit)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]  # noqa: SLF001
    return [group for group in groups if group is not None]


def is_deepspeed_engine(model: nn.Module) -> bool:
    """Return whether a model is a DeepSpeed engine; does not import DeepSpeed."""
    return hasattr(model, "set_gradient_accumulation_boundary")


def unwrap_engine(model: nn.Module) -> nn.Module:
    """Return the model without the outer wrapper of torch.compile, DDP or DeepSpeed."""
    model = unwrap_compiled(model)
    wrapped = is_deepspeed_engine(model) or isinstance(model, nn.parallel.DistributedDataParallel)
    return unwrap_engine(model.module) if wrapped else model  # type: ignore[arg-type]  # a Module


def bare_name(name: str) -> str:
    """Return the name of a parameter or module in the bare model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def innermost_optimizer(optimizer: Any) -> Optimizer:
    """Return torch's optimizer inside Accelerate's and DeepSpeed's wrappers."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    torchs: Optimizer = optimizer
    return torchs


def _shape(stepped: torch.Tensor | None) -> torch.Size:
    """Return the shape of the stepped tensor; an empty shape (0,) for None."""
    return (_NONE if stepped is None else stepped).shape


def _is_scalar(place: ParameterPlacement, name: str, value: object) -> bool:
    """Return whether state is one number per parameter, or None."""
    if value is None or name in optimizer_recipes.SCALARS or not isinstance(value, torch.Tensor):
        if isinstance(value, (bool, int, float, torch.Tensor, type(None))):
            return True
        _refuse_state(place.name, name, value)
    return value.numel() == 1 and value.shape != _shape(place.optimizer_tensor)


def _refuse_state(parameter: str, name: str, value: object) -> NoReturn:
    form = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise SwitchError(
        f"Optimizer state {name!r} of {parameter} is {form} and not element-wise, so it cannot be"
        " resharded. Use an element-wise optimizer such as AdamW or SGD."
    )


def check_group_size(group_size: int, owner: str) -> None:
    """Raise if a model is sharded over fewer ranks than the world size.

    Raises:
        SwitchError: the sizes differ.
    """
    if group_size != collectives.group_size():
        raise SwitchError(
            f"{owner} shards this model over {group_size} of {collectives.group_size()} ranks and"
            " replicates it on the others. nbdist can only reshard state that is sharded over all"
            " ranks: remove that option."
        )


class DdpLayout(Layout):
    """Layout of DDP: parameters and state are whole; each rank owns an even part of each."""

    is_replicated = True

    @classmethod
    @contextmanager
    def full_parameters(cls, model: nn.Module) -> Iterator[None]:
        """Return a context in which a forward is that of the module, without DDP's collectives."""
        # torch 2.13: DDP copies buffers and rebuilds its buckets in a forward.
        is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        before = {name: value for name, value in vars(model).items() if name == "forward"}
        if is_wrapped:
            module: Any = model.module
            vars(model)["forward"] = module.forward
        try:
            yield
        finally:
            if is_wrapped:
                del vars(model)["forward"]
                vars(model).update(before)

    def placements(self) -> Iterator[ParameterPlacement]:
        """Yield the parameters of the module as whole placements."""
        for name, parameter in self.named_parameters():
            yield self.whole_placement(name, parameter)
