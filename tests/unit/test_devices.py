from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nbdist.cluster.allocation import RankDistribution
from nbdist.errors import OptionError, StartError
from nbdist.hardware import discovery
from nbdist.hardware.discovery import Gpu, Machine, SessionNode
from nbdist.rank_python import RankPython
from nbdist.session import device_placement as session_placement
from nbdist.session.device_placement import DevicePlacement, choose_placement
from tests.doubles.nvml import GIB, FakeGpu, FakeNvml, driver, machine_with

if TYPE_CHECKING:
    from pathlib import Path


def four() -> FakeNvml:
    return FakeNvml([FakeGpu(f"GPU-{letter}0{letter}") for letter in "abcd"])


def seen(nvml: FakeNvml, visible: str | None = None) -> list[str]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [gpu.uuid for gpu in machine_with(nvml, **environ).gpus]


def machine_of(count: int, *, capability: tuple[int, int] = (8, 0), num_cpus: int = 2) -> Machine:
    gpus = tuple(Gpu(f"GPU-{i}", "NVIDIA L4", 24 * GIB, capability) for i in range(count))
    return Machine(gpus, "PCIe" if count > 1 else None, num_cpus)


# ---- finding


def test_every_gpu_is_found_with_its_figures() -> None:
    nvml = four()
    found = machine_with(nvml)
    assert found.gpus[2] == Gpu("GPU-c0c", "NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0))
    assert found.describe() == "4 x NVIDIA A100 80GB, NVLink"
    assert nvml.calls == ["init", "shutdown"]


def test_a_gpu_that_fails_is_left_out_and_named_until_it_answers() -> None:
    nvml = four()
    working = nvml.gpus[3]
    nvml.gpus[3] = replace(working, lost=True)
    found = machine_with(nvml)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-a0a", "GPU-b0b", "GPU-c0c"]
    assert found.warnings == ("GPU 3 fails (GPU is lost) and is not used; run nvidia-smi",)
    assert machine_with(nvml, CUDA_VISIBLE_DEVICES="0").warnings == ()
    assert len(machine_with(nvml, CUDA_VISIBLE_DEVICES="0,3").warnings) == 1
    nvml.gpus[3] = working
    assert seen(nvml) == ["GPU-a0a", "GPU-b0b", "GPU-c0c", "GPU-d0d"]


def test_a_gpu_that_shares_the_hosts_memory_has_that_of_the_host() -> None:
    nvml = FakeNvml([FakeGpu("GPU-a", "NVIDIA GB10", shares_memory=True)])
    (gpu,) = machine_with(nvml).gpus
    assert gpu.memory_bytes == discovery.host_memory_bytes()


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [("0", None, 1), ("0", "PCI_BUS_ID", 0), ("GPU-b", None, 0), (None, None, 0)],
)
def test_numbers_of_different_gpus_follow_nvidia_smi_and_a_note_says_so(
    visible: str | None, order: str | None, expected: int
) -> None:
    nvml = FakeNvml([FakeGpu("GPU-a", "Tesla T4"), FakeGpu("GPU-b", "NVIDIA A100")])
    environ = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    given = {name: value for name, value in environ.items() if value is not None}
    warnings = machine_with(nvml, **given).warnings
    assert len([one for one in warnings if "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in one]) == expected
    alike = FakeNvml([FakeGpu("GPU-a"), FakeGpu("GPU-b")])
    assert machine_with(alike, **given).warnings == ()


def test_ranks_get_numbers_by_pci_bus() -> None:
    with driver(four()):
        assert discovery.cuda_visible_devices(["GPU-c0c", "GPU-a0a"]) == "2,0"


def test_ranks_get_uuids_where_cuda_may_count_otherwise() -> None:
    uuids = ["GPU-b0b"]
    beside_a_lost_one = four()
    beside_a_lost_one.gpus[0] = FakeGpu("GPU-a0a", lost=True)
    beside_instances = four()
    beside_instances.gpus[0] = FakeGpu("GPU-a0a", instances=(FakeGpu("MIG-1"),))
    gone = FakeNvml([FakeGpu("GPU-a0a")])
    for nvml in (beside_a_lost_one, beside_instances, gone, FakeNvml([], broken=True)):
        with driver(nvml):
            assert discovery.cuda_visible_devices(uuids) == "GPU-b0b"


def test_cuda_shows_a_process_a_single_mig_instance() -> None:
    nvml = FakeNvml(
        [FakeGpu(f"GPU-{i}", instances=(FakeGpu(f"MIG-{i}", "H100 MIG"),)) for i in "ab"]
        + [FakeGpu("GPU-c")]
    )
    found = machine_with(nvml)
    assert [gpu.uuid for gpu in found.gpus] == ["MIG-a"]
    assert found.warnings[0].startswith("H100 MIG is the only one of 3 devices that is used")
    assert seen(nvml, "MIG-b") == ["MIG-b"]
    assert seen(nvml, "2") == ["GPU-c"]


@pytest.mark.fault("A4")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", ["GPU-c0c", "GPU-a0a"]),
        (" 1 , 3 ", ["GPU-b0b", "GPU-d0d"]),
        ("GPU-d0d,GPU-a", ["GPU-d0d", "GPU-a0a"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["GPU-a0a"]),
        ("0,7,1", ["GPU-a0a"]),
        ("0,0", []),
        ("GPU-", []),
        ("GPU-x", []),
        ("\u0661", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(visible: str, expected: list[str]) -> None:
    assert seen(four(), visible) == expected


def test_without_a_driver_no_gpu_is_found() -> None:
    found = machine_with(FakeNvml([], broken=True))
    assert found.gpus == ()
    assert found.describe() == "no GPU: 2 CPU ranks"
    assert found.num_cpus >= 1


def test_a_gpu_in_mig_mode_counts_as_its_first_instance() -> None:
    parts = tuple(
        FakeGpu(f"MIG-{i}", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 * GIB, None) for i in "12"
    )
    nvml = FakeNvml([FakeGpu("GPU-a", "NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), parts)])
    assert seen(nvml) == ["MIG-1"]
    found = machine_with(nvml, CUDA_VISIBLE_DEVICES="MIG-2")
    (gpu,) = found.gpus
    assert (gpu.uuid, gpu.memory_bytes, gpu.capability) == ("MIG-2", 40 * GIB, (9, 0))
    assert "MIG 3g.40gb" in found.describe()


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (FakeNvml([FakeGpu("GPU-a")]), "1 x NVIDIA A100 80GB"),
        (
            FakeNvml(
                [FakeGpu(f"GPU-{i}", "NVIDIA GeForce RTX 4090", 24 * GIB) for i in "ab"],
                nvlink=False,
            ),
            "2 x NVIDIA GeForce RTX 4090 24GB, PCIe",
        ),
        (
            FakeNvml([FakeGpu("GPU-a"), FakeGpu("GPU-b", "NVIDIA H200", 141 * GIB)], nvlink=False),
            "1 x NVIDIA A100 80GB + 1 x NVIDIA H200 141GB, PCIe",
        ),
        (FakeNvml([FakeGpu("GPU-a", "NVIDIA A100-PCIE-40GB", 40 * GIB)]), "1 x NVIDIA A100 40GB"),
        (FakeNvml([FakeGpu("GPU-a", "Tesla V100-SXM2-16GB")]), "1 x Tesla V100 16GB"),
    ],
)
def test_machines_are_described_in_a_few_words(nvml: FakeNvml, expected: str) -> None:
    assert machine_with(nvml).describe() == expected


# ---- choosing


@pytest.mark.parametrize(
    ("nproc", "gpus", "count", "expected"),
    [
        (None, None, 4, (0, 1, 2, 3)),
        (2, None, 4, (0, 1)),
        ("3", None, 4, (0, 1, 2)),
        (None, "2,0", 4, (2, 0)),
        (2, "1, 3", 4, (1, 3)),
        (None, [3], 4, (3,)),
        (1, None, 1, (0,)),
    ],
)
def test_ranks_take_gpus(nproc: Any, gpus: Any, count: int, expected: tuple[int, ...]) -> None:
    placed = choose_placement(nproc, gpus, machine_of(count))
    assert placed == DevicePlacement(len(expected), expected, tuple(f"GPU-{i}" for i in expected))
    assert placed.kind == "cuda"


@pytest.mark.fault("A4")
@pytest.mark.parametrize(
    ("nproc", "gpus", "count", "expected"),
    [
        (None, None, 0, 2),
        (1, None, 0, 1),
        (4, None, 0, 4),
        (8, None, 0, 8),
        (None, "none", 4, 2),
        (6, " none ", 4, 6),
        (None, [], 4, 2),
    ],
)
def test_without_gpus_ranks_take_the_cpu(nproc: Any, gpus: Any, count: int, expected: int) -> None:
    placed = choose_placement(nproc, gpus, machine_of(count))
    assert placed == DevicePlacement(expected, None)
    assert placed.kind == "cpu"


@pytest.mark.fault("A4")
@pytest.mark.parametrize(
    ("nproc", "gpus", "count", "message"),
    [
        (
            8,
            None,
            4,
            r"^8 ranks need 8 GPUs, but 4 are available \(0,1,2,3\)\. Use -n 4 or fewer, or ",
        ),
        (3, "0,2", 4, r"^3 ranks need 3 GPUs, but 2 are available \(0,2\)\. Use -n 2"),
        (1, "0,2", 4, r"^-n 1 contradicts --gpus 0,2 with 2 devices\. Leave one"),
        (None, "0,7", 4, r"^GPU 7 is not visible\. Use --gpus with some of 0,1,2,3\.$"),
        (None, [-1], 4, r"^GPU -1 is not visible"),
        (None, "0", 0, r"^GPU 0 is not visible: no GPU was found\. Leave --gpus out"),
        (None, "1,1", 4, r"^--gpus 1,1 repeats a GPU"),
        (None, [0.5], 4, r"^GPU indices must be integers .*, got 0\.5\.$"),
        (None, [True], 4, r"^GPU indices must be integers .*, got True\.$"),
        (64, None, 0, r"^64 CPU ranks are too many for 2 CPUs: .*\. Use -n 8 or fewer\.$"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    nproc: Any, gpus: Any, count: int, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        choose_placement(nproc, gpus, machine_of(count))


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "", "two", "1e3", "\u0662", "9" * 50])
def test_n_is_a_whole_number(given: Any) -> None:
    with pytest.raises(OptionError, match=r"^-n must be an integer >= 1, got "):
        session_placement.parse_count(given)


@pytest.mark.parametrize(
    "text", ["", ",", "0,", "0-2", "-1", "0;rm", "a", "\u0660", "0 1", "9" * 10_000, "all", "0x1"]
)
def test_gpus_are_a_list_of_indices(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--gpus must be a list of indices") as caught:
        choose_placement(None, text, machine_of(4))
    assert len(str(caught.value)) < 160


# ---- for the strategies


def python_with(*packages: str) -> RankPython:
    return RankPython("/env/bin/python", "3.13.0", dict.fromkeys(packages, "1.0"))


@pytest.mark.parametrize(
    ("capability", "able"), [((7, 5), ""), ((8, 0), "bf16"), ((8, 9), "bf16 fp8")]
)
def test_precisions_follow_the_capability(capability: tuple[int, int], able: str) -> None:
    here = machine_of(2, capability=capability)
    hardware = session_placement.hardware_for_placement(
        choose_placement(None, None, here), here, python=python_with("torchao", "deepspeed")
    )
    assert (hardware.kind, hardware.world_size, hardware.deepspeed) == ("cuda", 2, True)
    assert (hardware.bf16, hardware.fp8) == ("bf16" in able, "fp8" in able)


def nodes_with(*capabilities: tuple[int, int]) -> list[SessionNode]:
    names = {(7, 5): "Tesla T4", (8, 0): "NVIDIA A100", (9, 0): "NVIDIA H100"}
    return [
        SessionNode(
            f"node {i}",
            (2 * i, 2 * i + 1),
            Machine((Gpu(f"GPU-{i}", names[one], 16 * GIB, one),) * 2, "PCIe", 8),
        )
        for i, one in enumerate(capabilities)
    ]


def test_precisions_follow_the_weakest_gpu_of_the_nodes() -> None:
    away = session_placement.cluster_placement(RankDistribution("cuda", 2, 2))

    def able(*capabilities: tuple[int, int]) -> tuple[bool, bool]:
        made = session_placement.hardware_for_placement(
            away, machine_of(4), nodes_with(*capabilities), python_with("torchao")
        )
        return made.bf16, made.fp8

    assert able() == (True, True)  # nobody has seen them yet
    assert able((9, 0), (9, 0)) == (True, True)
    assert able((9, 0), (8, 0)) == (True, False)
    assert able((9, 0), (7, 5)) == (False, False)


def test_gpus_that_differ_between_nodes_are_reported() -> None:
    assert session_placement.mixed_gpus_warning([]) == ""
    assert session_placement.mixed_gpus_warning(nodes_with((8, 0), (8, 0))) == ""
    assert session_placement.mixed_gpus_warning(nodes_with((8, 0), (7, 5), (8, 0))) == (
        "The GPUs of the nodes differ (NVIDIA A100 16GB on node 0, node 2; Tesla T4 16GB on"
        " node 1): only features common to all are used"
    )


def test_float8_needs_a_library_too() -> None:
    here = machine_of(1, capability=(9, 0))
    assert not session_placement.hardware_for_placement(
        choose_placement(None, None, here), here, python=python_with("deepspeed")
    ).fp8


def test_only_the_gpus_of_the_session_count() -> None:
    old = Gpu("GPU-old", "Tesla T4", 16 * GIB, (7, 5))
    here = Machine((*machine_of(1).gpus, old), "PCIe", 2)
    assert session_placement.hardware_for_placement(choose_placement(None, "0", here), here).bf16
    assert not session_placement.hardware_for_placement(
        choose_placement(None, None, here), here
    ).bf16


def test_free_memory_and_processes_that_use_the_rest_are_reported() -> None:
    here, gone = os.getpid(), 2**22 + 1  # above Linux's largest pid
    nvml = FakeNvml([FakeGpu("GPU-0", used=((here, GIB), (gone, 2 * GIB))), FakeGpu("GPU-1")])
    with driver(nvml):
        first, second = discovery.gpu_memory_usage(discovery.discover_machine())
    assert first.free_bytes == 77 * GIB
    assert first.holders == (f"{psutil.Process().name()} (pid {here})", f"pid {gone}")
    assert second == discovery.GpuFreeMemory(80 * GIB)


def chosen_on(nvml: FakeNvml, *, own: tuple[int, ...] = (), gpus: str | None = None) -> list[str]:
    """What is said before ranks start on the GPUs."""
    with driver(nvml):
        found = discovery.discover_machine()
        return session_placement.check_usable(choose_placement(None, gpus, found), found, own=own)


def test_a_gpu_that_this_notebook_holds_exclusively_is_refused_before_ranks_start() -> None:
    nvml = FakeNvml([FakeGpu("GPU-0"), FakeGpu("GPU-1", used=((os.getpid(), GIB),), mode=3)])
    with pytest.raises(StartError) as caught:
        chosen_on(nvml)
    assert str(caught.value) == (
        "GPU 1 cannot be used: its compute mode is EXCLUSIVE_PROCESS, and this notebook's own"
        " process uses it. Exclude it with --gpus, or restart the kernel and use CUDA in"
        " %%distribute cells only."
    )
    assert chosen_on(nvml, own=(os.getpid(),)) == []
    assert chosen_on(nvml, gpus="0") == []


def test_a_gpu_that_takes_no_further_process_is_refused_before_ranks_start() -> None:
    gone = 2**22 + 1  # above Linux's largest pid
    with pytest.raises(StartError, match=rf"EXCLUSIVE_PROCESS, and pid {gone} uses it"):
        chosen_on(FakeNvml([FakeGpu("GPU-0", used=((gone, GIB),), mode=3)]))
    with pytest.raises(
        StartError, match=r"compute mode is PROHIBITED.* nvidia-smi -i GPU-0 -c DEFAULT\.$"
    ):
        chosen_on(FakeNvml([FakeGpu("GPU-0", mode=2)]))


def test_gpus_that_others_fill_are_named() -> None:
    gone = 2**22 + 1
    nvml = FakeNvml(
        [FakeGpu("GPU-0", used=((gone, GIB),)), FakeGpu("GPU-1", used=((gone, 70 * GIB),))]
    )
    assert chosen_on(nvml) == [f"GPU 1 has 10.0 GiB of 80.0 GiB free (used by pid {gone})"]
    assert chosen_on(nvml, own=(gone,)) == []


def test_a_driver_that_is_too_old_to_list_processes_keeps_no_session_from_starting() -> None:
    class OldDriver(FakeNvml):
        class NVMLLibraryMismatchError(Exception):
            pass

        def nvmlDeviceGetComputeRunningProcesses(self, _gpu: FakeGpu) -> list[Any]:  # noqa: N802
            raise self.NVMLLibraryMismatchError

    assert chosen_on(OldDriver([FakeGpu("GPU-0")])) == []


def test_gpu_failures_are_reported_unless_cpu_ranks_were_requested() -> None:
    nvml = FakeNvml([FakeGpu("GPU-0", lost=True)])
    assert chosen_on(nvml) == ["GPU 0 fails (GPU is lost) and is not used; run nvidia-smi"]
    nvml.gpus.append(FakeGpu("GPU-1"))
    assert chosen_on(nvml, gpus="none") == []


@pytest.mark.parametrize("listed", [(2**22 + 1,), ()])
def test_in_a_container_the_memory_of_our_own_ranks_counts_as_free_too(
    listed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML lists the host's pids there, or no process."""
    nvml = FakeNvml([FakeGpu("GPU-0", used=((2**22 + 1, 30 * GIB),))])
    running = [SimpleNamespace(pid=pid, usedGpuMemory=30 * GIB) for pid in listed]
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetComputeRunningProcesses", lambda *_: running)
    with driver(nvml):
        found = discovery.discover_machine()
        (without,) = discovery.gpu_memory_usage(found)
        (ours,) = discovery.gpu_memory_usage(found, own={os.getpid()})
    assert without.free_bytes == 50 * GIB
    assert ours == discovery.GpuFreeMemory(80 * GIB)


def test_a_container_limits_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "find_memory_events_file", lambda: tmp_path / "job" / "events")
    whole = discovery.host_free_memory_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4096\n")
    assert discovery.host_free_memory_bytes() == pytest.approx(whole, rel=0.2)
    (tmp_path / "memory.max").write_text("1004096\n")
    assert discovery.host_free_memory_bytes() == 1_000_000
    (tmp_path / "memory.stat").write_text("anon 96\ninactive_file 4000\n")
    assert discovery.host_free_memory_bytes() == 1_004_000
    assert discovery.host_memory_bytes() == 1_004_096
