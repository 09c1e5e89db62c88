"""Whatever is killed in whatever order: the next start leaves nothing of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist.cluster import run_dir
from nbdist.cluster.local_launcher import Launcher
from tests.conftest import eventually
from tests.interrupts import meanwhile
from tests.nightly import nightly
from tests.processes import runs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.fault("F4"), pytest.mark.fault("F5")]

KERNEL = """
import json, sys, nbdist
session = nbdist.Session(nproc=2).start()
session.run('''
import subprocess
torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.ones(10).share_memory_()
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
loader = iter(torch.utils.data.DataLoader(range(100), num_workers=2))
first = next(loader)
''', output="none")
print(json.dumps([member["pid"] for member in session.status()["ranks"]]), flush=True)
sys.stdin.read()
"""
"""Stands for a notebook's kernel; its ranks have children of their own."""


@dataclass
class Running:
    """A session of another process."""

    kernel: subprocess.Popen[str]
    launcher: psutil.Process
    ranks: list[psutil.Process]
    family: set[psutil.Process]
    """All that the kernel has started, and what was started by that."""

    def kill(self, who: str) -> None:
        """SIGKILL to the kernel, the launcher or the ranks."""
        for pid in {
            "kernel": [self.kernel.pid],
            "launcher": [self.launcher.pid],
            "ranks": [rank.pid for rank in self.ranks],
        }[who]:
            if psutil.pid_exists(pid):  # torch's and Linux' own rules may have been faster
                os.kill(pid, signal.SIGKILL)

    def living(self) -> list[psutil.Process]:
        return [process for process in self.family if runs(process.pid)]

    def files(self) -> list[Path]:
        """What lies on the machine's folders with a number of ours."""
        pids = [self.kernel.pid, *(one.pid for one in self.family)]
        return [
            path
            for root in run_dir.private_folder_roots()
            for pid in pids
            for path in [*root.glob(f"nbdist-{pid}-*"), *root.glob(f"torch_{pid}_*")]
        ]


@pytest.fixture
def running() -> Iterator[Running]:
    """A session whose kernel, launcher and ranks can be killed."""
    command = [sys.executable, "-c", KERNEL]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as kernel:  # type: ignore[call-overload]
        lines = iter(kernel.stdout)
        line = next(line for line in lines if line.startswith("["))
        ranks = [psutil.Process(pid) for pid in json.loads(line)]
        family = set(psutil.Process(kernel.pid).children(recursive=True))
        yield Running(kernel, ranks[0].parent(), ranks, family)
        kernel.kill()


@pytest.mark.fault("B12")
@pytest.mark.parametrize(
    "order",
    [
        ("kernel", "launcher", "ranks"),
        nightly(("ranks", "launcher", "kernel")),
        nightly(("kernel", "ranks", "launcher")),
        nightly(("launcher", "kernel", "ranks")),
        nightly(("launcher", "ranks", "kernel")),
        nightly(("ranks", "kernel", "launcher")),
    ],
    ids=" ".join,
)
def test_the_next_start_removes_what_is_left_whichever_process_was_killed_first(
    running: Running, order: tuple[str, ...]
) -> None:
    assert len(running.family) >= 9  # launcher, 2 ranks; each with a child and 2 loaders
    assert any(path.name.startswith("torch_") for path in running.files())
    for who in order:
        running.kill(who)
    running.kernel.wait()
    with meanwhile(lambda: run_dir.remove_orphans(grace_s=0.2)):  # two sessions start
        run_dir.remove_orphans(grace_s=0.2)
    eventually(lambda: not running.living(), within_s=5)
    assert not running.files()


@pytest.mark.nightly
@pytest.mark.fault("B7")
def test_a_launcher_that_was_stopped_is_ended_by_the_next_start(running: Running) -> None:
    running.launcher.suspend()
    running.kill("kernel")
    running.kernel.wait()
    assert running.launcher in running.living()
    launcher = Launcher("cpu")
    try:
        eventually(lambda: not running.living(), within_s=10)
        eventually(lambda: not running.files(), within_s=5)
        assert launcher.is_alive
        assert launcher.run_dir.path.exists()
    finally:
        launcher.close()


def test_a_session_that_lives_is_left_alone(running: Running) -> None:
    before = set(running.files())
    run_dir.remove_orphans(grace_s=0)
    assert set(running.living()) >= set(running.ranks)
    assert {path for path in before if path.is_dir()} <= set(running.files())


@pytest.mark.fault("B3")
@pytest.mark.fault("B12")
def test_a_killed_launcher_takes_the_children_of_its_ranks_at_once(running: Running) -> None:
    running.kill("launcher")
    eventually(lambda: not running.living(), within_s=5)
    assert running.kernel.poll() is None


@pytest.mark.fault("B12")
def test_what_a_killed_rank_shared_goes_with_it() -> None:
    import nbdist

    with nbdist.Session(nproc=2) as session:
        session.run(
            "torch.multiprocessing.set_sharing_strategy('file_system')\n"
            "shared = torch.ones(10).share_memory_()"
        )
        pids = [member["pid"] for member in session.status()["ranks"]]
        made = [path for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]  # noqa: S108
        assert len(made) == 2
        os.kill(pids[0], signal.SIGKILL)
        eventually(lambda: not any(path.exists() for path in made), within_s=10)


@pytest.mark.fault("A10")
def test_too_few_descriptors_are_reported_with_the_need() -> None:
    script = "ulimit -n 64; exec $0 -c 'import nbdist; nbdist.Session(nproc=2).start()'"
    command = ["/bin/bash", "-c", script, sys.executable]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "2 ranks need 144 file descriptors in a process and the limit is 64" in shown.stderr
    assert "`ulimit -n 1024`" in shown.stderr
