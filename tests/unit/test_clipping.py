"""--clip where a GradScaler scales gradients (fp16)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nbdist.worker.engines import accelerator_patch


def clip(*optimizers: torch.optim.Optimizer, clipped_by_cell: tuple[Any, ...] = ()) -> None:
    """Clip these optimizers at a norm of 1."""
    prepared = SimpleNamespace(
        _optimizers=[SimpleNamespace(optimizer=each) for each in optimizers],
        _models=[],
        _nbdist_clipped=set(map(id, clipped_by_cell)),
    )
    accelerator_patch._clip_before_steps(cast("Any", prepared), 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_scaled_gradients_are_clipped_at_the_same_norm(kind: Any, *, fused: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([weight], lr=1.0, fused=fused)
    clip(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((weight * 3).sum()).backward()  # a norm of 6, to be 1
    scaler.step(optimizer)
    scaler.update()
    assert weight.grad is not None
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-3)
    if kind is torch.optim.SGD:
        assert weight.detach().tolist() == pytest.approx([0.5] * 4, abs=1e-3)


def test_a_step_whose_gradients_overflow_is_skipped() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    clip(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer)
    assert weight.detach().tolist() == [1.0] * 4


def test_only_parameters_that_the_cell_has_clipped_are_left_alone() -> None:
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    clip(*optimizers, clipped_by_cell=(weights[0],))
    for weight, optimizer in zip(weights, optimizers, strict=True):
        (weight * 3).sum().backward()
        optimizer.step()
    assert [weight.grad.norm().item() for weight in weights if weight.grad is not None] == (
        pytest.approx([6.0, 1.0])
    )
