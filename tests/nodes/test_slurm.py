"""Ranks on the nodes of a real Slurm, from a notebook."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist.engines import leftovers
from tests.conftest import eventually
from tests.live_kernel import LiveKernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.nodes.slurm import Slurm

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]

CELL = "%%distribute --on slurm --nodes 2 -n 2 --time 30\n"
SUM = """
import torch.distributed as dist
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
print("sum", total.item(), "of", world_size)
"""
FOREVER = """
import time
import torch.distributed as dist
print("loops")
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
"""
DEATH_S = 5.0


@pytest.fixture(autouse=True)
def nothing_stays(login: LiveKernel, slurm: Slurm) -> Iterator[None]:
    """A stopped session leaves no job."""
    yield
    login.run("%nbdist stop")
    eventually(lambda: not slurm.jobs(), within_s=15)


def test_a_cell_runs_on_two_nodes_and_no_secret_is_seen(login: LiveKernel, slurm: Slurm) -> None:
    shown = login.run(CELL + SUM)
    assert shown.status == "ok", shown.text
    assert "2 CPU ranks on 2 nodes" in shown.text
    assert "sum 3.0 of 2" in shown.text
    (job,) = slurm.jobs()
    assert "nbdist" in slurm.call("squeue", "--noheader", "--format", "%j", "--jobs", job)
    seen = [line for process in psutil.process_iter() for line in readable(process)]
    assert any("nbdist.node.held" in line for line in seen)
    assert not [line for line in seen if "hub_key" in line]


def readable(process: psutil.Process) -> list[str]:
    """What others can see of a process: its command line, and root its environment."""
    texts = []
    for name in ("cmdline", "environ"):
        with suppress(OSError):
            texts.append(Path(f"/proc/{process.pid}/{name}").read_bytes().decode(errors="replace"))
    return texts


def test_values_come_and_go(login: LiveKernel) -> None:
    login.run("given = list(range(5))")
    shown = login.run(CELL.strip() + " --push given --pull taken\ntaken = sum(given) + rank\n")
    assert shown.status == "ok", shown.text
    assert login.run("print('taken', taken)").text.strip() == "taken 10"


def test_a_full_cluster_is_waited_for_and_stop_leaves_the_queue(
    login: LiveKernel, slurm: Slurm
) -> None:
    holder = slurm.holding_all()
    try:
        eventually(slurm.jobs, within_s=10)
        cell = login.send(CELL + SUM)
        shown = login.collect(cell, until="pending")
        assert "is pending: Resources" in shown.text
        login.manager.interrupt_kernel()
        shown = login.collect(cell)
        assert shown.status == "error"
        assert shown.error["ename"] == "CellInterrupted"
        eventually(lambda: len(slurm.jobs()) == 1, within_s=10)
    finally:
        holder.terminate()
        holder.wait(20)
    assert "sum 3.0 of 2" in login.run(CELL + SUM).text


def test_a_cancelled_job_is_a_death_with_slurms_words(login: LiveKernel, slurm: Slurm) -> None:
    cell = login.send(CELL + FOREVER)
    login.collect(cell, until="loops")
    began = time.monotonic()
    slurm.call("scancel", *slurm.jobs())
    shown = login.collect(cell)
    assert time.monotonic() - began < DEATH_S
    assert shown.error["ename"] == "RankDied"
    assert "node" in shown.text
    shown = login.run("%nbdist restart")
    assert shown.status == "ok", shown.text
    assert "sum 3.0 of 2" in login.run(CELL + SUM).text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--on slurm -n 2 --partition none", "invalid partition"),
        ("--on slurm --nodes 9 -n 9", "Slurm does not give the nodes"),
        ("--on slurm -n 2 --time soon", "is no time of Slurm"),
        ("--on slurm", "needs to know how many ranks"),
        ("--on slurm --nodes 2 -n 3", "cannot be spread evenly"),
        ("--on slurm -n 2 --interface none0", "no interface 'none0'"),
        ("--on local --partition short", "can be used with --on slurm"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    login: LiveKernel, slurm: Slurm, options: str, words: str
) -> None:
    login.run("%nbdist stop")
    shown = login.run(f"%%distribute {options}\n1\n")
    assert shown.status == "error"
    assert words in shown.text
    assert "Traceback" not in shown.text
    eventually(lambda: not slurm.jobs(), within_s=10)


def test_inside_an_allocation_its_nodes_are_used(slurm: Slurm, tmp_path: Path) -> None:
    slurm.call("salloc", "--nodes=2", "--no-shell", "--quiet")
    (job,) = slurm.jobs()
    inside = {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", **slurm.environ}
    with LiveKernel(tmp_path, **inside) as kernel:
        kernel.run("%load_ext nbdist")
        shown = kernel.run("%%distribute --on slurm\n" + SUM)
        assert "sum 3.0 of 2" in shown.text
        assert slurm.jobs() == [job]
        kernel.run("%nbdist stop")
        refused = kernel.run("%%distribute --on slurm --partition short\n1\n")
        assert f"inside Slurm's job {job}" in refused.text
    assert slurm.jobs() == [job]
    slurm.call("scancel", job)


def test_other_versions_are_listed_before_anything_starts(slurm: Slurm, tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    (fake / "torch-9.9.dist-info").mkdir(parents=True)
    (fake / "torch-9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9\n")
    with LiveKernel(tmp_path, **slurm.environ) as kernel:
        kernel.run("%load_ext nbdist")
        kernel.run(f"import os; os.environ['PYTHONPATH'] = {str(fake)!r}")
        shown = kernel.run(CELL + SUM)
    assert shown.status == "error"
    assert "torch" in shown.text
    assert "9.9 on nodea, nodeb" in shown.text
    assert "nothing was started" in shown.text


def test_a_killed_kernel_leaves_no_job(slurm: Slurm, tmp_path: Path) -> None:
    with LiveKernel(tmp_path, **slurm.environ) as kernel:
        kernel.run("%load_ext nbdist")
        assert "sum 3.0 of 2" in kernel.run(CELL + SUM).text
        kernel.manager.signal_kernel(signal.SIGKILL)
        eventually(lambda: not slurm.jobs(), within_s=30)
    lines = [line for process in psutil.process_iter() for line in readable(process)]
    assert not [line for line in lines if "nbdist.node.held" in line]
    eventually(nothing_after_sweeping, within_s=20)


def nothing_after_sweeping() -> bool:
    """As the next start does: folders of those that were killed with everything else."""
    leftovers.sweep(grace_s=1)
    return not leftovers.find()
