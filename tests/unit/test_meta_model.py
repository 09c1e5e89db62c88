"""A model without its data, and made again."""

from __future__ import annotations

import copy
import gc
import threading
import types
import weakref

import torch
from torch import nn
from torch.nn.utils import prune

from nbdist.state import meta_model


def test_a_twin_has_no_data_and_keeps_what_is_shared_and_frozen() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad = False
    twin = meta_model.try_meta_copy(model)
    assert twin is not None
    assert all(one.is_meta for one in (*twin.parameters(), *twin.buffers()))
    assert twin[2].weight is twin[0].weight
    assert not twin[1].weight.requires_grad
    assert not any(one.is_meta for one in model.parameters())


def test_the_scales_of_quantized_weights_are_shared() -> None:
    four, eight = nn.Linear(2, 2), nn.Linear(2, 2)
    four.quant_state = types.SimpleNamespace(absmax=torch.ones(2))  # as in bitsandbytes 0.50
    eight.weight.SCB = eight.weight.data
    twin = meta_model.meta_copy(nn.ModuleList([four, eight]))
    assert twin[0].weight.is_meta
    assert twin[0].quant_state is four.quant_state
    assert twin[1].weight.data_ptr() == eight.weight.data_ptr()
    assert twin[1].weight.SCB is eight.weight.SCB


def test_a_module_that_cannot_be_copied_has_no_twin() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    assert meta_model.try_meta_copy(model) is None


def test_a_patched_forward_of_the_copy_calls_the_copy() -> None:
    def patch(model: nn.Linear) -> None:
        original = model.forward

        def doubled(_: nn.Linear, x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
            return original(x) * times

        model.forward = types.MethodType(doubled, model)  # type: ignore[method-assign]

    model = nn.Linear(2, 2)
    patch(model)
    rebuilt = meta_model.materialize(meta_model.capture_meta_model(model))
    rebuilt.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    assert rebuilt(torch.ones(2)).tolist() == [4, 4]
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


class Block(nn.Module):
    """With a function of its modules, as in minGPT, a hook, and a statistic that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"linear": nn.Linear(2, 2)})
        layers = self.layers
        self.mlp = lambda x: 2 * layers.linear(x)
        self.register_forward_hook(lambda *_: setattr(self, "calls", self.calls + 1))
        self.calls = 0
        self.mean = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.detach().mean(0)
        return self.mlp(x)


def test_functions_and_hooks_of_the_copy_use_the_copy() -> None:
    model = Block()
    rebuilt = meta_model.materialize(meta_model.capture_meta_model(model))
    rebuilt.layers.linear.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    assert rebuilt(torch.ones(1, 2)).tolist() == [[4, 4]]
    assert (rebuilt.calls, model.calls) == (1, 0)


def test_plain_tensors_and_counters_are_carried_but_no_functions() -> None:
    model = Block()
    captured = meta_model.capture_meta_model(model)
    model(torch.ones(1, 2))
    rebuilt = meta_model.materialize(captured)
    meta_model.restore_attributes(rebuilt, meta_model.module_attributes(model, captured))
    assert (rebuilt.calls, rebuilt.mean.tolist()) == (1, [1, 1])
    assert rebuilt.mlp.__closure__[0].cell_contents is rebuilt.layers
    assert meta_model.modules_with_new_hooks(model, captured) == []
    model.layers.linear.register_forward_hook(copy.copy)
    assert meta_model.modules_with_new_hooks(model, captured) == ["layers.linear"]


def test_a_pruned_model_is_rebuilt() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    rebuilt = meta_model.materialize(meta_model.capture_meta_model(model))
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(rebuilt(torch.ones(1, 4)), model(torch.ones(1, 4)))
