"""The units of a model: named by transformers, or chosen by size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from nbdist.errors import OptionError
from nbdist.planner.tracing import wrap_units
from nbdist.worker.engines import fsdp, wrap_policy

if TYPE_CHECKING:
    from collections.abc import Callable


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


class Language(Net):
    """A transformers language model: it names its blocks, its input embedding and its head."""

    _no_split_modules = ("Block",)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Patches(nn.Module):
    """As ViTEmbeddings: the input embedding and more parameters in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(48, 48)
        self.cls_token = nn.Parameter(torch.zeros(48))


class Vision(nn.Module):
    """As a ViT, which names what holds its input embedding among its blocks."""

    _no_split_modules = ("Patches", "Block")

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Patches()
        self.blocks = nn.ModuleList(Block(48) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.projection


class NoEnds(Named):
    """As a ResNet of transformers."""

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


def like_bert() -> Language:
    """A head's bias that also stands beside the head; embedding and head are tied."""
    model = Language()
    model.bias = model.head.bias = nn.Parameter(torch.zeros(500))
    return model


def like_t5(*, tied: bool) -> Language:
    """An embedding whose weight is also that of the encoder's own embedding."""
    model = Language()
    model.encoder = nn.Embedding(500, 48)
    model.encoder.weight = model.embedding.weight
    if not tied:
        model.head = nn.Linear(48, 500, bias=False)
    return model


def untied() -> Language:
    model = Language()
    model.head = nn.Linear(48, 500, bias=False)
    return model


CUTS = [
    (
        Language,
        {wrap_units.GET_EMBEDDING_METHOD, wrap_units.GET_HEAD_METHOD},
        ["root", *["block"] * 4, "tail"],
    ),
    (
        untied,
        {wrap_units.GET_EMBEDDING_METHOD, wrap_units.GET_HEAD_METHOD},
        ["root", "embedding", *["block"] * 4, "tail"],
    ),
    (like_bert, set(), ["root", *["block"] * 4]),
    (lambda: like_t5(tied=True), set(), ["root", *["block"] * 4]),
    (lambda: like_t5(tied=False), {wrap_units.GET_HEAD_METHOD}, ["root", *["block"] * 4, "tail"]),
    (Vision, {wrap_units.GET_EMBEDDING_METHOD}, ["root", "embedding", *["block"] * 2]),
    (NoEnds, set(), ["root", *["block"] * 4]),
]
"""A model, which of its ends are groups by themselves, and all its groups."""


@pytest.mark.parametrize(("build", "own", "roles"), CUTS)
def test_ends_are_groups_unless_the_rest_of_the_model_has_a_part_of_them(
    build: Callable[[], nn.Module], own: set[str], roles: list[str]
) -> None:
    model = build()
    assert wrap_units.separable_embedding_and_head(model).keys() == own
    found = wrap_units.find_fsdp_groups(model)
    assert [group.role for group in found] == roles
    assert wrap_units.has_tied_tail(model) == (
        wrap_units.has_tied_embeddings(model) and "tail" in roles
    )
    held = [parameter for group in found for parameter in group.own_params]
    assert set(held) == set(model.parameters())
    assert len(held) == len(set(held))


@pytest.mark.parametrize(("build", "own"), [cut[:2] for cut in CUTS])
def test_accelerate_sees_the_ends_that_are_groups_and_the_user_sees_all(
    build: Callable[[], nn.Module], own: set[str]
) -> None:
    model = build()
    before, attributes = wrap_units.embedding_and_head(model), set(vars(model))
    with fsdp.keep_tied_embeddings_in_root(model):
        assert wrap_units.embedding_and_head(model) == {name: before[name] for name in own}
        for name in {wrap_units.GET_EMBEDDING_METHOD, wrap_units.GET_HEAD_METHOD} - own:
            assert getattr(model, name)() is None
    assert wrap_units.embedding_and_head(model) == before
    assert set(vars(model)) == attributes


def test_a_method_that_the_model_itself_carries_comes_back_after_an_error() -> None:
    model = like_bert()
    mine = model.get_output_embeddings = lambda: model.head

    def fail() -> None:
        with fsdp.keep_tied_embeddings_in_root(model):
            raise ValueError(model.get_output_embeddings())

    with pytest.raises(ValueError, match="None"):
        fail()
    assert model.get_output_embeddings is mine


def test_a_block_around_the_input_embedding_is_not_a_unit() -> None:
    model = Vision()
    assert wrap_units.block_class_names(model) == {"Patches", "Block"}
    assert wrap_units.find_wrap_units(model) == list(model.blocks)


def test_an_end_is_a_unit_where_the_user_names_it_and_nothing_else_has_it() -> None:
    names = ["Embedding", "Block"]
    assert wrap_units.find_wrap_units(untied(), names=names)[0].weight.shape == (500, 48)
    model = like_t5(tied=False)
    assert model.embedding not in wrap_units.find_wrap_units(model, names=names)


def test_a_plain_model_is_cut_by_size_without_lists_and_shared_parameters() -> None:
    model = Net()
    chosen = wrap_units.find_wrap_units(model)
    assert chosen
    shared = model.embedding.weight
    for unit in chosen:
        assert not isinstance(unit, nn.ModuleList)
        assert all(parameter is not shared for parameter in unit.parameters())
    inside = [p for unit in chosen for p in unit.parameters()]
    assert len(inside) == len(set(inside)), "units do not overlap"


def test_the_equal_layers_of_a_plain_model_are_its_units() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128)
    encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    assert wrap_units.find_wrap_units(encoder) == list(encoder.layers)
    stacked = nn.ModuleDict({"body": nn.Sequential(*encoder.layers), "head": nn.Linear(64, 4)})
    assert wrap_units.find_wrap_units(stacked) == list(encoder.layers)


def test_names_can_be_given_and_must_exist() -> None:
    model = Net()
    assert wrap_units.find_wrap_units(model, names=["Block"]) == list(model.blocks)
    with pytest.raises(OptionError, match=r"has no module of class Layer\. It has Block"):
        wrap_units.find_wrap_units(model, names=["Layer"])


def test_checkpointed_units_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(2)))
    x = torch.randn(3, 64)
    model(x).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    chosen = wrap_units.find_wrap_units(model)
    assert wrap_units.add_activation_checkpointing(model, chosen)
    wrappers = wrap_policy.with_checkpoint_wrappers(model, chosen)
    assert not set(wrappers) & set(chosen)
    model(x).sum().backward()
    after = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
