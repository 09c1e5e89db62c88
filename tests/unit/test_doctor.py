"""What the doctor finds, and what it says to do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import nbdist
from nbdist.cluster.run_dir import OrphanResources
from nbdist.doctor import (
    diagnosis,
    finding,
    machine,
    software,
    training_run,
)
from nbdist.doctor.finding import Finding
from nbdist.hardware import deepspeed_requirements
from tests.conftest import eventually
from tests.doubles.nvml import FakeGpu, FakeNvml, driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MB, GB = 2**20, 2**30


def worst(found: Iterable[Finding]) -> list[Finding]:
    return [one for one in found if one.level != "ok"]


def only(found: Iterable[Finding], level: str, words: str) -> Finding:
    """The one finding that is not ok; it says these words and what to do."""
    (one,) = worst(found)
    assert one.level == level
    assert words in one.says
    assert one.do
    return one


# -- the page


def test_the_report_of_this_machine() -> None:
    found = nbdist.doctor()
    topics = {one.topic for one in found.findings}
    assert {"versions", "GPUs", "shared memory", "descriptors", "loopback", "ports"} <= topics
    assert {"compilers", "leftovers", "environment", "checkpoints", "panel"} <= topics
    levels = [finding.LEVELS.index(one.level) for one in found.findings]
    assert levels == sorted(levels)
    tree = json.loads(found.to_json())
    assert tree["level"] == found.level
    assert [set(one) for one in tree["findings"]] == [{"level", "topic", "says", "do"}] * len(
        levels
    )
    assert str(found).startswith(f"nbdist {nbdist.__version__}")


def test_looking_brings_no_torch_and_changes_nothing(tmp_path: Path) -> None:
    code = "import sys, nbdist; nbdist.doctor(); print('torch' in sys.modules)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env
    )
    assert shown.stdout.strip() == "False"
    assert not list(tmp_path.iterdir())


def test_what_it_shows_is_text_and_no_markup() -> None:
    one = Finding("problem", "<b>topic", "<script>alert(1)</script>", "<i>do")
    page = diagnosis.Diagnosis((one,))._repr_html_()
    assert "<script" not in page
    assert "&lt;b&gt;topic" in page
    assert "&lt;i&gt;do" in page


def test_a_check_that_fails_is_reported_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def look() -> Iterator[Finding]:
        yield finding.ok("a", "b")
        raise RuntimeError("strange machine")

    before, one = diagnosis.run_check("ports", look)
    assert before == finding.ok("a", "b")
    assert (one.level, one.topic) == ("note", "ports")
    assert "strange machine" in one.says
    assert "the check of ports failed" in caplog.text


@pytest.mark.fault("B1")
def test_a_session_whose_rank_was_killed_is_a_problem() -> None:
    with nbdist.Session(nproc=1) as running:
        assert worst(training_run.check_session(running)) == []
        os.kill(running.status()["ranks"][0]["pid"], signal.SIGKILL)
        eventually(lambda: running.state == "dead", within_s=5)
        one = only(
            training_run.check_session(running), "problem", "rank 0 ended with signal 9 (SIGKILL)"
        )
        assert "%nbdist restart" in one.do
    assert worst(training_run.check_session(None)) == []


# -- secrets


@pytest.mark.fault("S18")
@pytest.mark.parametrize(
    "name",
    [
        *["HF_TOKEN", "NCCL_API_KEY", "ds_secret", "PGPASSWORD", "AWS_CREDENTIALS", "X_PASSWD"],
        *["DBPASSWORD", "GITHUBTOKEN", "PROXY_AUTHORIZATION"],
    ],
)
def test_a_secret_is_never_shown(name: str) -> None:
    assert finding.redacted_variable(name, "hunter2") == f"{name}=***"
    found = machine.check_environment(
        {name: "hunter2", f"NCCL_{name}": "hunter2", "PYTORCH_X": "1"}
    )
    assert "hunter2" not in str([*found])


@pytest.mark.fault("S18")
def test_the_whole_page_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "NCCL_TOKEN", "MASTER_PASSWORD", "TORCH_NCCL_SECRET"):
        monkeypatch.setenv(name, "hunter2")
    found = nbdist.doctor()
    assert "hunter2" not in found.to_json() + str(found) + found._repr_html_()


# -- versions

GOOD = {"torch": "2.13.0", "accelerate": "1.15.0", "transformers": "5.23.0", "ipykernel": "7.4.0"}
ASKED = ("accelerate<2,>=1.15", "deepspeed<0.20,>=0.19.8", 'pytest>=8; extra == "test"')


def versions_with(**changes: Any) -> list[Finding]:
    given = {"gpus": 0, "driver_cuda": None} | {
        name: changes.pop(name) for name in ("gpus", "driver_cuda") if name in changes
    }
    have = {**GOOD, "deepspeed": "0.19.8", **changes}
    return worst(software.check_versions(have.get, required=ASKED, **given))


def test_the_tested_versions_are_fine() -> None:
    assert versions_with() == []


@pytest.mark.fault("S8")
def test_a_torch_with_a_hole_is_named() -> None:
    only(versions_with(torch="2.9.1+cu128"), "problem", "CVE-2026-24747")
    assert len(versions_with(torch="2.5.0")) == 2
    only(versions_with(transformers="4.57.1"), "problem", "CVE-2026-1839")


def test_a_version_that_nbdist_was_not_made_for_is_named() -> None:
    one = only(versions_with(accelerate="1.10.0"), "problem", "accelerate 1.10.0 is installed")
    assert one.do.startswith('pip install "accelerate<2,>=1.15", or `python -m nbdist.setup')


@pytest.mark.fault("A11")
def test_a_missing_backend_is_named_with_what_needs_it() -> None:
    only(versions_with(deepspeed=None), "problem", "only the zero backends need it")


def test_a_torch_that_cannot_use_the_gpus_is_named() -> None:
    only(versions_with(torch="2.13.0+cpu", gpus=2), "problem", "built for CPUs")
    assert versions_with(torch="2.13.0+cpu", gpus=0) == []
    only(versions_with(torch="2.13.0+cu130", gpus=2, driver_cuda=12), "problem", "supports CUDA 12")
    assert versions_with(torch="2.13.0+cu130", gpus=2, driver_cuda=13) == []


# -- GPUs


def two_gpus(holder: int, **first: Any) -> FakeNvml:
    """Two GPUs, the first of which somebody holds."""
    held = FakeGpu("GPU-0", "NVIDIA H100 80GB", used=((holder, 10 * GB),))
    return FakeNvml([replace(held, **first), FakeGpu("GPU-1", "NVIDIA H100 80GB")])


def checked(nvml: FakeNvml, *own: int, **environ: str) -> list[Finding]:
    with driver(nvml, **environ):
        return [*machine.check_gpus(own=own, driver=Path("/"))]


@pytest.mark.fault("F4")
def test_who_holds_a_gpu_is_named_by_user_and_program() -> None:
    nvml = two_gpus(os.getpid())
    found = checked(nvml)
    assert found[0].says == "2 x NVIDIA H100 80GB, NVLink"
    one = only(found, "note", f"(pid {os.getpid()}, 10.0 GiB)")
    assert one.topic == "GPU 0"
    assert f"held by {psutil.Process().name()} of {psutil.Process().username()}" in one.says
    assert "70.0 GiB of 80.0 GiB free" in one.says
    assert worst(checked(nvml, os.getpid())) == []


def test_a_process_of_another_container_is_named_as_such() -> None:
    only(checked(two_gpus(99999999)), "note", "pid 99999999 of another container")


def test_hidden_gpus_are_reported() -> None:
    hidden, one, wrong = (
        checked(two_gpus(1), 1, CUDA_VISIBLE_DEVICES=given) for given in ("", "1", "7")
    )
    only(hidden, "note", "CUDA_VISIBLE_DEVICES='' shows 0 of 2 GPUs")
    only(one, "note", "shows 1 of 2 GPUs")
    only(wrong, "problem", "shows 0 of 2 GPUs")


def test_a_gpu_in_prohibited_mode_is_a_problem() -> None:
    found = worst(checked(two_gpus(1, mode=2), 1))
    assert [one.level for one in found] == ["problem"]


def test_a_gpu_in_exclusive_use_is_a_problem() -> None:
    exclusive = two_gpus(os.getpid(), mode=3)
    found = checked(exclusive)
    (one,) = [finding for finding in found if finding.level == "problem"]
    assert one.topic == "GPU 0"
    assert one.says.endswith("EXCLUSIVE_PROCESS, and this notebook's own process uses it")
    assert worst(checked(exclusive, os.getpid())) == []


def test_a_gpu_that_fails_is_a_problem() -> None:
    nvml = two_gpus(1)
    nvml.gpus[1] = replace(nvml.gpus[1], lost=True)
    assert only(checked(nvml, 1), "problem", "GPU 1 fails (GPU is lost)").do == "run nvidia-smi"


def test_a_driver_that_does_not_answer_is_a_problem() -> None:
    broken = FakeNvml([], broken=True)
    only(checked(broken), "problem", "version mismatch")
    with driver(broken):
        assert worst(machine.check_gpus(driver=Path("/missing"))) == []


# -- resources


def test_the_shared_memory_of_a_container_is_too_small() -> None:
    small = machine.check_shared_memory(machine.DiskSpace(64 * MB, 64 * MB))
    assert (small.level, "--shm-size" in small.do) == ("problem", True)
    assert machine.check_shared_memory(machine.DiskSpace(GB, 100 * MB)).level == "note"
    assert machine.check_shared_memory(machine.DiskSpace(8 * GB, 8 * GB)).level == "ok"
    assert machine.check_shared_memory(None).level == "problem"


@pytest.mark.fault("A10")
def test_descriptors_are_compared_with_the_need() -> None:
    assert machine.check_file_descriptors(64, 144, 2).level == "problem"
    assert "64 per process; 2 ranks need 144" in machine.check_file_descriptors(64, 144, 2).says
    assert machine.check_file_descriptors(256, 144, 2).level == "note"
    assert machine.check_file_descriptors(4096, 144, 2).level == "ok"


def test_memory_is_compared_with_what_ranks_take_before_any_model() -> None:
    assert machine.check_host_memory(GB, 16 * GB, 2).level == "problem"
    assert machine.check_host_memory(8 * GB, 16 * GB, 2).level == "ok"


def test_a_folder_that_is_not_there_yet_is_judged_by_where_it_would_lie(tmp_path: Path) -> None:
    assert "free in" in machine.check_disk_space("checkpoints", tmp_path / "a" / "b").says
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert machine.check_disk_space("checkpoints", tmp_path / "file" / "x").level == "problem"
    found = machine.check_resources(checkpoints="s3://bucket/run")
    assert [x.says for x in found if x.topic == "checkpoints"] == ["written to s3://bucket/run"]


@pytest.mark.fault("S14")
def test_no_safe_place_for_private_folders_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert machine.check_socket_folder([tmp_path]).level == "note"
    assert "sticky bit" in machine.check_socket_folder([tmp_path]).says
    tmp_path.chmod(0o700)
    assert machine.check_socket_folder([tmp_path]).level == "ok"


# -- builds


def test_a_missing_compiler_is_a_note_since_only_an_offload_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed_requirements, "stale_build_locks", list)
    monkeypatch.setenv("CXX", "no-such-compiler")
    only(software.check_compilers("cpu"), "note", "no-such-compiler is not on PATH")
    monkeypatch.setattr(deepspeed_requirements, "missing_requirements", lambda *_: "")
    assert worst(software.check_compilers()) == []


def test_nvme_on_gpus_needs_the_cuda_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_requirements, "stale_build_locks", list)
    (tmp_path / "libaio.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    only(software.check_compilers("cuda"), "note", "nvcc or CUDA's headers are missing")
    assert worst(software.check_compilers("cpu")) == []
    for file in ("bin/nvcc", "include/cuda.h"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    assert worst(software.check_compilers("cuda")) == []


def test_a_lock_of_a_killed_build_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("op", "building"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").write_text("")
    os.utime(tmp_path / "op" / "lock", (0, 0))
    assert deepspeed_requirements.stale_build_locks() == [tmp_path / "op" / "lock"]
    monkeypatch.setattr(deepspeed_requirements, "missing_requirements", lambda *_: "")
    one = only(software.check_compilers(), "note", "waits forever")
    assert one.do == f"rm {tmp_path}/op/lock"


# -- what is left, what disturbs, what listens


@pytest.mark.fault("F5")
def test_files_of_nccl_are_named_and_left(tmp_path: Path) -> None:
    (tmp_path / "nccl-abc").write_text("")
    only(machine.check_stale_resources(OrphanResources(), shm=tmp_path), "note", "nccl-abc")
    with (tmp_path / "nccl-abc").open():
        assert not [
            one
            for one in machine.check_stale_resources(OrphanResources(), shm=tmp_path)
            if "nccl" in one.says
        ]
    assert (tmp_path / "nccl-abc").exists()


@pytest.mark.fault("A6")
def test_variables_of_another_launcher_are_reported() -> None:
    only(
        machine.check_environment({"RANK": "3", "MASTER_ADDR": "x"}),
        "note",
        "MASTER_ADDR, RANK",
    )


def test_settings_that_slow_down_or_have_no_effect_are_reported() -> None:
    only(
        machine.check_environment({"CUDA_LAUNCH_BLOCKING": "1"}),
        "note",
        "waits for every CUDA kernel",
    )
    assert worst(machine.check_environment({"CUDA_LAUNCH_BLOCKING": "0"})) == []
    only(machine.check_environment({"NCCL_SOCKET_IFNAME": "eth0"}), "note", "no effect")
    only(
        machine.check_environment({"NCCL_IB_HCA": "mlx5"}),
        "note",
        "ranks inherit NCCL_IB_HCA=mlx5",
    )


@pytest.mark.fault("S1")
def test_a_listener_off_loopback_is_a_problem() -> None:
    me = os.getpid()
    with socket.create_server(("127.0.0.1", 0)):
        assert machine.exposed_listeners([me]) == []
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - what is to be found
        address = f"0.0.0.0:{server.getsockname()[1]} (pid {me})"
        assert machine.exposed_listeners([me]) == [address]
        found = worst(machine.check_ports([me]))
    assert [one.level for one in found] == ["problem", "note"]  # of the session, of this kernel
    assert address in found[0].says


def test_a_front_end_that_was_not_built_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.panel.protocol.has_built_assets", lambda: False)
    only(software.check_notebook(), "note", "not built")
    monkeypatch.setattr("nbdist.panel.protocol.has_built_assets", lambda: True)
    assert worst(software.check_notebook()) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    only(software.check_notebook(), "note", "anywidget")
