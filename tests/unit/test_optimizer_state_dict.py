"""Optimizer state becomes plain values and tensors, and the same state again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nbdist.errors import CheckpointError
from nbdist.state import optimizer_state_dict


class Other(torch.optim.Optimizer):
    """Holds what it is given, once for each parameter."""

    def __init__(self, parameters: Any, held: Any = None, **options: Any) -> None:
        super().__init__(parameters, options)
        for group in self.param_groups if held is not None else ():
            self.state.update({parameter: {"held": held} for parameter in group["params"]})


def again(optimizer: torch.optim.Optimizer, fresh: torch.optim.Optimizer) -> None:
    """Load the state of an optimizer into another, by way of JSON."""
    tree, tensors = optimizer_state_dict.flatten(optimizer)
    assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
    saved = optimizer_state_dict.unflatten(json.loads(json.dumps(tree)), tensors, fresh)
    optimizer_state_dict.load(fresh, saved)


def parameter() -> torch.nn.Parameter:
    """A parameter in bfloat16, to which torch casts state when it loads it."""
    return torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))


def test_nested_values_and_dtypes_are_kept() -> None:
    wide = torch.full((3,), 1 / 3, dtype=torch.float64)
    held = {"list": [1, (2.5, None)], 7: torch.float16, "nested": [torch.arange(4)]}
    old, new = parameter(), parameter()
    optimizer = Other([old], held, lr=torch.tensor(0.1), k=3, rule=min)
    optimizer.state[old]["wide"] = wide
    fresh = Other([new], lr=torch.tensor(0.5), k=0, rule=max)
    again(optimizer, fresh)
    assert torch.equal(fresh.state[new]["wide"], wide)
    assert fresh.state[new]["held"]["list"] == [1, (2.5, None)]
    assert fresh.state[new]["held"][7] is torch.float16
    assert fresh.param_groups[0]["k"] == 3
    assert fresh.param_groups[0]["lr"] == torch.tensor(0.1)
    assert fresh.param_groups[0]["rule"] is max  # a function stays that of the prepared optimizer


def test_quantized_state_is_torn_down_to_its_tensors() -> None:
    torchao = pytest.importorskip("torchao.optim.subclass_8bit")
    old, new = parameter(), parameter()
    quantized = torchao.OptimState8bit.zeros((64, 64))
    quantized.copy_(torch.randn(64, 64))
    fresh = Other([new])
    again(Other([old], quantized), fresh)
    assert type(fresh.state[new]["held"]) is torchao.OptimState8bit
    assert torch.equal(fresh.state[new]["held"].codes, quantized.codes)
    assert torch.equal(fresh.state[new]["held"].dequantize(), quantized.dequantize())


@pytest.mark.parametrize("damage", ["class", "shapes", "rest"])
def test_state_of_something_else_is_refused(damage: str) -> None:
    tree, tensors = optimizer_state_dict.flatten(Other([parameter()], torch.ones(3)))
    value = {"class": {"class": "os.system", "inner": {}, "context": 1, "shape": [], "stride": []}}
    tree[damage if damage != "class" else "rest"] = value.get(damage)
    with pytest.raises(CheckpointError, match="does not match the prepared optimizer"):
        optimizer_state_dict.unflatten(tree, tensors, Other([parameter()]))
