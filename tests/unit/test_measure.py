"""Measuring on a rank: what needs no rank for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch import nn

from nbdist.planner.tracing.memory_tracker import OTHER, Footprint
from nbdist.worker import main
from nbdist.worker.memory import memory_probe, model_description, oom_advice


def test_a_driver_that_fails_does_not_keep_a_rank_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_device: torch.device) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    monkeypatch.setattr(torch.cuda, "device_memory_used", fail)
    assert memory_probe._device_used(torch.device("cuda", 0)) == 0


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
    monkeypatch.setattr(main.process_group, "join", join)
    monkeypatch.setattr(main.rendezvous_store, "opened", lambda _launch: None)
    monkeypatch.setattr(main, "share_cores", lambda _launch: None)
    monkeypatch.setattr(memory_probe.state, "device_before", 0)
    launch: Any = SimpleNamespace(devices=("0", "1"), nodes=1)
    with pytest.raises(Joined):
        main.get_ready(launch, 1)
    assert memory_probe.state.device_before == 101


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
    assert memory_probe.shape_of(memory_probe.call_of(args, kwargs)) == shape
    assert memory_probe.shape_of(memory_probe.call_of([kwargs, *args], {})) == shape


def test_recorded_arguments_are_given_by_name_or_by_place() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    x, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    by_place = memory_probe.call_of((x, mask), {})
    mixed = memory_probe.call_of((x,), {"mask": mask, "flag": True})
    assert [one.shape for one in model_description.like(by_place, Model())] == [x.shape, mask.shape]
    named = model_description.like(mixed, Model())
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
    assert oom_advice.is_out_of_memory(error) is of_memory


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("can't allocate memory: you tried to allocate 40000000000000 bytes. Error", 4 * 10**13),
        ("CUDA out of memory. Tried to allocate 9.50 GiB. GPU 0 has", 9.5 * 2**30),
        ("Unable to allocate 728. TiB for an array with shape (1,)", 728 * 2**40),
        ("out of memory", None),
    ],
)
def test_what_was_asked_for_is_read_off_the_error(said: str, size: float | None) -> None:
    outer = ValueError("the step failed")
    outer.__cause__ = RuntimeError(said)
    assert oom_advice.asked_bytes(outer) == size


def test_more_than_there_is_blames_the_request() -> None:
    present: Any = SimpleNamespace(device_bytes=2**30)
    asked = oom_advice._not_the_model(present, 8 * 2**30, 10 * 2**40)
    assert asked.endswith(
        "1.0 of 8.0 GiB for this model and batch: 10.0 TiB are more than there is:"
        " ask for less at once"
    )
    assert oom_advice._not_the_model(present, 8 * 2**30, 0).endswith("something else takes memory")


def test_other_models_and_their_optimizers_are_counted_beside_one() -> None:
    model, other = nn.Linear(8, 8, bias=False), nn.Linear(16, 16, bias=False)
    before = memory_probe.beside(model, None)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    state = 2 * 4 * 16 * 16 + 4  # two moments and the count of steps
    assert memory_probe.beside(model, None) - before == 4 * 16 * 16 + state
    shared = nn.ModuleList([model])
    assert memory_probe.beside(model, None) - before == 4 * 16 * 16 + state
    assert memory_probe.beside(shared, optimizer) - before < 4 * 16 * 16 + state


def test_an_error_raised_from_one_of_memory_is_one() -> None:
    outer = ValueError("the step failed")
    outer.__cause__ = MemoryError()
    assert oom_advice.is_out_of_memory(outer)
    outer.__cause__ = outer
    assert not oom_advice.is_out_of_memory(outer)
