# ruff: noqa: N802 - the functions have pynvml's names
"""NVML of a machine with the GPUs that a test describes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30


@dataclass(frozen=True)
class FakeGpu:
    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    memory_bytes: int = 80 * GIB
    capability: tuple[int, int] | None = (8, 0)
    instances: tuple[FakeGpu, ...] = ()
    used: tuple[tuple[int, int], ...] = ()
    """Process and bytes."""
    taken: int | None = None
    """Memory in use; None for the sum of `used`."""
    mode: int = 0
    """Compute mode."""
    lost: bool = False
    shares_memory: bool = False
    """With the host."""
    bare: bool = False
    """Tells the memory alone, as a MIG instance does."""


@dataclass(eq=False)
class FakeNvml:
    """The functions of pynvml that are used; a GPU is its own handle."""

    gpus: list[FakeGpu]
    nvlink: bool = True
    broken: bool = False
    calls: list[str] = field(default_factory=list)
    links: int = 0
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_SUCCESS = 0
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139

    class NVMLError(Exception):
        value = 0

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
        value = 3

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if self.broken:
            raise self.NVMLError("Driver/library version mismatch")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].lost:
            raise self.NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            for one in (gpu, *gpu.instances):
                if one.uuid == uuid:
                    return one
        raise self.NVMLError

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        if gpu.shares_memory:
            raise self.NVMLError_NotSupported
        taken = sum(size for _, size in gpu.used) if gpu.taken is None else gpu.taken
        return SimpleNamespace(total=gpu.memory_bytes, free=gpu.memory_bytes - taken, used=taken)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.used]

    def nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> int:
        return gpu.mode

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        if gpu.capability is None:
            raise self.NVMLError
        return gpu.capability

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        if gpu.uuid.startswith("MIG-"):
            raise self.NVMLError
        return [int(bool(gpu.instances))] * 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        return gpu.instances[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, instance: FakeGpu) -> FakeGpu:
        return next(gpu for gpu in self.gpus if instance in gpu.instances)

    def nvmlDeviceGetP2PStatus(self, _one: FakeGpu, _other: FakeGpu, index: int) -> int:
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if self.nvlink else 5

    def _told(self, gpu: FakeGpu, value: Any) -> Any:
        if gpu.bare:
            raise self.NVMLError
        return value

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return self._told(gpu, SimpleNamespace(gpu=87, memory=30))

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> Any:
        return self._told(gpu, 312_500)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> Any:
        return self._told(gpu, 400_000)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, kind: int) -> Any:
        assert kind == self.NVML_TEMPERATURE_GPU
        return self._told(gpu, 61)

    def nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, way: int) -> Any:
        return self._told(gpu, 1000 + way)

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[tuple[int, int]]) -> Any:
        self.links += 1024
        value = self._told(gpu, SimpleNamespace(ullVal=self.links))
        return [SimpleNamespace(nvmlReturn=0, value=value) for _ in fields]


@contextmanager
def driver(nvml: Any, **environ: str) -> Iterator[None]:
    """Let this process see these GPUs, with these environment variables alone."""
    with (
        mock.patch.object(discovery, "import_pynvml", return_value=nvml),
        mock.patch.dict(os.environ, environ, clear=True),
    ):
        yield


def machine_with(nvml: Any, **environ: str) -> discovery.Machine:
    with driver(nvml, **environ):
        return discovery.discover_machine()


def one_gpu(*used: tuple[int, int], **more: Any) -> FakeNvml:
    """One GPU, 20 GiB of which these processes use."""
    return FakeNvml([FakeGpu("GPU-a", used=used, **{"taken": 20 * GIB, **more})])
