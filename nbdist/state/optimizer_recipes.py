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

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Scalar state of torch 2.13's optimizers: one number per parameter, even if its shape is ()."""
_ENGINES_OWN = frozenset({"bias_correction", "param_names", "params"})
"""Keys of a parameter group that are not passed to the rebuilt optimizer."""
_KERNEL_CHOICES = frozenset({"foreach", "fused", "use_triton"})
"""Arguments that change no result; lion_pytorch 0.2.4 does not store the last one."""
_ATTRIBUTE_NAMES = {"adamw_mode": "adam_w_mode", "decoupled_weight_decay": "decoupled_wd"}
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
        if argument.name not in _KERNEL_CHOICES | kwargs.keys()
        and f"_{argument.name}" not in vars(optimizer)  # copied by `extra_state`
        # deepspeed 0.19's FusedAdam supports only the default of `amsgrad`, and does not store it
        and not (cls.__module__.startswith("deepspeed.") and argument.default is not argument.empty)
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
    stored = {**vars(optimizer), **getattr(optimizer, "defaults", {})}
    return {
        argument.name: stored[name]
        for argument in _constructor_arguments(type(optimizer))
        if (name := argument.name) in stored or (name := _ATTRIBUTE_NAMES.get(name, name)) in stored
    }


def _constructor_arguments(cls: type[Optimizer]) -> list[inspect.Parameter]:
    _, _, *arguments = inspect.signature(cls.__init__).parameters.values()  # not self and params
    variadic = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    return [argument for argument in arguments if argument.kind not in variadic]


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
            f"{unknown} parameters of the {type(optimizer).__name__} belong to no prepared model,"
            " so their gradients are not averaged between ranks. Make them parameters of the model,"
            " create the optimizer from model.parameters(), and prepare both."
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


def set_scalar(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    stepped: torch.Tensor,
    name: str,
    value: float,
) -> None:
    """Set scalar state in the form that the optimizer uses: a tensor or a number."""
    state = optimizer.state[stepped]
    current = state.get(name)
    if isinstance(current, torch.Tensor):
        current.fill_(value)
    elif current is not None:
        state[name] = type(current)(value)
    elif any(
        base.__module__.startswith("torch.optim.") and base is not Optimizer
        for base in type(optimizer).__mro__
    ):
        # torch's optimizers and their subclasses store scalars as tensors.
        # As torch 2.13: optimizer.py, _get_scalar_dtype, and where each optimizer creates "step".
        on_device = group.get("fused") or group.get("capturable")
        wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        state[name] = torch.tensor(
            float(value),
            dtype=torch.float64 if wide else torch.float32,
            device=stepped.device if on_device else "cpu",
        )
    else:
        state[name] = int(value) if float(value).is_integer() else value


def why_not_rebuildable(optimizer: Optimizer, recipe: OptimizerRecipe) -> str:
    """Return why a new optimizer cannot be created with the options of this one; empty if it can.

    Args:
        optimizer: its current options; the engine may have another class.
    """
    if recipe.rebuild_error:
        return recipe.rebuild_error
    small = {name: torch.zeros(1, 1) for group in recipe.param_group_names for name in group}
    try:
        build_optimizer(recipe, small, group_options(optimizer))
    except Exception as error:  # noqa: BLE001 - the code of any library
        name = recipe.optimizer_class.__name__
        return f"{name} cannot be created again: {type(error).__name__}: {error}"
    return ""


def tensor_attributes(optimizer: Optimizer) -> list[str]:
    """Return the attributes with tensors that the class of an optimizer has added to torch's."""
    return [
        name
        for name, value in vars(optimizer).items()
        if name not in _ATTRIBUTES_OF_TORCH and _holds_tensors(value)
    ]


def _holds_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


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
