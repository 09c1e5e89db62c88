"""Properties of optimizers, which are measured by steps of small tensors."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import lion_pytorch
import pytest
import schedulefree
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbdist.planner.optimizers import optimizer_from_torch
from nbdist.state.optimizer_properties import properties_of
from nbdist.worker.memory.memory_probe import describe_optimizer


class Lamb(torch.optim.Optimizer):
    """Scales the update of a parameter by its norm."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                mean = self.state[one].setdefault("mean", torch.zeros_like(one))
                mean.lerp_(one.grad, 0.1)
                one.add_(mean, alpha=-group["lr"] * float(one.norm() / mean.norm()))


class Shared(Lamb):
    """Scales the update of all parameters by one number, which it finds in the first steps."""

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        gradients = [one.grad for one in group["params"]]
        group["found"] = max(group.get("found", 0), float(sum(each.sum() for each in gradients)))
        torch._foreach_add_(group["params"], gradients, alpha=-group["lr"] * group["found"])


class Hidden(Lamb):
    """Keeps tensors in an attribute, where no other optimizer would find them."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not hasattr(self, "means"):
                self.means = [torch.zeros_like(one) for one in group["params"]]
            for one, mean in zip(group["params"], self.means, strict=True):
                one.add_(mean.lerp_(one.grad, 0.1), alpha=-group["lr"])


class Unstored(torch.optim.AdamW):
    """Wants an argument that it does not store."""

    def __init__(self, params: Any, speed: float) -> None:
        super().__init__(params, lr=speed)


def create(cls: Any, **options: Any) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(3, 4))]
    optimizer: torch.optim.Optimizer = cls(parameters, **options)
    return optimizer


ELEMENTWISE = [
    *(getattr(torch.optim, name) for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax")),
    *(getattr(torch.optim, name) for name in ("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")),
    lion_pytorch.Lion,
    schedulefree.AdamWScheduleFree,
    schedulefree.RAdamScheduleFree,
    schedulefree.SGDScheduleFree,
]


@pytest.mark.parametrize("cls", ELEMENTWISE, ids=lambda cls: cls.__name__)
def test_state_of_element_wise_optimizers_is_reshardable(cls: Any) -> None:
    properties = properties_of(create(cls))
    assert (properties.is_reshardable, properties.is_elementwise) == (True, True)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (torch.optim.Muon, (False, False)),
        (Lamb, (False, False)),
        (Shared, (False, False)),
        (torch.optim.Adafactor, (False, False)),
        (transformers.Adafactor, (False, False)),
        (Hidden, (False, True)),
        (torch.optim.LBFGS, (False, None)),
    ],
)
def test_other_optimizers(cls: Any, expected: tuple[bool, bool | None]) -> None:
    properties = properties_of(create(cls))
    assert (properties.is_reshardable, properties.is_elementwise) == expected


def test_an_optimizer_that_cannot_be_made_again_is_taken_for_its_base_class() -> None:
    properties = properties_of(create(Unstored, speed=0.1))
    assert (properties.is_reshardable, properties.is_elementwise) == (True, None)


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"capturable": True}, {"lr": 0.0}]
)
def test_kernels_and_a_warmup_change_nothing(options: dict[str, Any]) -> None:
    assert properties_of(create(torch.optim.AdamW, **options)).is_reshardable


def test_options_of_all_groups_count() -> None:
    class Decaying(Lamb):
        def step(self) -> None:
            for group in self.param_groups:
                for one in group["params"]:
                    scale = float(one.norm()) if group["decays"] else 1
                    one.data.sub_(one.grad, alpha=group["lr"] * scale)

    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [
        {"params": [each], "decays": decays}
        for each, decays in zip(weights, (False, True), strict=True)
    ]
    assert properties_of(Decaying(groups[:1])).is_elementwise
    assert not properties_of(Decaying(groups)).is_elementwise


def num_tensors() -> int:
    gc.collect()
    return sum(type(one) in (torch.Tensor, torch.nn.Parameter) for one in gc.get_objects())


def test_measuring_leaves_no_trace(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    class Talking(torch.optim.Adam):
        def step(self) -> None:  # type: ignore[override]
            print("step")  # noqa: T201
            warnings.warn("old", stacklevel=1)
            super().step()

    seen = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    optimizer = create(Talking)
    before, tensors = torch.random.get_rng_state(), num_tensors()
    properties_of(optimizer)
    assert num_tensors() == tensors
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (seen, dict(optimizer.state)) == ([], {})
    assert (capsys.readouterr().out, len(recwarn)) == ("", 0)
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(3, 4)
    optimizer.step()
    handle.remove()
    assert seen


def test_the_planner_knows_the_state_of_any_optimizer() -> None:
    planned = optimizer_from_torch(describe_optimizer(create(Shared)))
    assert (planned.name, planned.state_bytes(100)) == ("Shared", 0)
    planned = optimizer_from_torch(describe_optimizer(create(Lamb)))
    assert planned.state_bytes(100) == 400
    assert planned.cannot_step == ("fsdp1", "zero1", "zero2", "zero3")
