from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

from nbdist.hardware import discovery
from nbdist.hardware.discovery import Gpu, Machine, SessionNode
from nbdist.hardware.telemetry import GpuReading, NodeUsage
from nbdist.panel import device_sampler
from nbdist.panel.device_sampler import DeviceSampler, device_slots
from nbdist.session.device_placement import DevicePlacement
from tests.conftest import eventually
from tests.doubles.nvml import GIB, FakeNvml, driver, one_gpu

GPU = Gpu("GPU-a", "NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0))
TWO_CPUS = DevicePlacement(2, None)
ONE_GPU = DevicePlacement(1, (0,), ("GPU-a",))
NOBODY = 2**22 + 1
"""A pid that no process of Linux has."""


def looked(nvml: FakeNvml, *, times: int = 1, placement: DevicePlacement = ONE_GPU) -> GpuReading:
    made = DeviceSampler(running(placement, os.getpid()))
    with driver(nvml):
        for _ in range(times):
            moment = made.sample_once()
    return moment.readings[0]


def running(placement: DevicePlacement, *pids: int, **more: Any) -> Any:
    """A session with these ranks."""
    state = {"ranks": [{"rank": rank, "pid": pid} for rank, pid in enumerate(pids)]}
    return SimpleNamespace(placement=placement, status=lambda: state, **({"nodes": []} | more))


def test_every_figure_of_a_gpu() -> None:
    found = looked(one_gpu((os.getpid(), 12 * GIB), (1, 8 * GIB)))
    assert found.used_bytes == 12 * GIB
    assert found.others_bytes == 8 * GIB
    assert found.memory_bytes == 20 * GIB
    assert len(found.holders) == 1
    assert "1" in found.holders[0]
    assert (found.utilization, found.power_w, found.power_limit_w) == (0.87, 312.5, 400.0)
    assert found.temperature_c == 61.0
    assert (found.pcie_tx, found.pcie_rx) == (1000 * 1024, 1001 * 1024)
    assert found.note == ""


def test_links_are_counted_between_two_looks() -> None:
    once, twice = looked(one_gpu()), looked(one_gpu(), times=2)
    assert (once.nvlink_tx, once.nvlink_rx) == (None, None)
    assert (twice.nvlink_tx or 0) > 0
    assert (twice.nvlink_rx or 0) > 0


def test_what_nvml_does_not_tell_is_none() -> None:
    found = looked(one_gpu((os.getpid(), 2 * GIB), bare=True))
    assert found.used_bytes == 2 * GIB
    assert {found.utilization, found.power_w, found.temperature_c, found.pcie_tx} == {None}


def test_pids_of_a_host_that_this_container_does_not_have() -> None:
    found = looked(one_gpu((NOBODY, 12 * GIB)))
    assert found.used_bytes == 20 * GIB
    assert "cannot tell" in found.note


def test_a_driver_that_does_not_answer() -> None:
    assert looked(FakeNvml([], broken=True)) == GpuReading()
    gone = DevicePlacement(1, (0,), ("GPU-b",))
    assert "does not respond" in looked(one_gpu(), placement=gone).note


def test_cpu_ranks_are_resident_memory() -> None:
    made = DeviceSampler(running(TWO_CPUS, os.getpid()))
    own, other = made.sample_once().readings
    assert (own.used_bytes or 0) > 1 << 20
    assert other == GpuReading()
    assert made.peak_bytes[0] == own.used_bytes
    assert [seat.capacity_bytes for seat in made.device_slots] == [
        discovery.host_memory_bytes() // 2
    ] * 2


def test_the_peak_is_kept_and_that_of_a_strategy_starts_again() -> None:
    nvml = one_gpu((os.getpid(), 12 * GIB))
    made = DeviceSampler(running(ONE_GPU, os.getpid()))
    with driver(nvml):
        made.sample_once()
        made.strategy_peak_bytes.clear()
        nvml.gpus = one_gpu((os.getpid(), 5 * GIB)).gpus
        made.sample_once()
    assert (made.peak_bytes[0], made.strategy_peak_bytes[0]) == (12 * GIB, 5 * GIB)


def test_other_processes_of_the_ranks_are_other_peaks() -> None:
    session = running(DevicePlacement(2, None), 1, os.getpid())
    seen = DeviceSampler(session)
    seen.sample_once()
    assert seen.strategy_peak_bytes[1] > 0
    seen.strategy_peak_bytes[1] = seen.peak_bytes[1] = 5 * GIB
    seen.sample_once()
    assert seen.strategy_peak_bytes[1] == 5 * GIB
    session.status()["ranks"][0]["pid"] = os.getppid()
    seen.sample_once()
    assert seen.strategy_peak_bytes[1] < 5 * GIB
    assert seen.peak_bytes[1] < 5 * GIB


def nodes() -> list[SessionNode]:
    """Two: one with a GPU, the other with two CPU ranks."""
    return [
        SessionNode("alpha", (0,), Machine((GPU,), None, 96, 512 * GIB)),
        SessionNode("beta", (1, 2), Machine((), None, 8, 64 * GIB)),
    ]


def test_devices_of_nodes_are_those_that_the_agents_have_found() -> None:
    away = DevicePlacement(3, None, num_nodes=2, is_remote=True)
    found = [
        (one.node, one.name, one.ranks, one.capacity_bytes) for one in device_slots(away, nodes())
    ]
    assert found == [
        ("alpha", "NVIDIA A100 80GB", (0,), 80 * GIB),
        ("beta", "CPU rank 1", (1,), 32 * GIB),
        ("beta", "CPU rank 2", (2,), 32 * GIB),
    ]
    assert [one.capacity_bytes for one in device_slots(away)] == [None] * 3  # before they are there


def test_each_node_is_asked_for_all_of_its_ranks_and_a_silent_one_is_unknown() -> None:
    usage = {
        "alpha": NodeUsage(300 * GIB, {0: GpuReading(used_bytes=12 * GIB, others_bytes=GIB)}),
        "beta": NodeUsage(
            60 * GIB, {1: GpuReading(used_bytes=5 * GIB), 2: GpuReading(used_bytes=GIB)}
        ),
    }

    def told_in_time(within_s: float) -> dict[str, NodeUsage]:
        return usage if within_s <= device_sampler.SAMPLE_INTERVAL_S else {}

    away = DevicePlacement(3, None, num_nodes=2, is_remote=True)
    session = running(away, 7, 7, 8, nodes=nodes(), nodes_now=told_in_time)
    made = DeviceSampler(session)
    assert [one.used_bytes for one in made.sample_once().readings] == [12 * GIB, 5 * GIB, GIB]
    del usage["beta"]
    moment = made.sample_once()
    assert [one.used_bytes for one in moment.readings] == [12 * GIB, None, None]
    assert list(moment.nodes) == ["alpha"]
    assert made.peak_bytes == {0: 12 * GIB, 1: 5 * GIB, 2: GIB}
    session.nodes = nodes()[:1]  # a restart on what is left
    assert len(made.device_slots) == 1
    assert made.peak_bytes == {}


def test_the_thread_samples_only_while_it_is_open() -> None:
    nvml = one_gpu()
    made = DeviceSampler(running(ONE_GPU, os.getpid()))
    with driver(nvml):
        made.start()
        made.start()  # a second panel shares it
        eventually(lambda: made.latest_snapshot, within_s=5)
        made.stop()
    assert nvml.calls == ["init", "shutdown"] * 2  # to find the GPU, and by the thread
    assert "nbdist-devices" not in {thread.name for thread in threading.enumerate()}
