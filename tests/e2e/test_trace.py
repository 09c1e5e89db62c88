"""Traces of real modules: what the tracer sees is what a real step holds."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from nbdist.errors import PlanError
from nbdist.planner.model_spec import Workload, end_blocks, num_params, schedule_micro_batch
from nbdist.planner.models import traced
from nbdist.planner.tracing import trace_module as modules
from nbdist.planner.tracing import wrap_units as module_groups
from nbdist.planner.tracing.memory_tracker import MemoryTracker


class Net(nn.Module):
    """Twelve equal blocks, large enough to be units, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(7))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    """A norm and two linear layers around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def silent(_: str) -> None:
    """Say nothing."""


def really_held(module: nn.Module, x: torch.Tensor) -> int:
    """Peak bytes of a real forward and backward."""
    footprint = MemoryTracker()
    footprint.track_tensors("parameters", [*module.parameters(), x])
    with footprint:
        module(x).mean().backward()
    return footprint.peak


def predicted(model: traced.TracedModel, batch_size: int) -> int:
    """Peak bytes of the same, by the trace."""
    run = model.micro_batch_activations(Workload(batch_size=batch_size, compute="full", kind="cpu"))
    made = [0] * len(model.groups)
    total = 0
    schedule = schedule_micro_batch(model, run, end_blocks(model.groups))
    for step, activations, logits in zip(*schedule, strict=True):
        if step.phase != "backward":
            total = max(total, activations)
            continue
        own = model.groups[step.group_index]
        later = sum(g.count * g.trainable for g in model.groups[step.group_index + 1 :])
        made[step.group_index] = (
            later + (own.count - 1 - step.block_index) * own.trainable + step.num_grads
        )
        total = max(total, activations + logits + 4 * made[step.group_index])
    return total + 4 * num_params(model)


@pytest.mark.parametrize("batch_size", [3, 24])
def test_a_trace_holds_what_a_real_step_holds(batch_size: int) -> None:
    module = Net()
    model = traced.spec_from_module(
        module,
        batch_size=3,
        seq_len=None,
        inputs=torch.zeros(3, 128),
        progress=silent,
        kinds=["cpu"],
    )
    got = really_held(module, torch.zeros(batch_size, 128))
    assert predicted(model, batch_size) == pytest.approx(got, rel=0.002)


def test_tracing_leaves_the_module_and_its_random_state_alone() -> None:
    module = Net()
    before = {name: one.data_ptr() for name, one in module.named_parameters()}
    loader = iter(torch.utils.data.DataLoader([torch.zeros(128)] * 8, batch_size=2, shuffle=True))
    state = torch.random.get_rng_state()
    modules.trace_in_child(module, batch_size=2, batches=loader, kinds=["cpu"])
    assert {name: one.data_ptr() for name, one in module.named_parameters()} == before
    assert len(module.blocks) == 7
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(list(loader)) == 4


def test_a_known_transformers_model_has_its_closed_form() -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=99,
    )
    model = transformers.LlamaForCausalLM(config)
    asked = {"batch_size": 1, "seq_len": 16, "progress": silent}
    assert traced.spec_from_module(model, **asked).depth == "closed form"
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(requires_grad=False)
    half_frozen = traced.spec_from_module(model, kinds=["cpu"], **asked)
    assert half_frozen.depth == "traced"
    assert sum(g.count * g.frozen for g in half_frozen.groups) > 0


class ByValue(nn.Linear):
    """A module whose shapes depend on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y[: int(y.sum())]


class BySelection(nn.Linear):
    """A module that selects by values, after a check of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.isnan().any():
            raise ValueError("NaN")
        return y[y > 0] + y.masked_select(y > 0) + y.flatten()[(y > 0).nonzero().sum(1)]


def test_conditions_on_values_are_false_and_selections_whole() -> None:
    found = modules.trace_in_child(BySelection(4, 4), batch_size=2, inputs=torch.zeros(2, 4))
    assert found["notes"][0].startswith("The model reads values of tensors")
    assert found["passes"]["cpu full"]["groups"][0]["saved"][0] > 0


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (ByValue(4, 4), torch.zeros(2, 4), "depend on tensor values"),
        (nn.Linear(4, 4), None, "with example inputs"),
        (nn.Linear(4, 4), torch.zeros(2, 5), "RuntimeError"),
        (nn.Linear(4, 4).requires_grad_(False), torch.zeros(2, 4), "no trainable parameter"),  # noqa: FBT003
    ],
)
def test_what_cannot_be_traced_is_said(module: nn.Module, inputs: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        modules.trace_in_child(module, batch_size=2, inputs=inputs)


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("BBBBBBBB", [0, 1, 1, 1, 1, 1, 1, 7]),
        ("ABBBBB", [0, 1, 2, 2, 2, 5]),
        ("AB", [0, 1]),
        ("ABABABABABAB", [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 10, 11]),
    ],
)
def test_which_blocks_stand_for_the_others(kinds: str, kept: list[int]) -> None:
    assert module_groups.representative_blocks(list(kinds)) == kept


def test_a_model_that_ends_with_a_block_gets_an_empty_tail() -> None:
    model = traced.spec_from_module(
        nn.Sequential(*(Block() for _ in range(4))),
        inputs=torch.zeros(2, 128),
        batch_size=2,
        seq_len=None,
        progress=silent,
        kinds=("cpu",),
    )

    # FSDP1 puts the last group into the root.
    assert [group.role for group in model.groups[-2:]] == ["block", "tail"]
    assert sum(group.count for group in model.groups if group.role == "block") == 4
    assert model.groups[-1].num_params == 0
