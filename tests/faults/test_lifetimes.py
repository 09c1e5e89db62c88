"""Nothing outlives the kernel; a dead rank is reported at once."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import psutil
import pytest

import nbdist
from nbdist import Session
from tests.conftest import eventually
from tests.live_kernel import LiveKernel
from tests.nightly import nightly
from tests.processes import gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

START = """%load_ext nbdist
%%distribute -n 2
import os, subprocess
child = subprocess.Popen(['sleep', '300'])
loader = iter(torch.utils.data.DataLoader(range(100), num_workers=1))
next(loader)
(os.getpid(), os.getppid(), child.pid)"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[LiveKernel]:
    """A notebook's kernel whose ranks have children of their own."""
    with LiveKernel(tmp_path) as running:
        for cell in START.split("\n", 1):
            assert running.run(cell).status == "ok"
        yield running


def family(kernel: LiveKernel) -> list[int]:
    kernel_process = psutil.Process(kernel.manager.provisioner.pid)
    return [child.pid for child in kernel_process.children(recursive=True)]


def kill(kernel: LiveKernel) -> None:
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)


def shut_down(kernel: LiveKernel) -> None:
    kernel.manager.shutdown_kernel(now=False)


def restart(kernel: LiveKernel) -> None:
    kernel.manager.restart_kernel(now=False)


@pytest.mark.fault("B5")
@pytest.mark.fault("B6")
@pytest.mark.fault("B12")
@pytest.mark.parametrize("end", [kill, nightly(shut_down), restart])
def test_nothing_outlives_the_kernel(kernel: LiveKernel, end: Callable[[LiveKernel], None]) -> None:
    started = family(kernel)
    assert len(started) >= 5  # launcher, 2 ranks, their subprocesses and loaders
    end(kernel)
    eventually(lambda: gone(started), within_s=5)


def test_one_rank_is_a_process_of_its_own() -> None:
    with nbdist.Session(nproc=1) as session:
        code = "import os\n(rank, world_size, os.environ['WORLD_SIZE'], os.getpid())"
        rank, world_size, env, pid = session.run(code).values[0]
        assert (rank, world_size, env) == (0, 1, "1")
        assert pid == session.status()["ranks"][0]["pid"]


@pytest.mark.fault("A1")
@pytest.mark.fault("A6")
def test_stale_environment_and_busy_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "x",
        "LOCAL_RANK": "3",
    }.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with Session(nproc=2) as session:
            assert session.run("(rank, world_size)").values == {0: (0, 2), 1: (1, 2)}


@pytest.mark.nightly
@pytest.mark.fault("A7")
def test_a_kernel_that_used_accelerate_and_openmp(tmp_path: Path) -> None:
    with LiveKernel(tmp_path, ACCELERATE_USE_FSDP="true") as kernel:
        kernel.run(
            "import torch, accelerate\naccelerate.Accelerator(cpu=True)\n"
            "(torch.ones(300, 300, requires_grad=True) @ torch.ones(300, 300)).sum().backward()"
        )
        kernel.run("%load_ext nbdist")
        shown = kernel.run("%%distribute\naccelerator.prepare(torch.nn.Linear(2, 2))")
        assert "[0-1] DistributedDataParallel" in shown.text


@pytest.mark.fault("A8")
def test_long_temp_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)
    with Session(nproc=1) as session:
        assert session.run("rank").ok
