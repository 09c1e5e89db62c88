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
from nbdist.planner.measurement_store import ENTRIES, Known
from nbdist.planner.measurements import LOOP_SHARE, Disk, Links, Loop, Pace, slowest_curves

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


def ranks(file: Path, count: int = 2, host: str = HOST) -> cluster_spec.Cluster:
    """CPU ranks of a machine with this file."""
    bare = cluster_spec.cpu_ranks(count, host_memory_bytes=32 << 30, num_cpus=2)
    return bare.informed(Known(host, file))


# ------------------------------------------------------------------------------ curves


def test_a_time_is_read_between_sizes_that_were_measured() -> None:
    links = Links(curves=MappingProxyType({"all_reduce": CURVE}), day="2026-11-21")
    assert links.seconds("all_reduce", MIB) == 2e-3
    assert 2e-3 < (links.seconds("all_reduce", 8 * MIB) or 0) < 0.1
    assert links.seconds("all_reduce", 256 * MIB) == pytest.approx(0.4)
    assert links.seconds("all_reduce", 10) == 1e-3, "the latency"
    assert links.seconds("all_gather", MIB) is None, "another collective was not measured"


def test_a_single_size_says_nothing_of_much_smaller_ones() -> None:
    links = Links(curves=MappingProxyType({"all_reduce": ((8 * MIB, 0.01),)}), day="2026-11-21")
    assert links.seconds("all_reduce", MIB) is None
    assert links.seconds("all_reduce", 5 * MIB) == 0.01
    assert links.seconds("all_reduce", 80 * MIB) == pytest.approx(0.1)


def test_a_profile_counts_half_beside_what_was_there_at_that_size() -> None:
    links = Links(curves=MappingProxyType({"all_reduce": CURVE}), day="2026-11-01")
    new = links.with_point("all_reduce", 60 * MIB, 0.2, "2026-11-21")
    assert new.curves["all_reduce"][-1] == (60 * MIB, pytest.approx(0.15))
    assert len(new.curves["all_reduce"]) == len(CURVE)
    other = links.with_point("all_reduce", 8 * MIB, 0.02, "2026-11-21")
    assert len(other.curves["all_reduce"]) == len(CURVE) + 1
    assert (other.runs, other.day) == (2, "2026-11-21")


def test_of_several_ranks_the_slowest_counts() -> None:
    quick, slow = {"all_reduce": [(MIB, 0.001)]}, {"all_reduce": [(MIB, 0.002)]}
    assert slowest_curves([quick, slow]) == {"all_reduce": ((MIB, 0.002),)}


# --------------------------------------------------------------------------- the cluster


def test_what_was_measured_counts_before_the_catalogue(file: Path) -> None:
    before = ranks(file)
    after = fit_measurements.calibrated([rank(), rank(products={"fp32": 4e10})], before)
    assert step_time.collective_s("all_reduce", 64 * MIB, after) == 0.1
    assert step_time.collective_s("all_reduce", 64 * MIB, before) != 0.1
    same = step_time.collective_s("reduce_scatter", 64 * MIB, before)
    assert step_time.collective_s("reduce_scatter", 64 * MIB, after) == same, "was not measured"
    assert after.slowest.reached("no") == pytest.approx(LOOP_SHARE * 4e10)
    assert after.slowest.memory_reached("no") == 2e9
    assert ranks(file).slowest.reached("no") == after.slowest.reached("no"), "read from the file"


def test_it_counts_for_this_machine_these_ranks_and_this_torch_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_measurements.calibrated([rank(), rank()], ranks(file))
    assert ranks(file).links is not None
    assert ranks(file, count=4).links is None
    assert ranks(file, host="Another Processor, 2 cores").links is None
    assert ranks(file, count=4).resized(2).links is not None
    assert ranks(file).resized(4).links is None
    assert device_parser.parse("2xcpu").links is None
    assert device_parser.parse("2xcpu").slowest.pace is None
    monkeypatch.setattr(kept, "_torch", lambda: "9.0")
    assert ranks(file).links is None


def test_gpus_that_were_described_in_words_keep_the_catalogues_speeds(file: Path) -> None:
    words = device_parser.parse("2xH100")
    gpu = {"device": "H100-80GB", "copies": {"to_device_pinned": 30e9}}
    found = words.informed(Known(HOST, file))
    measured = rank(**gpu, products={"fp32": 5e13, "bf16": 6e14}, memory=2e12)
    after = fit_measurements.calibrated([measured, measured], found)
    assert after.slowest.reached("bf16") == pytest.approx(LOOP_SHARE * 6e14)
    assert after.slowest.reached("fp8") > after.slowest.reached("bf16")
    assert after.slowest.host_link == 30e9
    assert after.resized(4).slowest.pace is not None, "one GPU computes as before among more"
    assert device_parser.parse("2xH100") == words
    assert words.slowest.reached("bf16") == pytest.approx(989.4e12 * 0.52)


def test_a_calibration_replaces_the_one_before_and_counts_runs(file: Path) -> None:
    fit_measurements.calibrated([rank(), rank()], ranks(file))
    slower = {"all_reduce": [[64 * MIB, 0.3]]}
    after = fit_measurements.calibrated([rank(curves=slower), rank(curves=slower)], ranks(file))
    assert after.links is not None
    assert after.links.curves["all_reduce"] == ((64 * MIB, 0.3),)
    assert after.links.runs == 2
    assert after.links.day == cache.today()


def test_a_disk_that_was_measured_is_planned_with_unless_it_is_memory(file: Path) -> None:
    disk = {"read": 2e9, "write": 1e9, "filesystem": "ext4 on /dev/nvme0n1", "direct": True}
    after = fit_measurements.calibrated([rank(disk=disk), rank(disk=disk)], ranks(file))
    assert after.nvme_bandwidth == pytest.approx(2 / (1 / 4e9 + 1 / 2e9))
    memory = disk | {"read": 9e10, "filesystem": "tmpfs on tmpfs"}
    again = fit_measurements.calibrated([rank(disk=memory), rank(disk=memory)], ranks(file))
    assert again.nvme_bandwidth == after.nvme_bandwidth
    assert Disk(read=1.0, write=1.0, filesystem="tmpfs on tmpfs").in_memory


def test_less_is_in_doubt_where_it_was_measured(file: Path) -> None:
    before = ranks(file)
    after = fit_measurements.calibrated([rank(), rank()], before)
    assert after.slowest.doubt("no") < before.slowest.doubt("no")
    known = Known(HOST, file)
    loop = Loop(flops=3e10, memory=2e9, model="llama", day=cache.today())
    known.keep_loop(after.describe(), "fp32", loop)
    known.save()
    assert ranks(file).slowest.doubt("no") < after.slowest.doubt("no")
    assert ranks(file).slowest.reached("no") == 3e10


def test_a_faster_device_is_faster_in_all_that_was_measured(file: Path) -> None:
    before = fit_measurements.calibrated([rank(), rank()], ranks(file)).slowest
    loop = Loop(flops=3e10, memory=2e9, model="llama", day=cache.today())
    assert before.pace is not None
    looped = replace(before, pace=replace(before.pace, loops={"fp32": loop}))
    for one in (before, looped, device_parser.parse("2xcpu").slowest):
        assert one.faster(2).reached("no") == pytest.approx(2 * one.reached("no"))
        assert one.faster(2).memory_reached("no") == pytest.approx(2 * one.memory_reached("no"))


# ------------------------------------------------------------------- files of any kind


def written(file: Path, section: str, **changes: Any) -> Known:
    """A file of this machine with one entry changed."""
    fit_measurements.calibrated([rank(), rank()], ranks(file))
    content = json.loads(file.read_text())
    (key,) = content[section]
    content[section][key] |= changes
    file.write_text(json.dumps(content))
    return Known(HOST, file)


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
    assert written(file, "links", **changes).links("2 CPU ranks") is None


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
    assert written(file, "pace", **changes).pace("2 CPU ranks") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "[" * 10**5, '{"links": [], "pace": 3}', '{"links": {"a": 1}}']
)
def test_a_file_of_something_else_counts_as_empty(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    known = Known(HOST, file)
    assert known.links("2 CPU ranks") is None
    assert known.pace("2 CPU ranks") is None
    assert known.disk() is None
    assert fit_measurements.calibrated([rank(), rank()], ranks(file)).links is not None, (
        "and is mended"
    )


def test_a_folder_that_cannot_be_written_only_forgets(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    after = fit_measurements.calibrated([rank(), rank()], ranks(blocked / "speeds.json"))
    assert after.links is not None
    assert blocked.read_text() == ""


def test_old_entries_make_room_for_new_ones(file: Path) -> None:
    known = Known(HOST, file)
    pace = Pace(products={"fp32": 1e10}, day=cache.today(), runs=1)
    for number in range(ENTRIES + 3):
        known.keep_pace(f"GPU {number}", pace)
    assert known.pace("GPU 0") is None
    assert known.pace(f"GPU {ENTRIES + 2}") == pace


def test_the_file_names_no_host(file: Path) -> None:
    import socket

    fit_measurements.calibrated([rank(), rank()], ranks(file))
    assert socket.gethostname() not in file.read_text()
