"""What a manifest says of a model's training besides tensors, and its way back; runs on a rank.

Plain values only: what is something else stays with the object that has it, and is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbdist.checkpoint import Group, Optimizer, json_validation
from nbdist.checkpoint.names import shown
from nbdist.errors import CheckpointError
from nbdist.state import optimizer_recipes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.worker.training.model_state import Counts
    from nbdist.worker.training.prepared_models import Trained, TrainedOptimizer

_STARTS_AT_ONE = frozenset({"mu", "mu_product"})
"""Scalar state that is 1 before the first step; all other is 0."""
_LEFT_OUT = object()


def class_name(value: object) -> str:
    """Name of a value's class: "torch.optim.adamw.AdamW"."""
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


# -- optimizers


def optimizers(prefix: str, one: Trained, counts: Counts, left_out: list[str]) -> list[Optimizer]:
    """A model's optimizers, without tensors.

    Args:
        prefix: of their keys.
        one: the model.
        counts: scalar state of its parameters.
        left_out: takes the names of options that are no plain values.
    """
    found = []
    for owned in one.living:
        cls = owned.recipe.cls
        names = [name for group in owned.recipe.groups for name in group]
        found.append(
            Optimizer(
                prefix=prefix,
                kind=class_name(cls),
                defaults=plain(owned.recipe.arguments, cls.__name__, []),
                groups=tuple(
                    Group(options=plain(options, cls.__name__, left_out), names=group)
                    for options, group in zip(
                        optimizer_recipes.options(owned.raw), owned.recipe.groups, strict=True
                    )
                ),
                counts={name: counts[name] for name in names if name in counts},
            )
        )
    return found


def check_optimizers(saved: Sequence[Optimizer], one: Trained) -> None:
    """Refuse optimizers whose state cannot be that of the saved ones.

    Raises:
        CheckpointError: other classes, or other groups of parameters.
    """
    then = [each.kind for each in saved]
    now = [class_name(owned.recipe.cls) for owned in one.living]
    if then != now:
        raise CheckpointError(
            f"the checkpoint has the state of {_kinds(then)}, and {_kinds(now)} is prepared;"
            " prepare the same, or load with --weights-only (weights_only=True)."
        )
    for kept, owned in zip(saved, one.living, strict=True):
        group_options(kept, owned)


def group_options(saved: Optimizer, owned: TrainedOptimizer) -> list[dict[str, Any]]:
    """Options of each group of an optimizer, found by the names of its parameters.

    Raises:
        CheckpointError: a parameter has no saved options, or those of one group differ.
    """
    of = {name: group.options for group in saved.groups for name in group.names}
    found = []
    for number, names in enumerate(owned.recipe.groups):
        unknown = [name for name in names if name not in of]
        if unknown:
            raise CheckpointError(
                f"{shown(unknown[0])} is in group {number} of the {owned.recipe.cls.__name__}, and"
                " in no group of the checkpoint; make the groups as they were, or load with"
                " --weights-only (weights_only=True)."
            )
        options = [dict(of[name]) for name in names]
        if any(one != options[0] for one in options):
            raise CheckpointError(
                f"the parameters of group {number} of the {owned.recipe.cls.__name__} had different"
                " options when they were saved; make the groups as they were, or load with"
                " --weights-only (weights_only=True)."
            )
        found.append(options[0] if options else {})
    return found


def set_options(owned: TrainedOptimizer, given: Sequence[Mapping[str, Any]]) -> None:
    """Set options of an optimizer's groups, in the types that they have now."""
    for group, options in zip(owned.raw.param_groups, given, strict=True):
        for name, value in options.items():
            before = group.get(name)
            if name == "params":
                continue
            if isinstance(before, torch.Tensor):
                before.fill_(value)
            else:
                group[name] = _merged(before, value)


def first_counts(names: Mapping[str, Mapping[str, float]]) -> Counts:
    """Scalar state as it is before the first step."""
    return {
        name: {which: float(which in _STARTS_AT_ONE) for which in scalars}
        for name, scalars in names.items()
    }


def _kinds(names: Sequence[str], none: str = "no optimizer") -> str:
    return " and ".join(shown(name.rpartition(".")[2])[1:-1] for name in names) or none


# -- schedulers


def schedulers(one: Trained, left_out: list[str]) -> list[dict[str, Any]]:
    """State of a model's schedulers.

    Args:
        one: the model.
        left_out: takes the names of what is no plain value, such as functions.
    """
    return [
        {
            "kind": class_name(wrapper.scheduler),
            "state": plain(
                wrapper.scheduler.state_dict(), type(wrapper.scheduler).__name__, left_out
            ),
        }
        for wrapper in one.schedules
    ]


def check_schedulers(saved: Sequence[Any], one: Trained) -> None:
    """Refuse schedulers of other classes.

    Raises:
        CheckpointError: they are.
    """
    good = all(
        isinstance(kept, dict)
        and isinstance(kept.get("kind"), str)
        and isinstance(kept.get("state"), dict)
        for kept in saved
    )
    then = [kept["kind"] for kept in saved] if good else ["?"]
    now = [class_name(wrapper.scheduler) for wrapper in one.schedules]
    if then != now:
        before, after = (_kinds(names, "no scheduler") for names in (then, now))
        raise CheckpointError(
            f"the checkpoint has the state of {before}, and {after} is prepared; prepare the same,"
            " or load with --weights-only (weights_only=True)."
        )


def set_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Set a scheduler's state; what was not saved stays as it is."""
    scheduler.load_state_dict(_merged(scheduler.state_dict(), state))


# -- plain values


def plain(value: Mapping[str, Any], where: str, left_out: list[str]) -> dict[str, Any]:
    """What of a mapping a manifest can keep.

    Args:
        value: any values by name.
        where: whose they are, for `left_out`.
        left_out: takes the names of all others.
    """
    found = _plain(value, where, left_out)
    return found if isinstance(found, dict) else {}


def _plain(value: Any, where: str, left_out: list[str]) -> Any:
    """One value, or `_LEFT_OUT`."""
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    if one or isinstance(value, np.generic):
        value = value.item()
    elif type(value) is not bool and isinstance(value, (float, int)):
        value = float(value) if isinstance(value, float) else int(value)
    if isinstance(value, dict) and all(type(name) is str for name in value):
        inner = {name: _plain(one, f"{where}.{name}", left_out) for name, one in value.items()}
        return {name: one for name, one in inner.items() if one is not _LEFT_OUT}
    if isinstance(value, (list, tuple)):
        items = [_plain(one, where, left_out) for one in value]
        return items if all(one is not _LEFT_OUT for one in items) else _LEFT_OUT
    try:
        json_validation.to_plain(value, where)
    except json_validation.Refused:
        left_out.append(where)
        return _LEFT_OUT
    return value


def _merged(own: Any, saved: Any) -> Any:
    """A saved value in the types of the present one; what was not saved stays."""
    if isinstance(own, dict) and isinstance(saved, dict):
        return {**own, **{name: _merged(own.get(name), one) for name, one in saved.items()}}
    if isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)):
        same = len(own) == len(saved)
        items = [_merged(own[at] if same else None, one) for at, one in enumerate(saved)]
        return tuple(items) if isinstance(own, tuple) else items
    return saved
