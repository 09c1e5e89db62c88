"""Ranks with CUDA's build of torch, up to the first call that needs a driver."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nbdist.launcher import __main__ as launcher
from nbdist.strategies import Options
from tests.rehearsal.conftest import SITE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.rehearsal.conftest import GpuMachine

GIB = 1 << 30


def test_ranks_count_gpus_as_nvml_does_and_deepspeed_can_read_it(gpu_machine: GpuMachine) -> None:
    gpu_machine.has("GPU-aaaa,70", "GPU-bbbb,60")
    seen, _ = gpu_machine.start("GPU-bbbb", "GPU-aaaa", CUDA_VISIBLE_DEVICES="GPU-bbbb,GPU-aaaa")
    assert all(one["cuda"] for one in seen)
    assert [(one["visible"], one["order"]) for one in seen] == [("1,0", "PCI_BUS_ID")] * 2
    assert [one["available_memory"] for one in seen] == [60 * GIB, 60 * GIB]  # of "cuda:0"


def test_a_mig_instance_starts_and_deepspeed_asks_torch_for_its_memory(
    gpu_machine: GpuMachine,
) -> None:
    gpu_machine.has("GPU-aaaa,70,MIG-1111")
    (seen,), _ = gpu_machine.start("MIG-1111")
    assert seen["visible"] == "MIG-1111"
    assert not seen["broken fork"]
    assert seen["available_memory"] == 40 * GIB


def test_a_library_that_asks_for_gpus_at_its_import_breaks_no_fork(
    gpu_machine: GpuMachine,
) -> None:
    gpu_machine.has("GPU-aaaa,70,MIG-1111")
    for _ in range(2):  # the launcher forks again and again
        (seen,), _ = gpu_machine.start("MIG-1111", CUDA_VISIBLE_DEVICES="MIG-1111")
        assert not seen["broken fork"]


def test_nvml_is_closed_when_ranks_are_forked(gpu_machine: GpuMachine) -> None:
    gpu_machine.has("GPU-aaaa,70", "GPU-bbbb,60")
    seen, _ = gpu_machine.start("GPU-aaaa", "GPU-bbbb")
    assert [one["nvml opened"] for one in seen] == [0, 0]


def test_ranks_on_gpus_share_the_cores(gpu_machine: GpuMachine) -> None:
    gpu_machine.has("GPU-aaaa,70", "GPU-bbbb,60")
    seen, _ = gpu_machine.start("GPU-aaaa", "GPU-bbbb")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [one["threads"] for one in seen] == [share, share]
    seen, _ = gpu_machine.start("GPU-aaaa", "GPU-bbbb", OMP_NUM_THREADS="3")
    assert [one["threads"] for one in seen] == [3, 3]


@pytest.mark.parametrize(
    ("name", "driver", "count", "off"),
    [
        ("NVIDIA GeForce RTX 4090", "535.183.01", 1, {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"}),
        ("NVIDIA GeForce RTX 4090", "535.183.01", 2, {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"}),
        ("NVIDIA GeForce RTX 4090", "550.54.15", 1, set()),
        ("NVIDIA A100-SXM4-80GB", "535.183.01", 1, set()),
    ],
)
def test_rtx_40_under_an_old_driver_talk_through_the_host(
    name: str, driver: str, count: int, off: set[str], gpu_machine: GpuMachine, tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f'#!/bin/sh\ncase $1 in\n*driver*) echo "{driver}" ;;\n'
        f'*) echo "2, {name}"; echo "2, {name}" ;;\nesac\n'
    )
    smi.chmod(0o755)
    gpu_machine.has("GPU-aaaa,70", "GPU-bbbb,60")
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    seen, _ = gpu_machine.start(*["GPU-aaaa", "GPU-bbbb"][:count], PATH=path)
    assert [one["nccl"] for one in seen] == [dict.fromkeys(off, "1")] * count


def test_nvme_without_the_cuda_toolkit_is_refused_before_ranks_start(
    gpu_machine: GpuMachine, tmp_path: Path
) -> None:
    gpu_machine.has("GPU-aaaa,70")
    options = Options(backend="zero3", offload=f"nvme:{tmp_path / 'swap'}")
    (tmp_path / "libaio.h").touch()
    seen, ended = gpu_machine.start(
        "GPU-aaaa",
        options=options,
        CPATH=str(tmp_path),
        CUDA_HOME=str(tmp_path),
        NBDIST_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert seen == []
    assert "nvcc or CUDA's headers are missing. Install the toolkit" in ended.error


@pytest.mark.parametrize("gpu", ["GPU-aaaa,70", "GPU-aaaa,70,MIG-1111"])
def test_a_session_gets_as_far_as_the_missing_driver(gpu: str, gpu_machine: GpuMachine) -> None:
    gpu_machine.has(gpu)
    code = """
import nbdist
session = nbdist.Session(nproc=1)
try:
    session.start()
except nbdist.errors.SessionError as error:
    print(session.describe(), error)
session.stop()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "1 rank on GPU 0, ddp" in done.stdout
    assert "Found no NVIDIA driver" in done.stdout
    assert "Cannot re-initialize CUDA" not in done.stdout


def test_what_transformers_has_cached_in_the_launcher_is_forgotten_on_ranks(
    gpu_machine: GpuMachine,
) -> None:
    gpu_machine.has("GPU-aaaa,70")
    (seen,), _ = gpu_machine.start("GPU-aaaa")
    assert seen["cached answers"] == 0


def test_nothing_else_that_the_launcher_imports_remembers_that_it_saw_no_gpu() -> None:
    code = f"""
import importlib, traceback, torch
asked = set()
def spied(name, usual):
    def spy(*args):
        calls = [call for call in traceback.extract_stack() if call.name != "spy"]
        asked.add(calls[-1].name if calls[-1].name != "is_available" else calls[-2].name)
        return usual(*args)
    setattr(torch.cuda, name, spy)
spied("is_available", torch.cuda.is_available)
spied("device_count", torch.cuda.device_count)
for name in {[*launcher.CORE_IMPORTS, *launcher.WARM_UP_IMPORTS]}:
    importlib.import_module(name)
print(sorted(asked))
"""
    environ = {
        **os.environ,
        "PYTHONPATH": SITE,
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_HOME": "/usr",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "DS_ACCELERATOR": "cuda",
    }
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    # it only warns that a toolkit is there and no GPU
    assert done.stdout.split("\n")[-2] == "['_find_cuda_home']"
