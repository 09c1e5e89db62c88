"""What was measured on a machine: kept, read again, believed only where it can be."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from nbdist.planner import (
    cluster_spec,
    measurement_store,
    step_time,
    target_devices,
)
from nbdist.planner.measurement_store import (
    DEFAULT_LOOP_EFFICIENCY,
    MAX_ENTRIES,
    DeviceOverhead,
    Measurement,
    MeasurementStore,
    device_overhead,
    record_device_memory,
)

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GB = 1e9
HOST = "Some Processor, 2 cores"
CURVE = ((4096, 1e-3), (MIB, 2e-3), (64 * MIB, 0.1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "measurements.json"


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


def curve(*points: tuple[int, float]) -> Measurement:
    return Measurement(values={str(size): taken for size, taken in points}, day="2026-11-21")


def test_a_time_is_read_between_sizes_that_were_measured() -> None:
    links = curve(*CURVE)
    assert links.collective_time_s(MIB) == 2e-3
    assert 2e-3 < (links.collective_time_s(8 * MIB) or 0) < 0.1
    assert links.collective_time_s(256 * MIB) == pytest.approx(0.4)
    assert links.collective_time_s(10) == 1e-3, "the latency"


def test_a_single_size_says_nothing_of_much_smaller_ones() -> None:
    links = curve((8 * MIB, 0.01))
    assert links.collective_time_s(MIB) is None
    assert links.collective_time_s(5 * MIB) == 0.01
    assert links.collective_time_s(80 * MIB) == pytest.approx(0.1)


def test_a_profile_counts_half_beside_what_was_there_at_that_size(file: Path) -> None:
    known = MeasurementStore(HOST, file)
    known.record("collective", "here", curve(*CURVE).values)
    new = known.record("collective", "here", {str(60 * MIB): 0.2})
    assert new is not None
    assert new.curve[-1] == (60 * MIB, pytest.approx(0.15))
    assert len(new.curve) == len(CURVE)
    other = known.record("collective", "here", {str(8 * MIB): 0.02})
    assert other is not None
    assert len(other.curve) == len(CURVE) + 1
    assert (other.runs, other.day) == (3, measurement_store.today())


def test_what_is_not_plausible_is_not_averaged_with_what_is(file: Path) -> None:
    known = MeasurementStore(HOST, file)
    before = known.record("collective", "here", curve(*CURVE).values)
    assert known.record("collective", "here", {str(60 * MIB): -0.01}) is None
    assert known.get("collective", "here") == before


# --------------------------------------------------------------------------- the cluster


def test_what_was_measured_counts_before_the_catalogue(file: Path) -> None:
    before = ranks(file)
    quick = rank(
        curves={"all_reduce": [[64 * MIB, 0.01]], "all_gather": rank()["curves"]["all_gather"]}
    )
    slow = rank(products={"fp32": 4e10})
    after = target_devices.apply_calibration([quick, slow], before)
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
    target_devices.apply_calibration([rank(), rank()], ranks(file))
    assert ranks(file).comm_speed is not None
    assert ranks(file, count=4).comm_speed is None
    assert ranks(file, host="Another Processor, 2 cores").comm_speed is None
    assert ranks(file, count=4).with_num_ranks(2).comm_speed is not None
    assert ranks(file).with_num_ranks(4).comm_speed is None
    assert target_devices.parse_devices("2xcpu").comm_speed is None
    assert target_devices.parse_devices("2xcpu").slowest_device.compute_speed is None
    monkeypatch.setattr(measurement_store, "_torch_of", lambda _: "9.0")
    assert ranks(file).comm_speed is None


def test_gpus_that_were_described_in_words_keep_the_catalogues_speeds(file: Path) -> None:
    words = target_devices.parse_devices("2xH100")
    gpu = {"device": "H100-80GB", "copies": {"to_device_pinned": 30e9}}
    found = words.with_measurements(MeasurementStore(HOST, file))
    measured = rank(**gpu, products={"fp32": 5e13, "bf16": 6e14}, memory=2e12)
    after = target_devices.apply_calibration([measured, measured], found)
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
    assert target_devices.parse_devices("2xH100") == words
    assert words.slowest_device.sustained_flops("bf16") == pytest.approx(989.4e12 * 0.52)


def test_a_calibration_replaces_the_one_before_and_counts_runs(file: Path) -> None:
    target_devices.apply_calibration([rank(), rank()], ranks(file))
    slower = {"all_reduce": [[64 * MIB, 0.3]]}
    after = target_devices.apply_calibration(
        [rank(curves=slower), rank(curves=slower)], ranks(file)
    )
    assert after.comm_speed is not None
    assert after.comm_speed["all_reduce"].curve == ((64 * MIB, 0.3),)
    assert after.comm_speed["all_reduce"].runs == 2
    assert after.comm_measured_date == measurement_store.today()


def test_a_disk_that_was_measured_is_planned_with_unless_it_is_memory(file: Path) -> None:
    disk = {"read": 2e9, "write": 1e9, "filesystem": "ext4 on /dev/nvme0n1", "direct": True}
    after = target_devices.apply_calibration([rank(disk=disk), rank(disk=disk)], ranks(file))
    assert after.nvme_bandwidth == pytest.approx(2 / (1 / 4e9 + 1 / 2e9))
    memory = disk | {"read": 9e10, "filesystem": "tmpfs on tmpfs"}
    again = target_devices.apply_calibration([rank(disk=memory), rank(disk=memory)], ranks(file))
    assert again.nvme_bandwidth == after.nvme_bandwidth
    elsewhere = MeasurementStore("Another Processor, 2 cores", file)
    assert elsewhere.latest("disk") is None, "a disk of another machine"


def test_less_is_in_doubt_where_it_was_measured(file: Path) -> None:
    before = ranks(file)
    after = target_devices.apply_calibration([rank(), rank()], before)
    assert after.slowest_device.uncertainty("no") < before.slowest_device.uncertainty("no")
    known = MeasurementStore(HOST, file)
    known.record("loop", f"{after.describe()}, fp32", {"flops": 3e10, "memory": 2e9})
    known.save()
    assert ranks(file).slowest_device.uncertainty("no") < after.slowest_device.uncertainty("no")
    assert ranks(file).slowest_device.sustained_flops("no") == 3e10


def test_a_faster_device_is_faster_in_all_that_was_measured(file: Path) -> None:
    before = target_devices.apply_calibration([rank(), rank()], ranks(file)).slowest_device
    loop = Measurement(values={"flops": 3e10, "memory": 2e9}, day=measurement_store.today())
    assert before.compute_speed is not None
    looped = replace(before, loop_speeds={"fp32": loop})
    for one in (before, looped, target_devices.parse_devices("2xcpu").slowest_device):
        assert one.scaled(2).sustained_flops("no") == pytest.approx(2 * one.sustained_flops("no"))
        assert one.scaled(2).sustained_memory_bandwidth("no") == pytest.approx(
            2 * one.sustained_memory_bandwidth("no")
        )


# ------------------------------------------------------------------- files of any kind


def written(file: Path, kind: str, place: str, **changes: Any) -> MeasurementStore:
    """A file of this machine with one entry changed."""
    target_devices.apply_calibration([rank(), rank()], ranks(file))
    content = json.loads(file.read_text())
    (key,) = [key for key in content[kind] if key.startswith(place)]
    content[kind][key] |= changes
    file.write_text(json.dumps(content))
    return MeasurementStore(HOST, file)


@pytest.mark.parametrize(
    "changes",
    [
        {"values": {str(64 * MIB): 1e-9}},
        {"values": {str(64 * MIB): -1.0}},
        {"values": {str(64 * MIB): math.nan}},
        {"values": {str(64 * MIB): math.inf}},
        {"values": {"0": 1.0}},
        {"values": {"-5": 1.0}},
        {"values": {"64": True}},
        {"values": {"64": "1"}},
        {"values": {str(MIB + n): 0.1 for n in range(100)}},
        {"values": {"size": 0.1}},
        {"values": 7},
        {"values": {}},
        {"values": None},
        {"day": "2999-01-01"},
        {"day": "yesterday"},
        {"day": None},
        {"runs": 0},
        {"runs": "many"},
    ],
    ids=str,
)
def test_links_that_cannot_be_are_ignored(file: Path, changes: dict[str, Any]) -> None:
    place = "all_reduce, 2 CPU ranks"
    assert written(file, "collective", place).get("collective", place) is not None
    assert written(file, "collective", place, **changes).get("collective", place) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"values": {"fp32": 1e30}},
        {"values": {"fp32": 0}},
        {"values": {"fp64": 1e10}},
        {"values": {"memory": 1e9}},
        {"values": []},
        {"values": {"fp32": 1e10, "memory": 1.0}},
        {"values": {"fp32": 1e10, "host_link": -5}},
    ],
    ids=str,
)
def test_computing_that_cannot_be_is_ignored(file: Path, changes: dict[str, Any]) -> None:
    known = written(file, "compute", "2 CPU ranks", **changes)
    assert known.get("compute", "2 CPU ranks") is None


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"7", b"[" * 10**5, b"\x80\x04.", b"\xff\xfe", b"{}" * 9),
        *(b'{"collective": [], "compute": 3}', b'{"disk": {"a": 1}}'),
    ],
)
@pytest.mark.fault("S7")
def test_a_file_of_something_else_counts_as_empty(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    known = MeasurementStore(HOST, file)
    assert known.get("collective", "all_reduce, 2 CPU ranks") is None
    assert known.get("compute", "2 CPU ranks") is None
    assert known.latest("disk") is None
    assert device_overhead(known, *A100, **TWO_GPUS).runs == 0
    assert target_devices.apply_calibration([rank(), rank()], ranks(file)).comm_speed is not None, (
        "and is mended"
    )


def test_a_folder_that_cannot_be_written_only_forgets(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    after = target_devices.apply_calibration([rank(), rank()], ranks(blocked / "measurements.json"))
    assert after.comm_speed is not None
    assert blocked.read_text() == ""


def test_old_entries_make_room_for_new_ones(file: Path) -> None:
    known = MeasurementStore(HOST, file)
    for number in range(MAX_ENTRIES + 3):
        known.record("compute", f"GPU {number}", {"fp32": 1e10})
    assert known.get("compute", "GPU 0") is None
    assert known.get("compute", f"GPU {MAX_ENTRIES + 2}") is not None


def test_the_file_names_no_host_and_is_in_the_cache_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_devices.apply_calibration([rank(), rank()], ranks(file))
    assert socket.gethostname() not in file.read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measurement_store.store_path() == tmp_path / "nbdist" / "measurements.json"


# ----------------------------------------------------------------------- device memory

GIB = 1 << 30
A100 = ("NVIDIA A100", "fsdp2", "none")
TWO_GPUS = {"kind": "cuda", "world_size": 2}


def learned(file: Path, *place: str, **ranks: Any) -> DeviceOverhead:
    return device_overhead(MeasurementStore(file=file), *(place or A100), **(ranks or TWO_GPUS))


def session(file: Path, reserved: int, device: int, allocated: int = 10 * GIB) -> None:
    with mock.patch.object(measurement_store, "store_path", return_value=file):
        record_device_memory(
            *A100, allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=device
        )


def test_without_a_measurement_device_memory_has_the_defaults(file: Path) -> None:
    known = learned(file)
    assert (known.factor, known.runs) == (measurement_store.DEFAULT_ALLOCATOR_FACTOR, 0)
    assert known.device_bytes(0) == known.context_bytes > 0
    alone = learned(file, kind="cuda", world_size=1)
    assert alone.context_bytes < known.context_bytes, "one rank needs no communicator"


def test_a_measured_session_is_used_next_time(file: Path) -> None:
    session(file, 11 * GIB, 12 * GIB)
    known = learned(file)
    assert known == DeviceOverhead(1.1, GIB, 1, measurement_store.today())
    assert known.device_bytes(10 * GIB) == pytest.approx(12 * GIB, rel=1e-4)
    assert learned(file, "NVIDIA A100", "ddp", "none").runs == 0, "another backend"


@pytest.mark.parametrize(
    "values",
    [
        {"factor": 0.1, "context_bytes": 5},
        {"factor": 1.1, "context_bytes": -5},
        {"factor": 1.1},
    ],
    ids=str,
)
def test_overhead_that_cannot_be_is_ignored(file: Path, values: dict[str, Any]) -> None:
    session(file, 11 * GIB, 12 * GIB)
    content = json.loads(file.read_text())
    (entry,) = content["memory"].values()
    entry["values"] = values
    file.write_text(json.dumps(content))
    assert learned(file).runs == 0
