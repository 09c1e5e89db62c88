"""The GPUs: what they are, who uses them, how they are linked, and what hides them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import psutil

from nbdist.doctor.finding import listed, note, ok, problem, size
from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from nbdist.doctor.finding import Finding

TOPIC = "GPUs"


def look(
    *,
    own: Collection[int] = (),
    nvml: Any = None,
    environ: Mapping[str, str] = os.environ,
    driver: Path = discovery.DRIVER,
) -> Iterator[Finding]:
    """Ask NVML, never CUDA: a context would take memory.

    Args:
        own: processes of this session.
        nvml: a module with the functions of `pynvml`, for tests.
        environ: where CUDA_VISIBLE_DEVICES is read.
        driver: a file that is there where the driver is.
    """
    nvml = nvml or discovery.pynvml()
    if nvml is None:
        yield from _without_nvml(driver)
        return
    try:
        with discovery.opened(nvml):
            there = nvml.nvmlDeviceGetCount()
            found = discovery.found(nvml=nvml, environ=environ)
            yield from _visible(there, found, environ)
            for index, gpu in enumerate(found.gpus):
                yield from _gpu(nvml, index, gpu, own)
    except nvml.NVMLError as error:
        if driver.exists():
            do = "run nvidia-smi: driver and libraries may be of two versions, or a GPU was lost"
            yield problem(TOPIC, f"NVIDIA's driver does not answer: {error}", do)
        else:
            yield ok(TOPIC, f"none, and no NVIDIA driver: {discovery.CPU_RANKS} CPU ranks")
    yield from _used_by_the_kernel()


def _without_nvml(driver: Path) -> Iterator[Finding]:
    if driver.exists():
        says = "NVIDIA's driver is here and cannot be asked: no module pynvml"
        yield problem(TOPIC, says, "pip install nvidia-ml-py")
    else:
        yield ok(TOPIC, f"none: {discovery.CPU_RANKS} CPU ranks")


def _visible(there: int, found: discovery.Machine, environ: Mapping[str, str]) -> Iterator[Finding]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if found.gpus:
        yield ok(TOPIC, found.describe())
    elif not there:
        yield ok(TOPIC, f"none: {discovery.CPU_RANKS} CPU ranks")
    for warning in found.warnings:
        says, _, do = warning.partition("; ")
        yield problem(TOPIC, says, do)
    if len(found.gpus) < there and visible is not None:
        says = f"CUDA_VISIBLE_DEVICES={visible!r} shows {len(found.gpus)} of {there} GPUs"
        make = note if found.gpus or not visible else problem
        yield make(TOPIC, says, "unset it before Jupyter starts, if that is not meant")


def _gpu(nvml: Any, index: int, gpu: discovery.Gpu, own: Collection[int]) -> Iterator[Finding]:
    topic = f"GPU {index}"
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    says = f"{size(memory.free)} of {size(memory.total)} free"
    holders = _holders(nvml, handle)
    others = [words for pid, words in holders if pid not in own]
    if others:
        do = "end what you no longer need, or leave this GPU out with --gpus"
        yield note(topic, f"{says}; held by {listed(others)}", do)
    else:
        yield ok(topic, f"{says}; held by this session" if holders else says)
    if refused := discovery.refusal(nvml, gpu, own=own):
        yield problem(topic, refused.says, refused.do)


def _holders(nvml: Any, handle: Any) -> list[tuple[int, str]]:
    """Processes that hold memory, each with who and how much."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return []  # not told on some MIG instances
    return [(one.pid, _words(one.pid, one.usedGpuMemory)) for one in running]


def _words(pid: int, used: int | None) -> str:
    """Say who: the program's name and never its arguments, which may hold secrets."""
    memory = "" if used is None else f", {size(used)}"
    try:
        process = psutil.Process(pid)
        return f"{process.name()} of {process.username()} (pid {pid}{memory})"
    except psutil.Error:
        return f"pid {pid} of another container (it cannot be seen from here{memory})"


def _used_by_the_kernel() -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        says = "this notebook's own process has used CUDA and holds memory of a GPU"
        do = "ranks do not mind; restart the kernel to have the memory back"
        yield note(TOPIC, says, do)
