"""The units of a model: named by transformers, or chosen by size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbdist.errors import OptionError
from nbdist.rank import wrap
from nbdist.trace import units


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Four blocks in a list and a head tied to the embedding."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 500, bias=False)
        self.head.weight = self.embedding.weight


class Named(Net):
    _no_split_modules = ("Block", "Absent")


class Outer(nn.Module):
    """A wrapper, as peft puts around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Named()


def test_blocks_are_those_the_model_names_and_has() -> None:
    assert units.block_names(Outer()) == {"Block"}
    model = Outer()
    assert units.units(model) == list(model.base.blocks)


def test_a_plain_model_is_cut_by_size_without_lists_and_shared_parameters() -> None:
    model = Net()
    chosen = units.units(model)
    assert chosen
    shared = model.embedding.weight
    for unit in chosen:
        assert not isinstance(unit, nn.ModuleList)
        assert all(parameter is not shared for parameter in unit.parameters())
    inside = [p for unit in chosen for p in unit.parameters()]
    assert len(inside) == len(set(inside)), "units do not overlap"


def test_names_can_be_given_and_must_exist() -> None:
    model = Net()
    assert units.units(model, names=["Block"]) == list(model.blocks)
    with pytest.raises(OptionError, match="has no module of class Layer; it has Block"):
        units.units(model, names=["Layer"])


def test_a_small_model_is_one_unit() -> None:
    assert units.units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []


def test_checkpointed_units_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(2)))
    x = torch.randn(3, 64)
    model(x).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    chosen = units.units(model)
    assert wrap.checkpoint_activations(model, chosen)
    wrappers = wrap.with_checkpoint_wrappers(model, chosen)
    assert not set(wrappers) & set(chosen)
    model(x).sum().backward()
    after = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
