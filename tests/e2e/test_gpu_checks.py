"""tests/gpu/run.sh on CPU ranks: its results, and that a stopped run leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import eventually

RUN = Path(__file__).parents[1] / "gpu" / "run.sh"


def started(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(RUN), "--rehearse", "--ranks", "1", "--out", str(out), *arguments],
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rows(out: Path) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in json.loads((out / "gpu.json").read_text())["checks"]}


@pytest.mark.nightly
def test_a_short_rehearsal_writes_gpu_json_and_the_table(tmp_path: Path) -> None:
    names = "start,device-before,train-bf16-ddp,descriptors,collectives,fp8"
    process = started(tmp_path, "--only", names)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed + (tmp_path / "checks.log").read_text()
    found = rows(tmp_path)
    assert ",".join(found) == names
    assert found["train-bf16-ddp"]["holds"] is True
    assert "needs 2 GPUs" in found["collectives"]["measured"]
    assert found["fp8"]["status"] == "skipped"
    table = (tmp_path / "gpu.md").read_text()
    assert table.startswith("A rehearsal, which proves nothing about GPUs")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(found)
    assert all(line.count(" | ") == 4 for line in lines if "---" not in line)


def test_what_the_time_does_not_allow_is_not_run(tmp_path: Path) -> None:
    process = started(tmp_path, "--minutes", "0.01")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert {row["status"] for row in rows(tmp_path).values()} == {"not run", "skipped"}


@pytest.mark.nightly
def test_a_run_that_is_stopped_keeps_its_results_and_leaves_no_process(tmp_path: Path) -> None:
    process = started(tmp_path, "--only", "start,descriptors")
    family: list[psutil.Process] = []

    def has_ranks() -> bool:
        family[:] = psutil.Process(process.pid).children(recursive=True)
        try:
            return any("--worker" in process.cmdline() for process in family) and len(family) > 1
        except psutil.Error:  # a short-lived process has ended meanwhile
            return False

    eventually(has_ranks, within_s=60)
    process.terminate()
    printed, _ = process.communicate(timeout=60)
    assert {row["measured"] for row in rows(tmp_path).values()} == {"the run was stopped"}, printed
    assert psutil.wait_procs(family, timeout=15)[1] == []


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    process = started(tmp_path, "--only", "train-bf16-zero9")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no check is named 'train-bf16-zero9'" in printed
