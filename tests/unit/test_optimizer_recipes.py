"""Recipes: an optimizer is made again with all that its constructor was told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lion_pytorch
import pytest
import schedulefree
import torch

from nbdist.errors import SwitchError
from nbdist.planner.optimizers import optimizer_from_torch, refusal_of_class
from nbdist.state import optimizer_recipes
from nbdist.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch.optim import Optimizer


def again(optimizer: Optimizer, parameter: torch.nn.Parameter) -> Any:
    """The optimizer made again for the same parameter."""
    kept = optimizer_recipes.capture_recipe(optimizer, {id(parameter): "weight"})
    return optimizer_recipes.build_optimizer(
        kept, {"weight": parameter}, optimizer_recipes.group_options(optimizer)
    )


@pytest.fixture
def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(3))


def test_an_argument_that_is_not_a_group_default_is_kept(parameter: torch.nn.Parameter) -> None:
    lion = lion_pytorch.Lion([parameter], lr=0.5, weight_decay=0.1, decoupled_weight_decay=True)
    made = again(lion, parameter)
    assert made.decoupled_wd is True
    assert made.param_groups[0]["weight_decay"] == 0.1


def test_group_options_of_now_win_over_those_of_the_begin(parameter: torch.nn.Parameter) -> None:
    adam = torch.optim.AdamW([parameter], lr=0.5, betas=(0.8, 0.9))
    adam.param_groups[0]["lr"] = 0.25
    made = again(adam, parameter)
    assert made.param_groups[0]["lr"] == 0.25
    assert made.defaults["lr"] == 0.5
    assert made.param_groups[0]["betas"] == (0.8, 0.9)


def test_an_optimizer_of_whole_gradients_is_refused_by_backends_that_cut_them() -> None:
    class Mine(torch.optim.LBFGS):
        pass

    assert not refusal_of_class(Mine, "ddp")
    for backend in ("fsdp1", "fsdp2", "zero1", "zero3"):
        why = refusal_of_class(Mine, backend)
        assert (
            why
            == f"Mine cannot step parameters that {backend} shards. Use ddp or another optimizer."
        )


@pytest.mark.parametrize("name", ["AdamW", "RAdam", "SGD"])
def test_the_state_of_schedule_free_optimizers_is_planned(name: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = getattr(schedulefree, f"{name}ScheduleFree")([weight], lr=0.1)
    optimizer.train()
    weight.grad = torch.ones(100)
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[weight].values())
    described = {"class": type(optimizer).__name__, **optimizer.defaults}
    assert optimizer_from_torch(described).state_bytes(100) == kept


def test_lamb_is_refused_where_parameters_are_flattened() -> None:
    class Lamb(torch.optim.Optimizer):
        pass

    refused = [backend for backend in STRATEGIES if refusal_of_class(Lamb, backend)]
    assert refused == ["fsdp1", "zero1", "zero2", "zero3"]


class Odd(torch.optim.SGD):
    """Calls its parameters otherwise, and wants what it keeps under its own name."""

    def __init__(self, weights: Any, lr: float, *, warmup: int) -> None:
        super().__init__(weights, lr=lr)
        self.warmup = warmup


def test_parameters_may_have_another_name(parameter: torch.nn.Parameter) -> None:
    made = again(Odd([parameter], 0.1, warmup=7), parameter)
    assert made.warmup == 7


class Secretive(torch.optim.SGD):
    """Wants what it does not keep."""

    def __init__(self, params: Any, secret: float) -> None:
        super().__init__(params, lr=secret)


def test_what_is_not_kept_is_named_when_it_is_needed(parameter: torch.nn.Parameter) -> None:
    recipe = optimizer_recipes.capture_recipe(Secretive([parameter], 0.1), {id(parameter): "w"})
    assert recipe.param_group_names == (("w",),)
    with pytest.raises(SwitchError, match="does not store its arguments secret"):
        again(Secretive([parameter], 0.1), parameter)
