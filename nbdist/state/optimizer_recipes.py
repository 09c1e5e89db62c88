"""Recipes to rebuild optimizers and their schedulers for the parameters of another engine."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from nbdist.errors import SwitchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

GroupOptions = dict[str, Any]
"""Options of one parameter group (learning rate and so on), without its parameters."""

_ENGINES_OWN = frozenset({"bias_correction", "param_names", "params"})
"""Keys of a parameter group that are not passed to the rebuilt optimizer."""
_KEPT_AS = {"adamw_mode": "adam_w_mode", "decoupled_weight_decay": "decoupled_wd"}
"""Arguments of DeepSpeed's CPU Adam and of lion_pytorch -> attributes that store them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecipe:
    """Class, arguments and parameter names of an optimizer."""

    optimizer_class: type[Optimizer]
    constructor_kwargs: Mapping[str, Any]
    """Constructor arguments, without the parameters."""
    param_group_names: tuple[tuple[str, ...], ...]
    """Parameter names of each group, in order."""
    rebuild_error: str = ""
    """Why the optimizer cannot be rebuilt; its state can be saved and loaded."""


def capture_recipe(optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerRecipe:
    """Capture the recipe of an optimizer.

    Args:
        names: id of a parameter -> its name in the bare model.

    Raises:
        SwitchError: a parameter has no name.
    """
    cls, kwargs = type(optimizer), constructor_kwargs(optimizer)
    missing = [
        argument.name
        for argument in _constructor_arguments(cls)
        if argument.name not in kwargs
        and argument.default is inspect.Parameter.empty
        and argument.kind not in {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    ]
    rebuild_error = (
        f"{cls.__name__} does not store its arguments {', '.join(missing)} in its defaults, so it"
        " cannot be rebuilt."
    )
    return OptimizerRecipe(
        optimizer_class=cls,
        constructor_kwargs=kwargs,
        param_group_names=get_param_group_names(optimizer, names),
        rebuild_error=rebuild_error if missing else "",
    )


def constructor_kwargs(optimizer: Optimizer) -> dict[str, Any]:
    """Return the constructor arguments that an optimizer stores, without the parameters."""
    stored = {**vars(optimizer), **optimizer.defaults}
    return {
        argument.name: stored[name]
        for argument in _constructor_arguments(type(optimizer))
        if (name := _KEPT_AS.get(argument.name, argument.name)) in stored
    }


def _constructor_arguments(cls: type[Optimizer]) -> list[inspect.Parameter]:
    _, _, *arguments = inspect.signature(cls.__init__).parameters.values()  # not self and params
    return arguments


def get_param_group_names(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[tuple[str, ...], ...]:
    """Return the current parameter names of each group.

    Raises:
        SwitchError: a parameter has no name.
    """
    param_groups = [group["params"] for group in optimizer.param_groups]
    if unknown := sum(
        id(parameter) not in names
        for group_parameters in param_groups
        for parameter in group_parameters
    ):
        raise SwitchError(
            f"{unknown} parameters of the {type(optimizer).__name__} belong to no prepared model."
            " Create it from model.parameters() of one model and prepare both."
        )
    return tuple(
        tuple(names[id(parameter)] for parameter in group_parameters)
        for group_parameters in param_groups
    )


def group_options(optimizer: Optimizer) -> list[GroupOptions]:
    """Return the current options of each group."""
    return [
        {key: value for key, value in group.items() if key not in _ENGINES_OWN}
        for group in optimizer.param_groups
    ]


def build_optimizer(
    recipe: OptimizerRecipe, parameters: Mapping[str, torch.Tensor], groups: Sequence[GroupOptions]
) -> Optimizer:
    """Build the optimizer of a recipe, without state.

    Raises:
        SwitchError: a constructor argument is not known.
    """
    if recipe.rebuild_error:
        raise SwitchError(recipe.rebuild_error)
    named = [
        {**group_options, "params": [parameters[name] for name in names]}
        for names, group_options in zip(recipe.param_group_names, groups, strict=True)
    ]
    made_again: Optimizer = recipe.optimizer_class(named, **recipe.constructor_kwargs)
    return made_again


def step_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """Return the step hooks of an optimizer: attribute -> hooks."""
    return {name: vars(optimizer)[name].copy() for name in _HOOKS if vars(optimizer)[name]}


def extra_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain attributes that the class of an optimizer has added to torch's."""
    if any(base.__module__.startswith("deepspeed") for base in type(optimizer).__mro__):
        return {}  # attributes of DeepSpeed's optimizers belong to one object
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _ATTRIBUTES_OF_TORCH and _is_plain(value)
    }


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_ATTRIBUTES_OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def nested_schedulers(scheduler: object) -> Iterator[Any]:
    """Yield a scheduler and its nested schedulers (ChainedScheduler, SequentialLR)."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from nested_schedulers(inner)


def rebind_scheduler(scheduler: object, renewed: Mapping[int, object]) -> None:
    """Point a scheduler to the replacement of its optimizer.

    Args:
        scheduler: torch scheduler without wrapper.
        renewed: id of an old optimizer -> the new one.
    """
    for inner in nested_schedulers(scheduler):
        after = renewed.get(id(getattr(inner, "optimizer", None)))
        if isinstance(after, Optimizer):
            inner.optimizer = after
            # Without it torch 2.13 warns that the scheduler was stepped too early.
            after._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
