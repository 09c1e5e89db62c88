"""What was measured on a machine: kept, read again, believed only where it can be."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.planner import cache, cluster_spec, device_parser, fit_measurements, step_time
from nbdist.planner import measurement_store as kept
from nbdist.planner.measurement_store import MAX_ENTRIES, MeasurementStore
from nbdist.planner.measurements import (
    DEFAULT_LOOP_EFFICIENCY,
    CommSpeed,
    ComputeSpeed,
    DiskSpeed,
    LoopEfficiency,
    slowest_curves,
)

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GB = 1e9
HOST = "Some Processor, 2 cores"
CURVE = ((4096, 1e-3), (MIB, 2e-3), (64 * MIB, 0.1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "speeds.json"


def rank(**changes: Any) -> dict[str, Any]:
    """What a CPU rank says of itself."""
    curves = {name: [list(one) for one in CURVE] for name in ("all_reduce", "all_gather")}
    usual = {"device": "CPU rank", "curves": curves, "products": {"fp32": 5e10}, "memory": 2e9}
    return usual | changes


def ranks(file: Path, count: int = 2, host: str = HOST) -> cluster_spec.ClusterSpec:
    """CPU ranks of a machine with this file."""
    bare = cluster_spec.cpu_cluster(count, host_memory_bytes=32 << 30, num_cpus=2)
    return bare.with_measurements(MeasurementStore(host, file))


# ------------------------------------------------------------------------------ curves


def test_a_time_is_read_between_sizes_that_were_measured() -> None:
    links = CommSpeed(curves=MappingProxyType({"all_reduce": CURVE}), day="2026-11-21")
    assert links.collective_time_s("all_reduce", MIB) == 2e-3
    assert 2e-3 < (links.collective_time_s("all_reduce", 8 * MIB) or 0) < 0.1
    assert links.collective_time_s("all_reduce", 256 * MIB) == pytest.approx(0.4)
    assert links.collective_time_s("all_reduce", 10) == 1e-3, "the latency"
    assert links.collective_time_s("all_gather", MIB) is None, "another collective was not measured"


def test_a_single_size_says_nothing_of_much_smaller_ones() -> None:
    links = CommSpeed(curves=MappingProxyType({"all_reduce": ((8 * MIB, 0.01),)}), day="2026-11-21")
    assert links.collective_time_s("all_reduce", MIB) is None
    assert links.collective_time_s("all_reduce", 5 * MIB) == 0.01
    assert links.collective_time_s("all_reduce", 80 * MIB) == pytest.approx(0.1)


def test_a_profile_counts_half_beside_what_was_there_at_that_size() -> None:
    links = CommSpeed(curves=MappingProxyType({"all_reduce": CURVE}), day="2026-11-01")
    new = links.with_measurement("all_reduce", 60 * MIB, 0.2, "2026-11-21")
    assert new.curves["all_reduce"][-1] == (60 * MIB, pytest.approx(0.15))
    assert len(new.curves["all_reduce"]) == len(CURVE)
    other = links.with_measurement("all_reduce", 8 * MIB, 0.02, "2026-11-21")
    assert len(other.curves["all_reduce"]) == len(CURVE) + 1
    assert (other.runs, other.day) == (2, "2026-11-21")


def test_of_several_ranks_the_slowest_counts() -> None:
    quick, slow = {"all_reduce": [(MIB, 0.001)]}, {"all_reduce": [(MIB, 0.002)]}
    assert slowest_curves([quick, slow]) == {"all_reduce": ((MIB, 0.002),)}


# --------------------------------------------------------------------------- the cluster


def test_what_was_measured_counts_before_the_catalogue(file: Path) -> None:
    before = ranks(file)
    after = fit_measurements.apply_calibration([rank(), rank(products={"fp32": 4e10})], before)
    assert step_time.collective_time_s("all_reduce", 64 * MIB, after) == 0.1
    assert step_time.collective_time_s("all_reduce", 64 * MIB, before) != 0.1
    same = step_time.collective_time_s("reduce_scatter", 64 * MIB, before)
    assert step_time.collective_time_s("reduce_scatter", 64 * MIB, after) == same, (
        "was not measured"
    )
    assert after.slowest_device.sustained_flops("no") == pytest.approx(
        DEFAULT_LOOP_EFFICIENCY * 4e10
    )
    assert after.slowest_device.sustained_memory_bandwidth("no") == 2e9
    assert ranks(file).slowest_device.sustained_flops("no") == after.slowest_device.sustained_flops(
        "no"
    ), "read from the file"


def test_it_counts_for_this_machine_these_ranks_and_this_torch_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_measurements.apply_calibration([rank(), rank()], ranks(file))
    assert ranks(file).comm_speed is not None
    assert ranks(file, count=4).comm_speed is None
    assert ranks(file, host="Another Processor, 2 cores").comm_speed is None
    assert ranks(file, count=4).with_num_ranks(2).comm_speed is not None
    assert ranks(file).with_num_ranks(4).comm_speed is None
    assert device_parser.parse_devices("2xcpu").comm_speed is None
    assert device_parser.parse_devices("2xcpu").slowest_device.compute_speed is None
    monkeypatch.setattr(kept, "_torch", lambda: "9.0")
    assert ranks(file).comm_speed is None


def test_gpus_that_were_described_in_words_keep_the_catalogues_speeds(file: Path) -> None:
    words = device_parser.parse_devices("2xH100")
    gpu = {"device": "H100-80GB", "copies": {"to_device_pinned": 30e9}}
    found = words.with_measurements(MeasurementStore(HOST, file))
    measured = rank(**gpu, products={"fp32": 5e13, "bf16": 6e14}, memory=2e12)
    after = fit_measurements.apply_calibration([measured, measured], found)
    assert after.slowest_device.sustained_flops("bf16") == pytest.approx(
        DEFAULT_LOOP_EFFICIENCY * 6e14
    )
    assert after.slowest_device.sustained_flops("fp8") > after.slowest_device.sustained_flops(
        "bf16"
    )
    assert after.slowest_device.host_link == 30e9
    assert after.with_num_ranks(4).slowest_device.compute_speed is not None, (
        "one GPU computes as before among more"
    )
    assert device_parser.parse_devices("2xH100") == words
    assert words.slowest_device.sustained_flops("bf16") == pytest.approx(989.4e12 * 0.52)


def test_a_calibration_replaces_the_one_before_and_counts_runs(file: Path) -> None:
    fit_measurements.apply_calibration([rank(), rank()], ranks(file))
    slower = {"all_reduce": [[64 * MIB, 0.3]]}
    after = fit_measurements.apply_calibration(
        [rank(curves=slower), rank(curves=slower)], ranks(file)
    )
    assert after.comm_speed is not None
    assert after.comm_speed.curves["all_reduce"] == ((64 * MIB, 0.3),)
    assert after.comm_speed.runs == 2
    assert after.comm_speed.day == cache.today()


def test_a_disk_that_was_measured_is_planned_with_unless_it_is_memory(file: Path) -> None:
    disk = {"read": 2e9, "write": 1e9, "filesystem": "ext4 on /dev/nvme0n1", "direct": True}
    after = fit_measurements.apply_calibration([rank(disk=disk), rank(disk=disk)], ranks(file))
    assert after.nvme_bandwidth == pytest.approx(2 / (1 / 4e9 + 1 / 2e9))
    memory = disk | {"read": 9e10, "filesystem": "tmpfs on tmpfs"}
    again = fit_measurements.apply_calibration([rank(disk=memory), rank(disk=memory)], ranks(file))
    assert again.nvme_bandwidth == after.nvme_bandwidth
    assert DiskSpeed(read=1.0, write=1.0, filesystem="tmpfs on tmpfs").is_in_memory


def test_less_is_in_doubt_where_it_was_measured(file: Path) -> None:
    before = ranks(file)
    after = fit_measurements.apply_calibration([rank(), rank()], before)
    assert after.slowest_device.uncertainty("no") < before.slowest_device.uncertainty("no")
    known = MeasurementStore(HOST, file)
    loop = LoopEfficiency(flops=3e10, memory=2e9, model="llama", day=cache.today())
    known.store_loop_efficiency(after.describe(), "fp32", loop)
    known.save()
    assert ranks(file).slowest_device.uncertainty("no") < after.slowest_device.uncertainty("no")
    assert ranks(file).slowest_device.sustained_flops("no") == 3e10


def test_a_faster_device_is_faster_in_all_that_was_measured(file: Path) -> None:
    before = fit_measurements.apply_calibration([rank(), rank()], ranks(file)).slowest_device
    loop = LoopEfficiency(flops=3e10, memory=2e9, model="llama", day=cache.today())
    assert before.compute_speed is not None
    looped = replace(
        before, compute_speed=replace(before.compute_speed, loop_efficiency={"fp32": loop})
    )
    for one in (before, looped, device_parser.parse_devices("2xcpu").slowest_device):
        assert one.scaled(2).sustained_flops("no") == pytest.approx(2 * one.sustained_flops("no"))
        assert one.scaled(2).sustained_memory_bandwidth("no") == pytest.approx(
            2 * one.sustained_memory_bandwidth("no")
        )


# ------------------------------------------------------------------- files of any kind


def written(file: Path, section: str, **changes: Any) -> MeasurementStore:
    """A file of this machine with one entry changed."""
    fit_measurements.apply_calibration([rank(), rank()], ranks(file))
    content = json.loads(file.read_text())
    (key,) = content[section]
    content[section][key] |= changes
    file.write_text(json.dumps(content))
    return MeasurementStore(HOST, file)


@pytest.mark.parametrize(
    "changes",
    [
        {"curves": {"all_reduce": [[64 * MIB, 1e-9]]}},
        {"curves": {"all_reduce": [[64 * MIB, -1.0]]}},
        {"curves": {"all_reduce": [[64 * MIB, math.nan]]}},
        {"curves": {"all_reduce": [[64 * MIB, math.inf]]}},
        {"curves": {"all_reduce": [[0, 1.0]]}},
        {"curves": {"all_reduce": [[True, 1.0]]}},
        {"curves": {"all_reduce": [["64", "1"]]}},
        {"curves": {"all_reduce": [[MIB, 0.1]] * 100}},
        {"curves": {"all_reduce": 7}},
        {"curves": {}},
        {"curves": None},
        {"day": "2999-01-01"},
        {"day": "yesterday"},
        {"day": None},
        {"runs": 0},
        {"runs": "many"},
    ],
    ids=str,
)
def test_links_that_cannot_be_are_ignored(file: Path, changes: dict[str, Any]) -> None:
    assert written(file, "links", **changes).comm_speed("2 CPU ranks") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"products": {"fp32": 1e30}},
        {"products": {"fp32": 0}},
        {"products": {"fp32": math.nan}},
        {"products": {"fp32": True}},
        {"products": {}},
        {"products": []},
        {"memory": 1.0},
        {"host_link": -5},
        {"day": 5},
    ],
    ids=str,
)
def test_computing_that_cannot_be_is_ignored(file: Path, changes: dict[str, Any]) -> None:
    assert written(file, "pace", **changes).compute_speed("2 CPU ranks") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "[" * 10**5, '{"links": [], "pace": 3}', '{"links": {"a": 1}}']
)
def test_a_file_of_something_else_counts_as_empty(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    known = MeasurementStore(HOST, file)
    assert known.comm_speed("2 CPU ranks") is None
    assert known.compute_speed("2 CPU ranks") is None
    assert known.disk_speed() is None
    assert (
        fit_measurements.apply_calibration([rank(), rank()], ranks(file)).comm_speed is not None
    ), "and is mended"


def test_a_folder_that_cannot_be_written_only_forgets(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    after = fit_measurements.apply_calibration([rank(), rank()], ranks(blocked / "speeds.json"))
    assert after.comm_speed is not None
    assert blocked.read_text() == ""


def test_old_entries_make_room_for_new_ones(file: Path) -> None:
    known = MeasurementStore(HOST, file)
    pace = ComputeSpeed(matmul_flops={"fp32": 1e10}, day=cache.today(), runs=1)
    for number in range(MAX_ENTRIES + 3):
        known.store_compute_speed(f"GPU {number}", pace)
    assert known.compute_speed("GPU 0") is None
    assert known.compute_speed(f"GPU {MAX_ENTRIES + 2}") == pace


def test_the_file_names_no_host(file: Path) -> None:
    import socket

    fit_measurements.apply_calibration([rank(), rank()], ranks(file))
    assert socket.gethostname() not in file.read_text()
