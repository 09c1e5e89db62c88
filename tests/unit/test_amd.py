"""AMD GPUs, with a double of amdsmi: devices, visibility, use, doctor and planner."""

from __future__ import annotations

import os

import pytest

from nbdist.doctor.machine import check_gpus
from nbdist.hardware import amd
from nbdist.hardware.amd import AmdSmi
from nbdist.hardware.discovery import cuda_visible_devices, discover_machine, gpu_memory_usage
from nbdist.hardware.telemetry import GpuMonitor
from nbdist.launcher import device_visibility
from nbdist.planner.gpu_catalog import find_gpu
from tests.doubles.amdsmi import FakeAmdGpu, FakeAmdSmi
from tests.doubles.nvml import driver, machine_with

GIB = 1 << 30


@pytest.fixture(autouse=True)
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm build of torch."""
    monkeypatch.setattr(amd, "is_rocm", lambda: True)


def smi(*gpus: FakeAmdGpu, **more: bool) -> AmdSmi:
    return AmdSmi(FakeAmdSmi(list(gpus), **more))


def test_gpus_are_numbered_as_by_hip() -> None:
    library = smi(FakeAmdGpu(1, gfx="gfx90a", name="AMD Instinct MI210"), FakeAmdGpu(0))
    machine = machine_with(library)
    assert [gpu.name for gpu in machine.gpus] == ["AMD Instinct MI300X", "AMD Instinct MI210"]
    assert [gpu.capability for gpu in machine.gpus] == [(8, 9), (8, 0)]  # fp8, and only bf16
    assert machine.gpus[0].memory_bytes == 196_592 << 20
    assert machine.describe().endswith("NVLink")  # Infinity Fabric


def test_without_infinity_fabric_the_link_is_pcie() -> None:
    library = smi(FakeAmdGpu(0), FakeAmdGpu(1), xgmi=False)
    assert machine_with(library).link == "PCIe"


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"ROCR_VISIBLE_DEVICES": "2,1"}, [2, 1]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": FakeAmdGpu(1).uuid}, [1]),
    ],
)
def test_the_variables_of_rocm_select_gpus(environ: dict[str, str], shown: list[int]) -> None:
    found = machine_with(smi(*map(FakeAmdGpu, range(3))), **environ).gpus
    assert [gpu.uuid for gpu in found] == [FakeAmdGpu(hip_id).uuid for hip_id in shown]


def test_ranks_see_their_gpus_and_the_launcher_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "0")
    device_visibility.hide_gpus()
    assert os.environ["HIP_VISIBLE_DEVICES"] == "-1"  # HIP shows all GPUs if it is empty
    library = smi(*map(FakeAmdGpu, range(3)))
    monkeypatch.setattr(amd, "import_amdsmi", lambda: library)
    shown = device_visibility.shown([FakeAmdGpu(2).uuid])
    assert shown["HIP_VISIBLE_DEVICES"] == shown["CUDA_VISIBLE_DEVICES"] == "2"
    assert device_visibility.is_gpu(shown)
    assert not device_visibility.is_gpu(device_visibility.shown(None))
    assert cuda_visible_devices([FakeAmdGpu(0).uuid]) == "0"


def test_use_and_memory_are_read() -> None:
    own, other = os.getpid(), os.getppid()
    gpu = FakeAmdGpu(0, processes=((own, 6 * GIB), (other, 2 * GIB)))
    with driver(smi(gpu)):
        (reading,) = GpuMonitor().read_gpus([(gpu.uuid, {own})])
        (usage,) = gpu_memory_usage(discover_machine(), own={own})
    assert (reading.used_bytes, reading.others_bytes) == (6 * GIB, 2 * GIB)
    assert (reading.utilization, reading.power_w, reading.power_limit_w) == (0.87, 612, 750)
    assert reading.temperature_c == 61
    assert reading.nvlink_tx is None
    assert usage.free_bytes == (196_592 - 20_000 << 20) + 6 * GIB


def test_values_that_a_gpu_does_not_report_are_absent() -> None:
    gpu = FakeAmdGpu(0, reports=False)
    with driver(smi(gpu)):
        (reading,) = GpuMonitor().read_gpus([(gpu.uuid, ())])
    assert (reading.utilization, reading.power_w) == (None, None)


def test_doctor_lists_the_gpus() -> None:
    with driver(smi(FakeAmdGpu(0))):
        findings = list(check_gpus())
    assert findings[0].says == "1 x AMD Instinct MI300X 192GB"
    assert "172.5 GiB of 192.0 GiB free" in findings[1].says


def test_doctor_reports_a_driver_that_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(amd, "DRIVER", tmp_path_factory.mktemp("amdgpu"))
    with driver(smi(broken=True)):
        (finding,) = check_gpus()
    assert finding.level == "problem"
    assert "AMD's driver does not respond: driver not loaded" in finding.says


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("AMD Instinct MI300X OAM", "MI300X-192GB"),
        ("AMD INSTINCT MI250X (MCM) OAM AC MBA", "MI250X-64GB"),
        ("AMD Instinct MI210", "MI210-64GB"),
        ("MI325X", "MI325X-256GB"),
        ("mi355x", "MI355X-288GB"),
        ("AMD Radeon RX 7900 XTX", "RX7900XTX-24GB"),
        ("AMD Radeon PRO W7900", "W7900-48GB"),
    ],
)
def test_the_planner_knows_common_amd_gpus(name: str, found: str) -> None:
    device = find_gpu(name)
    assert device is not None
    assert device.name == found
    assert device.has_bf16
