"""Properties of optimizers, measured by stepping small tensors.

So a switch and a load can reshard the state of the optimizers of any library.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import math
import random
import sys
import warnings
import weakref
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from nbdist.state import optimizer_recipes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.state.optimizer_recipes import GroupOptions

log = logging.getLogger(__name__)

_COMPILED = frozenset(
    {"DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion"}
)
"""DeepSpeed's element-wise optimizers, compiled for one kind of device and without float64."""
_IGNORED = frozenset({"capturable", "foreach", "fused", "initial_lr", "lr", "lr_scale"})
"""Options that choose a kernel for a device, or scale the update of a group."""
_LR = 0.01
"""For an optimizer that begins with 0."""
_SHAPES = ((40, 24), (50,), (136, 130))
"""No preconditioner has the shape of its parameter. Libraries quantize or factor the state of the
last one (bitsandbytes 0.50: from 4,096 elements; some Adafactors: both dimensions from 128)."""
_STEPS = 8
"""Some optimizers change their update after some steps: torch 2.13's RAdam after 5."""
_TOLERANCE = 1e-6
"""Of an update in float64, relative to the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerProperties:
    """Properties of an optimizer."""

    is_reshardable: bool
    """True if it is element-wise, and a new optimizer continues exactly with copies of its options,
    of numbers in its state, and of state with one value per element of a parameter."""
    is_elementwise: bool | None
    """False if the update of an element depends on others, for example by the norm of a parameter;
    None if unknown."""
    state_bytes_per_element: float | None = None
    """Bytes of state per element of fp32 parameters; None if unknown."""


_UNKNOWN = OptimizerProperties(is_reshardable=False, is_elementwise=None)
_properties: weakref.WeakKeyDictionary[Optimizer, OptimizerProperties] = weakref.WeakKeyDictionary()
_measured: weakref.WeakKeyDictionary[type, dict[str, OptimizerProperties]] = (
    weakref.WeakKeyDictionary()
)
"""Class -> text of arguments and groups -> properties."""


def properties_of(optimizer: Optimizer) -> OptimizerProperties:
    """Return the properties of an optimizer, measured once for its class, arguments and groups.

    One that cannot step small tensors on the CPU, for example without a closure, has those of its
    base class.
    """
    if optimizer not in _properties:
        kwargs = optimizer_recipes.constructor_kwargs(optimizer)
        groups = _distinct_groups(optimizer)
        known = _measured.setdefault(type(optimizer), {})
        if (key := repr((kwargs, groups))) not in known:
            known[key] = _measure(type(optimizer), kwargs, groups)
        set_properties(optimizer, known[key])
    return _properties[optimizer]


def set_properties(optimizer: Optimizer, known: OptimizerProperties) -> None:
    """Set the properties of an optimizer that replaces one with these."""
    _properties[optimizer] = known


def why_not_reshardable(optimizer: Optimizer) -> str:
    """Return why the state of an optimizer cannot be resharded; empty if it can."""
    if properties_of(optimizer).is_reshardable:
        return ""
    return (
        f"{type(optimizer).__name__} is not known to update parameters element-wise, with state of"
        " one value per element, so its state cannot be resharded"
    )


def _measure(
    cls: type[Optimizer], kwargs: Mapping[str, Any], groups: Sequence[GroupOptions]
) -> OptimizerProperties:
    if cls.__name__ in _COMPILED:
        return OptimizerProperties(is_reshardable=True, is_elementwise=True)
    with _isolated():
        found = _measure_steps(cls, kwargs, groups)
        for base in cls.__mro__[1:]:
            if found is not None or base is Optimizer:
                break
            if issubclass(base, Optimizer) and (of_base := _measure_steps(base, {}, [{}])):
                found = replace(of_base, is_elementwise=None)
    return found or _UNKNOWN


def _distinct_groups(optimizer: Optimizer) -> list[GroupOptions]:
    groups = map(_without_ignored, optimizer_recipes.group_options(optimizer))
    return [*{repr(group): group for group in groups}.values()]


def _without_ignored(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _IGNORED}


def _measure_steps(
    cls: type[Optimizer], kwargs: Mapping[str, Any], groups: Sequence[GroupOptions]
) -> OptimizerProperties | None:
    """Return the properties that steps of small tensors show; None if it cannot step them."""
    options = _without_ignored(kwargs)
    if isinstance(lr := kwargs.get("lr"), (int, float, torch.Tensor)):
        options["lr"] = float(lr) or _LR
    train = functools.partial(_train_small, cls, options, groups)
    for shapes in (_SHAPES, _SHAPES[:1]):  # some optimizers step matrices only
        training, small = train(shapes), train(shapes[:2])
        if training is None or small is None or not training.update().any():
            continue
        half = small.update().shape[1] // 2
        # two ranks of ZeRO or FSDP1, which flatten parameters
        is_elementwise = small.is_equal(train(((half,),)), train(((half,),), first=half))
        return OptimizerProperties(
            is_reshardable=is_elementwise
            and training.is_equal(train(shapes, replaces_optimizer=True)),
            is_elementwise=is_elementwise,
            state_bytes_per_element=training.state_bytes() / training.update().numel(),
        )
    return None


def _start() -> torch.Tensor:
    """Return the initial values of all elements of a group."""
    return _random_values(_STEPS)


def _gradient(number: int) -> torch.Tensor:
    """Return a gradient of all elements of a group, whose norm differs between steps and halves.

    A part of it is the same in all steps, so that optimizers find a learning rate (D-Adaptation).
    """
    gradient = _random_values(number) + _start()
    gradient[: math.prod(_SHAPES[0]) // 2] *= 3.0 ** (number % 3)
    return gradient


def _random_values(seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    size = sum(map(math.prod, _SHAPES))
    return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Return a context in which optimizers print nothing, compile nothing and leave no trace."""
    hooks: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    before = [dict(each) for each in hooks]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the global one
        stack.enter_context(torch.inference_mode(mode=False))
        if "torch._dynamo" in sys.modules:  # it takes seconds to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for each in hooks:
            each.clear()
        try:
            yield
        finally:
            for each, own in zip(hooks, before, strict=True):
                each.update(own)


def _train_small(
    cls: type[Optimizer],
    kwargs: Mapping[str, Any],
    groups: Sequence[GroupOptions],
    shapes: Sequence[tuple[int, ...]],
    *,
    first: int = 0,
    replaces_optimizer: bool = False,
) -> _SmallTraining | None:
    """Train small parameters; None if the optimizer cannot."""
    try:
        training = _SmallTraining(cls, kwargs, groups, shapes, first)
        for number in range(_STEPS):
            if replaces_optimizer and number == _STEPS // 2:
                training.replace_optimizer()
            training.step(number)
    except Exception as error:  # noqa: BLE001 - the code of any library
        log.debug("%s cannot train tensors of %s: %r", cls.__name__, shapes, error)
        return None
    return training


class _SmallTraining:
    """Trains small parameters: for each group, consecutive parts of the same vector."""

    def __init__(
        self,
        cls: type[Optimizer],
        kwargs: Mapping[str, Any],
        groups: Sequence[GroupOptions],
        shapes: Sequence[tuple[int, ...]],
        first: int,
    ) -> None:
        self._cls, self._kwargs = cls, kwargs
        self._shapes, self._first = shapes, first
        self._parameters = [
            [part.requires_grad_() for part in self._parts(_start())] for _ in groups
        ]
        self._optimizer = self._build(groups)

    def _build(self, groups: Sequence[GroupOptions]) -> Any:
        optimizer: Any = self._cls(
            [
                {**options, "params": parameters}
                for options, parameters in zip(groups, self._parameters, strict=True)
            ],
            **self._kwargs,
        )
        if hasattr(optimizer, "train"):  # schedule-free optimizers
            optimizer.train()
        return optimizer

    def _parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        sizes = [math.prod(shape) for shape in self._shapes]
        parts = vector[self._first : self._first + sum(sizes)].split(sizes)
        return [part.view(shape).clone() for part, shape in zip(parts, self._shapes, strict=True)]

    def step(self, number: int) -> None:
        """Do a step with the gradients of this number."""
        for parameters in self._parameters:
            gradients = self._parts(_gradient(number))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        self._optimizer.step()

    def update(self) -> torch.Tensor:
        """Return what the steps have changed: (groups, elements)."""
        before = torch.cat([part.view(-1) for part in self._parts(_start())])
        after = [torch.cat([each.detach().view(-1) for each in own]) for own in self._parameters]
        return torch.stack(after) - before

    def is_equal(self, *parts: _SmallTraining | None) -> bool:
        """Return whether trainings of all parts of the elements have changed the same."""
        if None in parts:
            return False
        update = self.update()
        others = torch.cat([part.update() for part in parts if part is not None], dim=1)
        return bool((others - update).abs().max() <= _TOLERANCE * update.abs().max())

    def state_bytes(self) -> float:
        """Return the bytes of state if the parameters were in fp32."""
        tensors = [
            value
            for parameter in chain.from_iterable(self._parameters)
            for value in self._optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]
        return sum(each.nbytes / (2 if each.dtype == torch.float64 else 1) for each in tensors)

    def replace_optimizer(self) -> None:
        """Continue with a new optimizer, as after a switch.

        Raises:
            ValueError: state that is neither one value per element nor a scalar.
        """
        old = self._optimizer
        self._optimizer = new = self._build(copy.deepcopy(optimizer_recipes.group_options(old)))
        vars(new).update(copy.deepcopy(optimizer_recipes.extra_state(old)))
        for parameter in chain.from_iterable(self._parameters):
            for name, value in old.state[parameter].items():
                is_tensor = type(value) is torch.Tensor and name not in optimizer_recipes.SCALARS
                if is_tensor and value.shape == parameter.shape:
                    new.state[parameter][name] = value.clone()
                elif isinstance(value, (bool, int, float, torch.Tensor)):
                    optimizer_recipes.set_scalar(new, {}, parameter, name, float(value))
                elif value is not None:
                    raise ValueError(f"state {name!r} is a {type(value).__name__}")
