"""Measuring on a rank: what needs no rank for it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from nbdist.rank import advice, describe, measure
from nbdist.trace.footprint import OTHER, Footprint


def test_what_lived_at_the_peak_is_told_apart_afterwards() -> None:
    counting = Footprint()
    with counting:
        gradient = torch.zeros(1000)
        activation = torch.zeros(500)
        del activation
        late = torch.zeros(10)
        counting.know("gradients", [gradient, late])
    assert counting.at_peak == {"gradients": 4000, OTHER: 2000}
    assert counting.current["gradients"] == 4040


@pytest.mark.parametrize(
    ("args", "kwargs", "shape"),
    [
        ((), {"input_ids": torch.zeros(4, 9, dtype=torch.long)}, (4, 9)),
        ((), {"inputs_embeds": torch.zeros(3, 7, 16)}, (3, 7)),
        ((torch.zeros(5, 3, 32, 32),), {}, (5, 1)),
        ((torch.zeros(6, 10),), {}, (6, 1)),
        ((torch.tensor(1.0),), {}, (1, 1)),
        ((torch.zeros(2, 8, 4), torch.zeros(2, 8, dtype=torch.long)), {}, (2, 8)),
    ],
)
def test_a_micro_batch_has_samples_and_tokens(
    args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor], shape: tuple[int, int]
) -> None:
    assert measure.shape_of(measure.call_of(args, kwargs)) == shape
    assert measure.shape_of(measure.call_of([kwargs, *args], {})) == shape


def test_a_twin_has_no_data_and_keeps_what_is_shared_and_frozen() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad = False
    twin = measure.twin_of(model)
    assert twin is not None
    assert all(one.is_meta for one in (*twin.parameters(), *twin.buffers()))
    assert twin[2].weight is twin[0].weight
    assert not twin[1].weight.requires_grad
    assert not any(one.is_meta for one in model.parameters())


def test_a_module_that_cannot_be_copied_has_no_twin() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    assert measure.twin_of(model) is None


def test_recorded_arguments_are_given_by_name_or_by_place() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    x, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    by_place = measure.call_of((x, mask), {})
    mixed = measure.call_of((x,), {"mask": mask, "flag": True})
    assert [one.shape for one in describe.like(by_place, Model())] == [x.shape, mask.shape]
    named = describe.like(mixed, Model())
    assert isinstance(named, dict)
    assert named["x"].is_meta
    assert named["mask"].dtype == torch.bool


@pytest.mark.parametrize(
    ("error", "of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_errors_of_memory_are_known(error: BaseException | None, *, of_memory: bool) -> None:
    assert advice.is_out_of_memory(error) is of_memory


def test_an_error_raised_from_one_of_memory_is_one() -> None:
    outer = ValueError("the step failed")
    outer.__cause__ = MemoryError()
    assert advice.is_out_of_memory(outer)
    outer.__cause__ = outer
    assert not advice.is_out_of_memory(outer)
