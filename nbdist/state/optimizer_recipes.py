"""How an optimizer and its schedulers are made again for the parameters of another engine."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from nbdist.errors import SwitchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

Options = dict[str, Any]
"""Of one parameter group: learning rate and so on, all but its parameters."""

ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "DeepSpeedCPUAdagrad",
        "DeepSpeedCPUAdam",
        "DeepSpeedCPULion",
        "FusedAdam",
        "FusedLion",
        "Lion",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Optimizers that treat each element by itself, so that any cut of a parameter will do."""

_ENGINES_OWN = frozenset({"bias_correction", "param_names", "params"})
"""Keys of a group that a later optimizer must not get."""
_KEPT_AS = {"adamw_mode": "adam_w_mode", "decoupled_weight_decay": "decoupled_wd"}
"""Arguments of DeepSpeed's CPU Adam and of lion_pytorch -> the attributes they end in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An optimizer by its class and the names of its parameters."""

    cls: type[Optimizer]
    arguments: Mapping[str, Any]
    """Of its constructor, besides the parameters."""
    groups: tuple[tuple[str, ...], ...]
    """Names of each group's parameters, in order."""


def recipe(optimizer: Optimizer, names: Mapping[int, str]) -> Recipe:
    """Take down how an optimizer was made.

    Args:
        optimizer: torch's own, no wrapper.
        names: id of a parameter -> its name in the bare model.

    Raises:
        SwitchError: a parameter without a name, or a constructor that wants what it keeps to
            itself.
    """
    cls = type(optimizer)
    held = groups(optimizer, names)
    _, _, *wanted = inspect.signature(cls.__init__).parameters.values()  # no self, no params
    kept = {**vars(optimizer), **optimizer.defaults}
    arguments = {
        one.name: kept[name] for one in wanted if (name := _KEPT_AS.get(one.name, one.name)) in kept
    }
    missing = [
        one.name
        for one in wanted
        if one.name not in arguments
        and one.default is inspect.Parameter.empty
        and one.kind not in {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    ]
    if missing:
        message = (
            f"{cls.__name__} does not keep its arguments {', '.join(missing)} among its defaults,"
            " so it cannot be made again."
        )
        raise SwitchError(message)
    return Recipe(cls=cls, arguments=arguments, groups=held)


def groups(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[tuple[str, ...], ...]:
    """Names of each group's parameters, as they are now.

    Raises:
        SwitchError: a parameter without a name.
    """
    held = [group["params"] for group in optimizer.param_groups]
    if unknown := sum(id(one) not in names for some in held for one in some):
        message = (
            f"{unknown} parameters of the {type(optimizer).__name__} are of no prepared model;"
            " build it from model.parameters() of one model and prepare both."
        )
        raise SwitchError(message)
    return tuple(tuple(names[id(one)] for one in some) for some in held)


def refusal(cls: type) -> str:
    """Why an optimizer's state cannot be cut and put together otherwise; empty where it can."""
    known = {base.__name__ for base in cls.__mro__ if base.__module__.split(".")[0] in _LIBRARIES}
    if known & ELEMENTWISE and not known & _NOT_ELEMENTWISE:
        return ""
    return (
        f"{cls.__name__} is not known to treat each element of a parameter by itself, so its state"
        " means nothing in another engine's cut"
    )


def cannot_step(cls: type, backend: str) -> str:
    """Why an optimizer cannot train under an engine, whatever state it begins with; or nothing.

    torch 2.13: Muon takes matrices, and ZeRO and FSDP1 step pieces of flattened parameters;
    Adafactor's norms of rows and columns fail on FSDP2's DTensors.
    """
    for name, backends in _NO_STEP.items():
        if backend in backends and any(base.__name__ == name for base in cls.__mro__):
            return f"{cls.__name__} cannot step what {backend} cuts; use ddp"
    return ""


_NO_STEP = {
    "Muon": frozenset({"fsdp1", "zero1", "zero2", "zero3"}),
    "Adafactor": frozenset({"fsdp2"}),
}
_LIBRARIES = frozenset({"torch", "deepspeed", "transformers", "lion_pytorch"})
_NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon", "Shampoo", "SparseAdam"})


def options(optimizer: Optimizer) -> list[Options]:
    """Options of each group as they are now."""
    return [
        {key: value for key, value in group.items() if key not in _ENGINES_OWN}
        for group in optimizer.param_groups
    ]


def made(
    kept: Recipe, parameters: Mapping[str, torch.Tensor], groups: Sequence[Options]
) -> Optimizer:
    """Make the optimizer again, without state.

    Args:
        kept: how.
        parameters: of the model by name.
        groups: options of each group.
    """
    named = [
        {**given, "params": [parameters[name] for name in names]}
        for names, given in zip(kept.groups, groups, strict=True)
    ]
    made_again: Optimizer = kept.cls(named, **kept.arguments)
    return made_again


def hooks(optimizer: Optimizer) -> dict[str, Any]:
    """What is called around each step: attribute -> hooks."""
    return {name: vars(optimizer)[name].copy() for name in _HOOKS if vars(optimizer)[name]}


def own_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Plain attributes of an optimizer whose class is the user's."""
    cls = type(optimizer)
    if cls.__module__.split(".")[0] in _LIBRARIES or any(
        base.__module__.startswith("deepspeed") for base in cls.__mro__
    ):
        return {}  # DeepSpeed's have numbers that belong to one object
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name not in _OPTIMIZERS_OWN and _is_plain(value)
    }


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OPTIMIZERS_OWN = frozenset({"defaults", "param_groups", "state"})


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def schedules(scheduler: object) -> Iterator[Any]:
    """A scheduler and those that it is made of (ChainedScheduler, SequentialLR)."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from schedules(inner)


def repoint(scheduler: object, renewed: Mapping[int, object]) -> None:
    """Let a scheduler go on with the optimizer that took the place of its own.

    Args:
        scheduler: torch's own, no wrapper.
        renewed: id of an old optimizer -> the new one.
    """
    for one in schedules(scheduler):
        after = renewed.get(id(getattr(one, "optimizer", None)))
        if isinstance(after, Optimizer):
            one.optimizer = after
            # torch 2.13 would warn that the first step of the schedule came too early.
            after._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
