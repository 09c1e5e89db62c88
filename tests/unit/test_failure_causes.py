"""Who ended first and how; whether the OOM killer did it; who is only stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.checkpoint import FolderStorage
from nbdist.cluster import launcher_process
from nbdist.cluster.launcher_process import EXITED
from nbdist.cluster.local_launcher import LAUNCHER_GONE, LAUNCHER_NAME
from nbdist.hardware.discovery import find_memory_events_file
from nbdist.hardware.process_identity import process_start_ticks
from nbdist.protocol import messages
from nbdist.session import failure_causes
from nbdist.session.failure_causes import (
    OomKillCounter,
    WorkerFailure,
)
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.checkpoint import CheckpointSummary

CRASH = """Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/me/fast.py", line 9 in kernel
  File "/tmp/ipykernel_7/4242.py", line 3 in step
  File "/tmp/ipykernel_7/4242.py", line 5 in <module>
  File "/venv/IPython/core/interactiveshell.py", line 3700 in run_code

Extension modules: numpy, torch (total: 2)
"""
IN_C = """Fatal Python error: Segmentation fault

Current thread 0x00007f2 (most recent call first):
  <no Python frame>

Thread 0x00007f1 (most recent call first):
  File "/venv/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/tmp/ipykernel_7/4242.py", line 5 in <module>
"""


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    """A cgroup of 512 MiB in one of 8 GiB."""
    (tmp_path / "memory.max").write_text(f"{8 * 2**30}\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.events").write_text("oom 0\noom_kill 3\noom_group_kill 0\n")
    return inner / "memory.events"


def died(*ends: tuple[int, int | None], oom: OomKillCounter | None = None, **more: str) -> str:
    exits = [messages.RankExited(1, rank, code, **more) for rank, code in ends]
    stacks = {rank: CRASH for rank, _ in ends}
    death = failure_causes.rank_failure(exits, oom=oom or OomKillCounter(), stack_of=stacks, log="")
    return str(death.to_error(cells={"4242.py": 12}))


def test_the_first_end_is_the_cause_and_later_ones_are_folded() -> None:
    text = died((1, -9), (0, -6), (2, -15))
    assert text.startswith("rank 1 ended with signal 9 (SIGKILL): maybe the OOM killer: see dmesg;")
    assert "Other ranks that ended because of it: rank 0 (signal 6 (SIGABRT))." in text
    assert "rank 2" not in text  # it was asked to end


def test_a_crash_shows_the_frames_up_to_the_cell() -> None:
    text = died((1, -11), words="terminate called\n")
    assert '  "/home/me/fast.py", line 9 in kernel\n  In[12], line 3 in step' in text
    assert "run_code" not in text
    assert text.endswith("Last output of rank 1:\n  terminate called")


def test_a_crash_in_a_thread_of_c_shows_where_the_cell_was() -> None:
    assert failure_causes.format_crash_stack(IN_C, {}).splitlines() == [
        '  "/venv/torch/autograd/graph.py", line 979 in _engine_run_backward',
        "  the cell, line 5 in <module>",
    ]


def test_what_torch_elastic_collected_is_filled_in() -> None:
    end = messages.RankExited(4, 1, None)
    assert failure_causes.with_exit_code(end, messages.AllRanksExited(4, {"1": 3})).code == 3
    assert failure_causes.with_exit_code(end, messages.AllRanksExited(3, {"1": 3})).code is None
    assert "an unknown exit code" in died((1, None))


def test_the_launcher_has_causes_too() -> None:
    killed = messages.AllRanksExited(LAUNCHER_GONE, {LAUNCHER_NAME: -15})
    assert failure_causes.launcher_failure(killed, oom=OomKillCounter()).summary == (
        "the launcher ended with signal 15 (SIGTERM): terminated by kill or a job scheduler"
    )
    failed = messages.AllRanksExited(1, error="OSError: no room")
    failure = failure_causes.launcher_failure(failed, oom=OomKillCounter())
    assert failure.summary == "OSError: no room"


@pytest.mark.fault("F1")
def test_a_kill_that_the_cgroup_counted_names_its_limit(version_2: Path) -> None:
    counter = OomKillCounter(version_2)
    assert "maybe the OOM killer" in died((0, -9), oom=counter)
    version_2.write_text("oom 1\noom_kill 4\noom_group_kill 0\n")
    assert "killed by the kernel's OOM killer (cgroup limit 8.0 GiB)" in died((0, -9), oom=counter)
    assert "OOM" not in died((0, -15), oom=counter)


@pytest.mark.fault("F1")
def test_version_1_counts_too(tmp_path: Path) -> None:
    (tmp_path / "memory.limit_in_bytes").write_text(f"{3 * 2**30}\n")
    events = tmp_path / "memory.oom_control"
    events.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    counter = OomKillCounter(events)
    events.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert counter.describe_kill() == "killed by the kernel's OOM killer (cgroup limit 3.0 GiB)"


@pytest.mark.fault("F1")
@pytest.mark.parametrize(
    ("own", "made", "found"),
    [
        ("0::/user/me\n", "user/me/memory.events", "user/me/memory.events"),
        ("4:cpu,memory:/job\n0::/\n", "memory/job/memory.oom_control", None),
        ("4:memory:/the/hosts/path\n", "memory/memory.oom_control", None),
        ("0::/\n", "cpu.max", ""),
        ("", "cpu.max", ""),
    ],
)
def test_the_cgroup_of_a_process_is_found(
    tmp_path: Path, own: str, made: str, found: str | None
) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).touch()
    (tmp_path / "own").write_text(own)
    wanted = None if found == "" else tmp_path / (found or made)
    assert find_memory_events_file(tmp_path / "own", tmp_path) == wanted


def test_a_machine_without_cgroups_counts_nothing(tmp_path: Path) -> None:
    events = tmp_path / "missing"
    counter = OomKillCounter(events)
    assert not counter.describe_kill()
    events.write_text("oom_kill 1\n")
    assert "the machine is out of memory" in counter.describe_kill()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607 - wherever it is
        yield process
        process.kill()


@pytest.mark.fault("B7")
def test_a_stopped_process_is_reported_once_and_when_it_continues(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_causes, "UNRESPONSIVE_AFTER_S", 0.1)
    seen, lines = failure_causes.StoppedProcessWatch(), list[str]()

    def looked() -> int:
        pids = {"rank 3": sleeper.pid, "rank 4": os.getpid()}
        found = {
            name: launcher_process.ProcessStatus(pid, launcher_process.process_status(pid))
            for name, pid in pids.items()
        }
        lines.extend(seen.update(found))
        return len(lines)

    assert looked() == 0
    os.kill(sleeper.pid, signal.SIGSTOP)
    eventually(looked, within_s=5)
    assert seen.describe("rank 3") == "unresponsive (stopped, state T)"
    assert seen.describe("rank 4") == ""
    assert looked() == 1
    os.kill(sleeper.pid, signal.SIGCONT)
    eventually(lambda: looked() == 2, within_s=5)
    assert lines[1] == "nbdist: rank 3 is running again"
    assert seen.describe("rank 3") == ""


def test_a_rank_lives_on_when_the_system_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a suspend, or by NTP: what the clock derives from the boot time moves."""
    start_ticks = process_start_ticks(os.getpid())
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
    assert launcher_process.process_status(os.getpid(), start_ticks) != EXITED
    assert launcher_process.process_status(os.getpid(), start_ticks + 1) == EXITED


def test_a_death_is_reported_although_the_checkpoint_folder_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of a file server that is gone; this is the thread that reads the ranks' messages."""
    over = threading.Event()

    def hangs(_: FolderStorage) -> list[CheckpointSummary]:
        over.wait(60)
        return []

    monkeypatch.setattr(FolderStorage, "list_checkpoints", hangs)
    session = nbdist.Session(nproc=2, checkpoints=tmp_path)
    began = time.monotonic()
    died = session._record_death(WorkerFailure("rank 1", "ended with exit code 3"))
    assert time.monotonic() - began < 10
    over.set()
    assert died.headline.startswith("rank 1 ended with exit code 3; all ranks were terminated")
