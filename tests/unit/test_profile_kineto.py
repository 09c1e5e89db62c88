"""PyTorch's profiler and memory record as nbdist uses them, in this process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils import cpp_extension

from nbdist.hardware import deepspeed_requirements
from nbdist.worker.memory import memory_probe
from nbdist.worker.profiling import kineto, recorder

if TYPE_CHECKING:
    from pathlib import Path

CALL = """
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
void call(at::Tensor in, at::Tensor out, std::string name, std::string group) {
  std::vector<at::Tensor> inputs{in}, outputs{out};
  RECORD_PARAM_COMMS_DATA(
      std::make_tuple(int64_t{1}, false), std::make_tuple(group, std::string()), inputs, outputs,
      0, std::string(name), in.numel(), out.numel(), in.scalar_type(), std::vector<int64_t>(),
      std::vector<int64_t>(), 0, 1, 2);
}
"""
"""What ProcessGroupNCCL does around each collective (torch 2.13); gloo does not."""


def recorded(code: Any) -> kineto.TraceEvents:
    recorder = kineto.KinetoRecorder(torch.device("cpu"), shapes=False)
    begin = time.time_ns()
    recorder.start()
    code()
    recorder.stop()
    return recorder.read_events((begin, time.time_ns()), threading.get_native_id(), steps=1)


@pytest.mark.nightly  # a minute to compile
def test_calls_of_a_process_group_have_bytes_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", deepspeed_requirements.build_search_path())
    assert shutil.which("ninja")
    built = cpp_extension.load_inline(
        "nbdist_test_comms",
        CALL,
        functions=["call"],
        extra_cflags=["-O0", "-DUSE_DISTRIBUTED", "-DUSE_C10D"],
        build_directory=str(tmp_path),
    )
    half, whole = torch.ones(100, dtype=torch.bfloat16), torch.ones(200, dtype=torch.bfloat16)

    def calls() -> None:
        built.call(half, whole, "_allgather_base", "3")
        built.call(torch.ones(10), torch.ones(10), "allreduce", "0")

    found = recorded(calls).comms
    assert [(one.group, one.bytes) for one in found] == [("3", 400), ("0", 40)]
    assert all(one.span[0] < one.span[1] for one in found)


def test_kineto_writes_nothing_of_its_own() -> None:
    code = """
        import torch
        from nbdist.worker.profiling import kineto
        kineto.quiet()
        recorder = kineto.KinetoRecorder(torch.device("cpu"), shapes=False)
        recorder.start()
        recorder.stop()
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


class Allocator:
    """Stands for torch's CUDA allocator: says what is recorded, and returns its events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, recorded_by_cell: bool = False) -> None:
        self.calls: list[Any] = []
        self.events: list[dict[str, Any]] = []
        stats = {"requested_bytes.all.current": 1000}
        monkeypatch.setattr(
            torch._C, "_cuda_isHistoryEnabled", lambda: recorded_by_cell, raising=False
        )
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", pytest.fail)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: stats)
        memory = torch.cuda.memory
        monkeypatch.setattr(
            memory, "_record_memory_history", lambda enabled, **_: self.calls.append(enabled)
        )
        monkeypatch.setattr(memory, "_snapshot", lambda _device: self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        self.calls.append("snapshot")
        return {"device_traces": [self.events]}

    def add(self, action: str, addr: int, size: int, *, ago_s: int = 0, line: int = 0) -> None:
        frames = [{"filename": "cell", "line": line, "name": "f"}] if line else []
        at = time.time_ns() // 1000 - 1_000_000 * ago_s
        event = {"action": action, "addr": addr, "size": size, "time_us": at, "frames": frames}
        self.events.append(event)


def test_a_gpu_trace_has_the_peak_of_the_step_not_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator(monkeypatch)
    history = memory_probe.AllocatorHistory(torch.device("cuda"), stacks=True)
    allocator.add("alloc", 1, 1000, ago_s=60, line=1)  # the user's own recording, before the step
    allocator.add("alloc", 2, 100, line=2)
    allocator.add("alloc", 3, 50, line=3)
    allocator.add("free_completed", 1, 1000)
    allocator.add("alloc", 4, 500)
    history.stop()
    peak, lines = history.peak(lambda frames: frames[0]["line"] if frames else None)
    assert peak == 1150
    assert lines == {2: 100, 3: 50}


@pytest.mark.parametrize("users", [False, True])
def test_a_profile_leaves_the_users_memory_recording_and_peak_alone(
    monkeypatch: pytest.MonkeyPatch, *, users: bool
) -> None:
    allocator = Allocator(monkeypatch, recorded_by_cell=users)
    nothing: Any = None
    recorder.GpuStepMemory(nothing, nothing, nothing, "", 0).stop()
    assert allocator.calls == (["snapshot"] if users else ["all", "snapshot", None])
