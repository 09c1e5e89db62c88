"""AMD GPUs through amdsmi, with the functions of `pynvml` that nbdist calls.

So everything that reads NVML works with AMD's library. A function that is missing here, or that
amdsmi does not support on a GPU, raises `NVMLError`, as NVML does. Written from the documentation
of amdsmi 6.4 to 7.2 and not tested on hardware.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

DRIVER = Path("/sys/module/amdgpu/version")
"""Exists if AMD's driver is loaded."""
_MIB = 1 << 20
_XGMI = 2
"""AMDSMI_LINK_TYPE_XGMI in amdsmi 6.4 and later."""


class AmdSmi:
    """The interface of `pynvml`, implemented with amdsmi.

    A handle is amdsmi's handle of a processor. GPUs are numbered as by HIP.

    Args:
        smi: the module amdsmi.
    """

    NVML_P2P_CAPS_INDEX_NVLINK = NVML_P2P_STATUS_OK = 0
    NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 2, 3
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, smi: Any) -> None:
        self._smi = smi
        self.NVMLError = smi.AmdSmiException
        self._handles: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Return a function that is not supported, for all that amdsmi has no counterpart of."""
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def unsupported(*_: object) -> Any:
            raise self.NVMLError(f"{name} has no counterpart in amdsmi")

        return unsupported

    def nvmlInit(self) -> None:
        self._smi.amdsmi_init(self._smi.AmdSmiInitFlags.INIT_AMD_GPUS)
        handles = self._smi.amdsmi_get_processor_handles()
        handles.sort(key=self._hip_id)  # amdsmi lists them in PCI bus order
        self._handles = handles
        shown = os.environ.get("ROCR_VISIBLE_DEVICES")
        if shown is None:
            return
        # A list of numbers and UUIDs; an invalid entry ends it.
        by_name = {self.nvmlDeviceGetUUID(handle): handle for handle in handles}
        by_name |= {str(number): handle for number, handle in enumerate(handles)}
        entries = [entry.strip() for entry in shown.split(",")]
        valid = itertools.takewhile(by_name.__contains__, entries)
        self._handles = [by_name[entry] for entry in valid]

    def nvmlShutdown(self) -> None:
        self._smi.amdsmi_shut_down()

    def nvmlDeviceGetCount(self) -> int:
        return len(self._handles)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._handles[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for handle in self._handles:
            if self.nvmlDeviceGetUUID(handle) == uuid:
                return handle
        raise self.NVMLError(f"no GPU {uuid}")

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        """Return HIP's UUID, "GPU-" and 16 digits, which ROCR_VISIBLE_DEVICES accepts."""
        try:
            return str(self._smi.amdsmi_get_gpu_enumeration_info(handle)["hip_uuid"])
        except (AttributeError, KeyError, self.NVMLError):  # before ROCm 6.4
            serial = str(self._smi.amdsmi_get_gpu_asic_info(handle)["asic_serial"])
            return f"GPU-{serial.lower().removeprefix('0x')}"

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(self._smi.amdsmi_get_gpu_asic_info(handle)["market_name"])

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        """Return the compute capability of NVIDIA's GPUs with the same data types."""
        try:
            gfx = str(self._smi.amdsmi_get_gpu_asic_info(handle)["target_graphics_version"])
        except KeyError:
            raise self.NVMLError("amdsmi before ROCm 6.3") from None
        if gfx.startswith(("gfx94", "gfx95", "gfx12")):
            return 8, 9  # bf16 and fp8: MI300 and newer
        return (8, 0) if gfx.startswith(("gfx908", "gfx90a", "gfx11")) else (7, 0)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        usage = self._smi.amdsmi_get_gpu_vram_usage(handle)
        total, used = int(usage["vram_total"]) * _MIB, int(usage["vram_used"]) * _MIB
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return [
            SimpleNamespace(
                pid=int(process["pid"]), usedGpuMemory=int(process["memory_usage"]["vram_mem"])
            )
            for process in self._smi.amdsmi_get_gpu_process_list(handle)
        ]

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:  # noqa: ARG002
        return 0  # AMD has no exclusive mode

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        busy = self._smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]
        return SimpleNamespace(gpu=self._number(busy))

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> float:
        power = self._smi.amdsmi_get_power_info(handle)
        # MI300 reports the current power only, older GPUs the average
        current = power.get("current_socket_power")
        watts = power["average_socket_power"] if current in (None, "N/A") else current
        return 1000 * self._number(watts)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> float:
        # a sensor's unit, microwatt, unlike the watt of amdsmi_get_power_info
        return self._number(self._smi.amdsmi_get_power_cap_info(handle)["power_cap"]) / 1000

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> float:  # noqa: ARG002
        smi = self._smi
        hotspot = smi.AmdSmiTemperatureType.HOTSPOT  # data center GPUs have no edge sensor
        current = smi.AmdSmiTemperatureMetric.CURRENT
        return self._number(smi.amdsmi_get_temp_metric(handle, hotspot, current))

    def nvmlDeviceGetP2PStatus(self, handle: Any, other: Any, index: int) -> int:  # noqa: ARG002
        """Return 0 if two GPUs are connected by Infinity Fabric (XGMI), the "NVLink" of AMD."""
        kind = self._smi.amdsmi_topo_get_link_type(handle, other)["type"]
        return 0 if int(kind) == _XGMI else 1

    def _hip_id(self, handle: Any) -> int:
        try:
            return int(self._smi.amdsmi_get_gpu_enumeration_info(handle)["hip_id"])
        except (AttributeError, KeyError, ValueError, self.NVMLError):
            return 0  # before ROCm 6.4: keep amdsmi's order

    def _number(self, value: Any) -> float:
        if value == "N/A":
            raise self.NVMLError("not reported by this GPU")
        return float(value)


@lru_cache(maxsize=1)
def import_amdsmi() -> AmdSmi | None:
    """Return amdsmi in the form of pynvml; None without it or without ROCm."""
    if not is_rocm():
        return None
    try:
        import amdsmi
    except (ImportError, OSError, KeyError):  # amdsmi 6 and 7 without ROCm's libraries
        return None
    return AmdSmi(amdsmi)


@lru_cache(maxsize=1)
def is_rocm() -> bool:
    """Return whether torch is a ROCm build; without torch, whether AMD's driver is loaded.

    torch is not imported: its file `version.py` has the version of HIP.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return DRIVER.exists()
    try:
        lines = Path(spec.origin).with_name("version.py").read_text().splitlines()
    except OSError:
        return False
    return any(re.match(r"hip\b.*= *'", line) for line in lines)


def visible_devices(environ: Mapping[str, str]) -> str | None:
    """Return the list that selects GPUs: on ROCm HIP_VISIBLE_DEVICES takes precedence.

    Its numbers are positions among the GPUs that ROCR_VISIBLE_DEVICES shows.
    """
    if is_rocm() and environ.get("HIP_VISIBLE_DEVICES"):
        return environ["HIP_VISIBLE_DEVICES"]
    return environ.get("CUDA_VISIBLE_DEVICES")


def visibility_variables(devices: str) -> dict[str, str]:
    """Return the variables that show a process these GPUs; "" hides all."""
    if not is_rocm():
        return {"CUDA_VISIBLE_DEVICES": devices}
    # HIP (6.4) shows all GPUs if the list is empty, and reads CUDA's only without its own
    return {"CUDA_VISIBLE_DEVICES": devices, "HIP_VISIBLE_DEVICES": devices or "-1"}
