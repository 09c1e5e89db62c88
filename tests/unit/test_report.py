from __future__ import annotations

import logging
import math
import threading
import time
import types
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from nbdist.errors import OptionError
from nbdist.worker import report as report_module
from nbdist.worker.report import PinnedScalarPool, Reporter

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = dict[str, float]


class Kernel:
    """What is published, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[Row]] = []
        self.came = threading.Event()

    def __call__(self, rows: list[Row]) -> None:
        self.batches.append(rows)
        self.came.set()

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


class FakeEvent:
    passed = False
    broken = False

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("device-side assert")
        return self.passed


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    """CPU tensors in place of CUDA's, in `report()` those in bfloat16; events pass when told."""
    events: list[FakeEvent] = []

    def record_event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    genuine = torch.empty

    def empty(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        assert pin_memory
        return genuine(*size, **options)

    stream = types.SimpleNamespace(record_event=record_event)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.dtype is torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return events


@pytest.fixture
def reporter(kernel: Kernel, cuda: list[FakeEvent]) -> Iterator[Reporter]:  # noqa: ARG001
    reporter = Reporter(kernel)
    yield reporter
    reporter.close()


def device_tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "value",
    [
        *(2, 2.0, Fraction(4, 2), np.float32(2), np.int64(2), np.array(2.0), np.array([[2]])),
        *(torch.tensor(2.0), torch.tensor([2]), torch.tensor(2, dtype=torch.uint8)),
        *(torch.tensor(2.0, requires_grad=True), torch.nn.Parameter(torch.tensor([2.0]))),
        torch.tensor(2.0, dtype=torch.float8_e5m2),
    ],
)
def test_every_kind_of_scalar_is_a_float(value: Any, reporter: Reporter, kernel: Kernel) -> None:
    reporter.report(loss=value)
    assert reporter.flush(5)
    assert kernel.column("loss") == [2.0]
    assert type(kernel.rows[0]["loss"]) is float


def test_numbers_that_are_not_finite_pass(reporter: Reporter, kernel: Kernel) -> None:
    reporter.report(a=math.nan, b=math.inf, c=torch.tensor(-math.inf))
    reporter.flush(5)
    (row,) = kernel.rows
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_steps_are_counted_on_from_a_given_one(reporter: Reporter, kernel: Kernel) -> None:
    reporter.report(x=0)
    reporter.report(x=0)
    reporter.flush(5)  # the end of a cell
    reporter.report(x=0)
    reporter.report(10, x=0)
    reporter.report(x=0)
    reporter.report(step=np.int64(3), x=0)
    reporter.report(x=0)
    reporter.flush(5)
    assert kernel.column("step") == [0, 1, 2, 10, 11, 3, 4]
    assert all(type(step) is int for step in kernel.column("step"))


@pytest.mark.parametrize(
    ("arguments", "scalars", "message"),
    [
        (("x",), {}, r"^step of report\(\) must be an integer >= 0 .*, got str \('x'\)\."),
        ((1.5,), {"a": 1}, r"^step of report.* got float \(1\.5\)\."),
        ((-1,), {"a": 1}, r"^step of report.* got int \(-1\)\."),
        ((True,), {"a": 1}, "^step of report.* got bool"),
        ((2**62,), {"a": 1}, "^step of report.* got int"),
        ((torch.tensor(1.0),), {}, r"^step of report.* got Tensor\. .*report\(loss=loss\)\.$"),
        ((), {}, r"^report\(\) got no scalars\. Pass them by name"),
        ((3,), {}, r"^report\(\) got no scalars"),
        ((), {"time": 1}, r"^report\(time=\.\.\.\) is reserved"),
        ((), {"loss": "x"}, r"^report\(loss=\.\.\.\) must be a real number .*, got str \('x'\)\.$"),
        ((), {"loss": None}, r"^report\(loss=\.\.\.\) must .*, got NoneType\.$"),
        ((), {"loss": [1.0]}, r"^report\(loss=\.\.\.\) must .*, got list\.$"),
        ((), {"loss": 1j}, "got complex"),
        ((), {"loss": 10**400}, "got a number too large for a float"),
        ((), {"loss": np.arange(3)}, "got ndarray"),
        ((), {"loss": np.array(["x"])}, r"got str \('x'\)"),
        ((), {"loss": torch.ones(2, 3)}, r"of shape \(2, 3\)\. Take its mean\(\) or sum\(\)"),
        ((), {"loss": torch.empty(0)}, r"of shape \(0,\)"),
        ((), {"loss": torch.tensor(1j)}, r"got complex"),
        ((), {"loss": torch.ones(1, device="meta")}, "tensor on meta"),
        ((), {"loss": torch.ones(3, dtype=torch.bfloat16)}, r"of shape \(3,\)"),
        ((), {"fine": 1.0, "loss": "x"}, r"^report\(loss"),
    ],
)
def test_values_that_are_not_scalars_are_rejected_and_nothing_is_reported(
    arguments: Any, scalars: Any, message: str, reporter: Reporter, kernel: Kernel
) -> None:
    with pytest.raises(OptionError, match=message):
        reporter.report(*arguments, **scalars)
    reporter.report(good=1)
    reporter.flush(5)
    assert [list(row) for row in kernel.rows] == [["step", "time", "good"]]
    assert kernel.column("step") == [0]


def test_a_dtensor_is_refused_since_it_needs_a_collective(reporter: Reporter) -> None:
    class DTensor(torch.Tensor):
        def full_tensor(self) -> None: ...

    with pytest.raises(OptionError, match=r"got a DTensor\. .*\.full_tensor\(\) on all ranks"):
        reporter.report(loss=torch.tensor(1.0).as_subclass(DTensor))


def test_many_rows_make_few_batches_and_keep_their_order(
    reporter: Reporter, kernel: Kernel
) -> None:
    for i in range(10_000):
        reporter.report(i=i)
    assert reporter.flush(5)
    assert kernel.column("i") == list(range(10_000))
    assert len(kernel.batches) < 100
    assert max(map(len, kernel.batches)) <= 4096


def test_a_device_value_is_published_when_it_arrives_and_not_overtaken(
    reporter: Reporter, kernel: Kernel, cuda: list[FakeEvent]
) -> None:
    reporter.report(loss=1.0)
    reporter.report(lr=0.5, loss=device_tensor(2), hits=3)
    reporter.report(loss=4.0)
    assert not reporter.flush(0)
    assert kernel.column("loss") == [1.0]
    cuda[0].passed = True
    assert reporter.flush(0)
    assert kernel.column("loss") == [1.0, 2.0, 4.0]
    assert list(kernel.rows[1]) == ["step", "time", "lr", "loss", "hits"]
    assert kernel.column("step") == [0, 1, 2]


def test_the_thread_waits_for_device_values_too(
    reporter: Reporter, kernel: Kernel, cuda: list[FakeEvent]
) -> None:
    reporter.report(loss=device_tensor(2))
    cuda[0].passed = True
    assert kernel.came.wait(5)
    assert kernel.column("loss") == [2.0]


def test_flush_gives_up_at_its_deadline(reporter: Reporter, kernel: Kernel) -> None:
    reporter.report(loss=device_tensor(2))
    begun = time.monotonic()
    assert not reporter.flush(0.02)
    assert time.monotonic() - begun < 2
    assert kernel.rows == []


def test_a_failing_publisher_is_logged_and_the_next_rows_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got: list[Row] = []

    def publish(rows: list[Row]) -> None:
        if not caplog.records:
            raise ConnectionError
        got.extend(rows)

    reporter = Reporter(publish)
    reporter.report(a=1)
    reporter.flush(5)
    reporter.report(a=2)
    reporter.flush(5)
    reporter.close()
    assert [row["a"] for row in got] == [2.0]
    assert "1 rows of report() could not be published" in caplog.text


def test_close_publishes_and_ends_the_thread(kernel: Kernel) -> None:
    reporter = Reporter(kernel)
    reporter.report(a=1)
    reporter.close()
    assert kernel.column("a") == [1.0]


# ---- pinned memory, with events that the test holds


def test_slots_are_read_behind_the_event_and_used_again(cuda: list[FakeEvent]) -> None:
    memory = PinnedScalarPool()
    loss = torch.tensor([1.5], requires_grad=True)
    copies = memory.copy_async({"loss": loss, "n": torch.tensor(7)})
    assert not copies.is_ready()
    cuda[0].passed = True
    assert copies.is_ready()
    assert copies.values() == {"loss": 1.5, "n": 7.0}
    with torch.inference_mode():
        memory.copy_async({"loss": torch.tensor(2.0)})
    assert len(cuda) == 2


def test_more_copies_than_slots_are_held_apart(cuda: list[FakeEvent]) -> None:
    memory = PinnedScalarPool()
    flying = [memory.copy_async({"i": torch.tensor(i)}) for i in range(2500)]
    assert [copies.values()["i"] for copies in flying] == list(range(2500))
    assert len(cuda) == 2500


def test_a_failed_device_gives_nan_and_keeps_no_one_waiting(
    cuda: list[FakeEvent], caplog: pytest.LogCaptureFixture
) -> None:
    memory = PinnedScalarPool()
    copies = memory.copy_async({"loss": torch.tensor(1.0)})
    cuda[0].broken = True
    with caplog.at_level(logging.WARNING):
        assert copies.is_ready()
    assert math.isnan(copies.values()["loss"])
    assert "device-side assert" in caplog.text


def test_the_thread_that_asks_for_events_leaves_captures_of_cuda_graphs_alone(
    cuda: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, threading.Thread]] = []

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
            calls.append(("mode", mode._obj.value, threading.current_thread()))
            return 0

    def query(_event: FakeEvent) -> bool:
        calls.append(("query", -1, threading.current_thread()))
        return True

    monkeypatch.setattr(report_module.ctypes, "CDLL", Driver)
    monkeypatch.setattr(FakeEvent, "query", query)
    memory = PinnedScalarPool()
    thread = threading.Thread(
        target=lambda: [memory.copy_async({"loss": torch.tensor(1.0)}).is_ready() for _ in range(2)]
    )
    thread.start()
    thread.join()
    assert calls == [("mode", 1, thread), ("query", -1, thread), ("query", -1, thread)]
    calls.clear()
    memory.copy_async({"loss": torch.tensor(1.0)}).is_ready()  # a flush of the main thread
    assert [name for name, *_ in calls] == ["query"]
    assert len(cuda) == 3


def test_a_captured_graph_is_reported(
    cuda: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(OptionError, match=r"CUDA graph capture.*after the replay"):
        PinnedScalarPool().copy_async({"loss": torch.tensor(1.0)})
    assert cuda == []
