"""amdsmi of a machine with the AMD GPUs that a test describes; its answers are as documented."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(eq=False)
class FakeAmdGpu:
    hip_id: int
    name: str = "AMD Instinct MI300X"
    gfx: str = "gfx942"
    vram_mib: int = 196_592
    used_mib: int = 20_000
    processes: tuple[tuple[int, int], ...] = ()
    """Process and bytes."""
    reports: bool = True
    """False for a GPU that answers "N/A"."""

    @property
    def uuid(self) -> str:
        return f"GPU-{self.hip_id:016x}"


@dataclass(eq=False)
class FakeAmdSmi:
    """The functions of amdsmi that are used; a GPU is its own handle, listed in PCI order."""

    gpus: list[FakeAmdGpu]
    xgmi: bool = True
    broken: bool = False
    calls: list[str] = field(default_factory=list)
    AmdSmiInitFlags = SimpleNamespace(INIT_AMD_GPUS=2)
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)

    class AmdSmiException(Exception):  # noqa: N818 - amdsmi's name
        pass

    def amdsmi_init(self, _flags: int) -> None:
        self.calls.append("init")
        if self.broken:
            raise self.AmdSmiException("driver not loaded")

    def amdsmi_shut_down(self) -> None:
        self.calls.append("shut_down")

    def amdsmi_get_processor_handles(self) -> list[FakeAmdGpu]:
        return list(self.gpus)

    def amdsmi_get_gpu_enumeration_info(self, gpu: FakeAmdGpu) -> dict[str, Any]:
        return {"hip_id": gpu.hip_id, "hip_uuid": gpu.uuid}

    def amdsmi_get_gpu_asic_info(self, gpu: FakeAmdGpu) -> dict[str, Any]:
        return {"market_name": gpu.name, "target_graphics_version": gpu.gfx}

    def amdsmi_get_gpu_vram_usage(self, gpu: FakeAmdGpu) -> dict[str, int]:
        return {"vram_total": gpu.vram_mib, "vram_used": gpu.used_mib}

    def amdsmi_get_gpu_process_list(self, gpu: FakeAmdGpu) -> list[dict[str, Any]]:
        return [
            {"name": "python", "pid": pid, "memory_usage": {"vram_mem": size}}
            for pid, size in gpu.processes
        ]

    def amdsmi_get_gpu_activity(self, gpu: FakeAmdGpu) -> dict[str, Any]:
        return {"gfx_activity": 87 if gpu.reports else "N/A"}

    def amdsmi_get_power_info(self, gpu: FakeAmdGpu) -> dict[str, Any]:
        return {
            "current_socket_power": 612 if gpu.reports else "N/A",
            "average_socket_power": "N/A",
        }

    def amdsmi_get_power_cap_info(self, _gpu: FakeAmdGpu) -> dict[str, int]:
        return {"power_cap": 750_000_000}

    def amdsmi_get_temp_metric(self, _gpu: FakeAmdGpu, kind: int, _metric: int) -> int:
        assert kind == self.AmdSmiTemperatureType.HOTSPOT
        return 61

    def amdsmi_topo_get_link_type(self, _gpu: FakeAmdGpu, _other: FakeAmdGpu) -> dict[str, int]:
        return {"hops": 1, "type": 2 if self.xgmi else 1}
