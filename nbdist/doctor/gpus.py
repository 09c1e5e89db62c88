"""Checks of the GPUs: driver, visibility, free memory, processes and compute mode."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import psutil

from nbdist.cluster.allocation import format_names
from nbdist.doctor.finding import note, ok, problem
from nbdist.hardware import amd, discovery
from nbdist.number_formatting import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from nbdist.doctor.finding import Finding

TOPIC = "GPUs"


def check_gpus(
    *,
    own: Collection[int] = (),
    driver: Path = discovery.DRIVER,
) -> Iterator[Finding]:
    """Check the GPUs through NVML. CUDA is not used: a context would take device memory.

    Args:
        own: ids of this session's processes.
        driver: a file that exists if the driver is installed.
    """
    nvml = discovery.import_pynvml()
    cpu_ranks = f"a session has {discovery.DEFAULT_CPU_RANKS} CPU ranks"
    if nvml is None and amd.is_rocm() and amd.DRIVER.exists():
        message = "AMD's driver is installed but cannot be queried: amdsmi is missing"
        yield problem(TOPIC, message, "pip install /opt/rocm/share/amd_smi")
        return
    if nvml is None and driver.exists():
        message = "the NVIDIA driver is installed but cannot be queried: pynvml is missing"
        yield problem(TOPIC, message, "pip install nvidia-ml-py")
        return
    if nvml is None:
        yield ok(TOPIC, f"none; {cpu_ranks}")
        return
    try:
        with discovery.open_nvml(nvml):
            num_gpus = nvml.nvmlDeviceGetCount()
            machine = discovery.discover_machine()
            yield from _visible(num_gpus, machine)
            for index, gpu in enumerate(machine.gpus):
                yield from _gpu(nvml, index, gpu, own)
    except nvml.NVMLError as error:
        if amd.is_rocm() and amd.DRIVER.exists():
            yield problem(TOPIC, f"AMD's driver does not respond: {error}", "run amd-smi list")
        elif driver.exists():
            do = "run nvidia-smi: driver and libraries may differ in version, or a GPU was lost"
            yield problem(TOPIC, f"the NVIDIA driver does not respond: {error}", do)
        else:
            yield ok(TOPIC, f"none and no NVIDIA driver; {cpu_ranks}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        message = "this notebook's own process has initialized CUDA and holds GPU memory"
        do = "the ranks are not affected; restart the kernel to free the memory"
        yield note(TOPIC, message, do)


def _visible(installed: int, found: discovery.Machine) -> Iterator[Finding]:
    visible = amd.visible_devices(os.environ)
    if found.gpus:
        yield ok(TOPIC, found.describe())
    elif not installed:
        yield ok(TOPIC, f"none; a session has {discovery.DEFAULT_CPU_RANKS} CPU ranks")
    for warning in found.warnings:
        message, _, do = warning.partition("; ")
        yield problem(TOPIC, message, do)
    if len(found.gpus) < installed and visible is not None:
        name = "HIP" if amd.is_rocm() and os.environ.get("HIP_VISIBLE_DEVICES") else "CUDA"
        message = f"{name}_VISIBLE_DEVICES={visible!r} shows {len(found.gpus)} of {installed} GPUs"
        make = note if found.gpus or not visible else problem
        yield make(TOPIC, message, "if this is not intended, unset it before you start Jupyter")


def _gpu(nvml: Any, index: int, gpu: discovery.Gpu, own: Collection[int]) -> Iterator[Finding]:
    topic = f"GPU {index}"
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    message = f"{format_bytes(memory.free)} of {format_bytes(memory.total)} free"
    try:
        holders = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        holders = []  # not supported on some MIG instances
    others = [
        _describe_process(process.pid, process.usedGpuMemory)
        for process in holders
        if process.pid not in own
    ]
    if others:
        do = "end the processes that you no longer need, or exclude this GPU with --gpus"
        yield note(topic, f"{message}; held by {format_names(others)}", do)
    else:
        yield ok(topic, f"{message}; held by this session" if holders else message)
    if refused := discovery.refusal(nvml, gpu, own=own):
        yield problem(topic, refused.says, refused.do)


def _describe_process(pid: int, used: int | None) -> str:
    # The program's name only: its arguments may hold secrets.
    memory = "" if used is None else f", {format_bytes(used)}"
    try:
        process = psutil.Process(pid)
        return f"{process.name()} of {process.username()} (pid {pid}{memory})"
    except psutil.Error:
        return f"pid {pid} of another container (not visible from here{memory})"
