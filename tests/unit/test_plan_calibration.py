from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.planner import cache, memory_calibration
from nbdist.planner.memory_calibration import DeviceOverhead, MemoryCalibration

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
A100 = {"device": "NVIDIA A100", "backend": "fsdp2", "offload": "none"}
GANG = {"kind": "cuda", "world_size": 2}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "calibration.json"


def test_nothing_learned_gives_the_defaults(file: Path) -> None:
    known = MemoryCalibration(file).overhead_for(**A100, **GANG)
    assert (known.factor, known.runs) == (memory_calibration.DEFAULT_ALLOCATOR_FACTOR, 0)
    assert known.device_bytes(0) == known.context_bytes > 0
    alone = MemoryCalibration(file).overhead_for(**A100, kind="cuda", world_size=1)
    assert alone.context_bytes < known.context_bytes, "one rank needs no communicator"


def test_a_measured_session_is_used_next_time(file: Path) -> None:
    MemoryCalibration(file).record_session(
        **A100, allocated_bytes=10 * GIB, reserved_bytes=11 * GIB, device_bytes=12 * GIB
    )
    known = MemoryCalibration(file).overhead_for(**A100, **GANG)
    assert known == DeviceOverhead(1.1, GIB, 1, cache.today())
    assert known.device_bytes(10 * GIB) == pytest.approx(12 * GIB, rel=1e-4)
    other = MemoryCalibration(file).overhead_for("NVIDIA A100", "ddp", "none", **GANG)
    assert other.runs == 0, "another backend has learned nothing"


def test_a_new_session_counts_as_much_as_the_earlier_ones(file: Path) -> None:
    for reserved in (11, 12):
        learned = MemoryCalibration(file).record_session(
            **A100, allocated_bytes=10 * GIB, reserved_bytes=reserved * GIB, device_bytes=13 * GIB
        )
    assert learned.factor == pytest.approx(1.15)
    assert learned.runs == 2


def test_a_wild_factor_is_bounded(file: Path) -> None:
    learned = MemoryCalibration(file).record_session(
        **A100, allocated_bytes=GIB, reserved_bytes=70 * GIB, device_bytes=71 * GIB
    )
    assert learned.factor == memory_calibration.FACTOR_LIMITS[1]


def entry(factor: str, context: str) -> str:
    fields = f'"factor": {factor}, "context_bytes": {context}, "runs": 1'
    return f'{{"NVIDIA A100 | fsdp2 | none": {{{fields}}}}}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", entry('"x"', "5"), entry("0.1", "5"), entry("NaN", "5"), entry("1.1", "-5")],
)
def test_a_file_that_is_not_ours_is_ignored(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert MemoryCalibration(file).overhead_for(**A100, **GANG).runs == 0


def test_a_folder_that_cannot_be_written_only_forgets(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    learned = MemoryCalibration(blocked / "calibration.json")
    made = learned.record_session(**A100, allocated_bytes=GIB, reserved_bytes=GIB, device_bytes=GIB)
    assert made.runs == 1
    assert blocked.read_text() == ""


def test_the_file_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert memory_calibration.calibration_path() == tmp_path / "nbdist" / "calibration.json"
