"""Measuring on a rank: what needs no rank for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.planner.tracing.memory_tracker import OTHER_PART, MemoryTracker
from nbdist.worker import main
from nbdist.worker.memory import memory_advice, memory_probe, model_description


def test_what_a_gpu_held_is_read_before_this_rank_has_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Joined(Exception):  # noqa: N818
        pass

    used = [100]

    def join(*_: object, **__: object) -> None:
        used[0] += 1 << 30  # the context and NCCL's buffers
        raise Joined

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: used[0] + device.index)
    monkeypatch.setattr(main.process_group, "create_default_group", join)
    monkeypatch.setattr(main.rendezvous_store, "open_store", lambda _launch: None)
    monkeypatch.setattr(main, "set_num_threads", lambda _launch: None)
    monkeypatch.setattr(memory_probe.current_probe, "device_before_bytes", 0)
    launch: Any = SimpleNamespace(devices=("0", "1"), nodes=1)
    with pytest.raises(Joined):
        main.set_up_rank(launch, 1)
    assert memory_probe.current_probe.device_before_bytes == 101


def test_tensors_at_the_peak_are_categorized_afterwards() -> None:
    counting = MemoryTracker()
    with counting:
        gradient = torch.zeros(1000)
        activation = torch.zeros(500)
        del activation
        late = torch.zeros(10)
        counting.track_tensors("gradients", [gradient, late])
    assert counting.at_peak == {"gradients": 4000, OTHER_PART: 2000}
    assert counting.current["gradients"] == 4040


def test_operations_on_sparse_tensors_run() -> None:
    with MemoryTracker() as counting:
        dense = torch.eye(4)
        assert torch.sparse.mm(dense.to_sparse(), dense).equal(dense)
        counting.track_tensors("gradients", [dense.to_sparse()])


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
    assert memory_probe.batch_shape_of(memory_probe.forward_inputs_of(args, kwargs)) == shape
    assert memory_probe.batch_shape_of(memory_probe.forward_inputs_of([kwargs, *args], {})) == shape


def test_recorded_arguments_are_given_by_name_or_by_place() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    x, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    by_place = memory_probe.forward_inputs_of((x, mask), {})
    mixed = memory_probe.forward_inputs_of((x,), {"mask": mask, "flag": True})
    assert [one.shape for one in model_description.meta_inputs(by_place, Model())] == [
        x.shape,
        mask.shape,
    ]
    named = model_description.meta_inputs(mixed, Model())
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
    assert memory_advice.is_out_of_memory(error) is of_memory


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("can't allocate memory: you tried to allocate 40000000000000 bytes. Error", 4 * 10**13),
        ("CUDA out of memory. Tried to allocate 9.50 GiB. GPU 0 has", 9.5 * 2**30),
        ("Unable to allocate 728. TiB for an array with shape (1,)", 728 * 2**40),
        ("out of memory", None),
    ],
)
def test_what_was_asked_for_is_read_off_the_error(message: str, size: float | None) -> None:
    outer = ValueError("the step failed")
    outer.__cause__ = RuntimeError(message)
    assert memory_advice.requested_bytes(outer) == size


def test_other_models_and_their_optimizers_are_counted_beside_one() -> None:
    model, other = nn.Linear(8, 8, bias=False), nn.Linear(16, 16, bias=False)
    before = memory_probe.other_models_bytes(model, None)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    state = 2 * 4 * 16 * 16 + 4  # two moments and the count of steps
    assert memory_probe.other_models_bytes(model, None) - before == 4 * 16 * 16 + state
    shared = nn.ModuleList([model])
    assert memory_probe.other_models_bytes(model, None) - before == 4 * 16 * 16 + state
    assert memory_probe.other_models_bytes(shared, optimizer) - before < 4 * 16 * 16 + state


def test_an_error_raised_from_one_of_memory_is_one() -> None:
    outer = ValueError("the step failed")
    outer.__cause__ = MemoryError()
    assert memory_advice.is_out_of_memory(outer)
    outer.__cause__ = outer
    assert not memory_advice.is_out_of_memory(outer)
