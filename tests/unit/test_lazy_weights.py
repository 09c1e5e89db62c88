"""A lazy weight reads its file at the first use, and is an ordinary parameter from then on."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from nbdist.worker.engines.sharded_load import LazyWeight, _WithoutCopies

if TYPE_CHECKING:
    from collections.abc import Callable

STORED = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)


@pytest.fixture
def layer() -> nn.Linear:
    """A layer whose weight is cast from bf16 when it is read."""
    layer = nn.Linear(3, 2, bias=False)
    weight = LazyWeight.of_file(STORED, torch.float32, "model.safetensors 100")
    weight.make_parameter()
    layer.weight = weight
    return layer


def is_lazy(layer: nn.Linear) -> bool:
    return isinstance(layer.weight, LazyWeight)


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer(torch.ones(1, 3)),
        lambda layer: layer.weight.sum(),
        lambda layer: layer.weight.data,
        lambda layer: layer.weight.detach(),
        lambda layer: layer.weight.numpy(force=True),
        lambda layer: layer.weight.data_ptr(),
        lambda layer: layer.state_dict(),
        lambda layer: layer.to(torch.float64).to(torch.float32),
        lambda layer: torch._foreach_add([layer.weight], 0),
        copy.deepcopy,
        lambda layer: pickle.dumps(layer.weight),
        lambda layer: repr(layer.weight),
    ],
)
def test_any_use_reads_the_values(layer: nn.Linear, use: Callable[[nn.Linear], object]) -> None:
    weight = layer.weight
    use(layer)
    assert layer.weight is weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight.detach(), STORED.float())


def test_a_copy_is_an_ordinary_parameter(layer: nn.Linear) -> None:
    for copied in (copy.deepcopy(layer).weight, pickle.loads(pickle.dumps(layer.weight))):  # noqa: S301
        assert type(copied) is nn.Parameter
        assert torch.equal(copied.detach(), STORED.float())


def test_questions_about_the_shape_read_nothing(layer: nn.Linear) -> None:
    weight = layer.weight
    torch.optim.AdamW(layer.parameters(), fused=False)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((2, 3), torch.float32, "cpu")
    assert sum(p.numel() for p in layer.parameters() if p.requires_grad) == 6
    weight.requires_grad_(requires_grad=False)
    layer.eval().zero_grad()
    assert {weight: 1}[weight] == 1
    assert is_lazy(layer)


def test_an_edit_changes_the_parameter_and_not_the_file(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer.weight.detach(), 2 * STORED.float())
    assert STORED[0, 1] == 1


def test_a_tensor_in_memory_that_a_weight_had_is_copied() -> None:
    numel = 1 << 22  # so large that the next allocation gets the same address
    weight = nn.Parameter(torch.empty(numel))
    with _WithoutCopies([weight]):
        weight.data = torch.empty(0)  # as when an engine moves it to a GPU
        buffer, target = torch.ones(numel), torch.zeros(numel)
        target.copy_(buffer)
    assert target.sum() == numel
