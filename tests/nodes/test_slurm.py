"""Ranks on the nodes of a real Slurm, from a notebook."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist.cluster import run_dir
from tests.conftest import eventually
from tests.live_kernel import LiveKernel
from tests.nodes.cells import SUM, dies, refused, stops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.nodes.slurm import Slurm

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]

CELL = "%%distribute --on slurm --nodes 2 -n 2 --time 30\n"


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
    assert any("nbdist.cluster.agent" in line for line in seen)
    assert not [line for line in seen if "hub_key" in line]


def readable(process: psutil.Process) -> list[str]:
    """What others can see of a process: its command line, and root its environment."""
    texts = []
    for name in ("cmdline", "environ"):
        with suppress(OSError):
            texts.append(Path(f"/proc/{process.pid}/{name}").read_bytes().decode(errors="replace"))
    return texts


def test_a_written_script_runs_as_a_job(login: LiveKernel, slurm: Slurm, tmp_path: Path) -> None:
    login.run("%%distribute -n 2\nfor step in range(3): report(loss=float(step + rank))")
    written = login.run(f"%nbdist script {tmp_path}/job")
    assert "sbatch submit.sbatch" in written.text
    file = tmp_path / "job" / "submit.sbatch"
    # torchrun has to find the first node by its name, which these nodes have in Slurm only
    file.write_text(file.read_text().replace("$head_node:", "127.0.0.1:"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm.call("sbatch", "--wait", f"--chdir={file.parent}", f"--export=ALL,PATH={path}", str(file))
    rows = (file.parent / "metrics" / "rank1.jsonl").read_text().splitlines()
    assert [json.loads(row)["loss"] for row in rows] == [1.0, 2.0, 3.0]


def test_stop_keeps_the_job(login: LiveKernel, slurm: Slurm) -> None:
    login.run(CELL + SUM)
    jobs = slurm.jobs()
    stops(login)
    assert "sum 3.0 of 2" in login.run("%%distribute\n" + SUM).text
    assert slurm.jobs() == jobs


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
    assert login.run(CELL + SUM).status == "ok"
    shown = dies(login, lambda: slurm.call("scancel", *slurm.jobs()))
    assert "node" in shown.text
    shown = login.run("%nbdist restart")
    assert shown.status == "ok", shown.text
    assert "sum 3.0 of 2" in login.run(CELL + SUM).text


def test_a_restart_goes_on_with_the_nodes_that_answer(login: LiveKernel, slurm: Slurm) -> None:
    assert login.run(CELL + SUM).status == "ok"
    with slurm.dead("nodeb"):
        assert "nodeb" in dies(login, lambda: slurm.kill("nodeb")).text
        shown = login.run("%nbdist restart")
        assert shown.status == "ok", shown.text
        assert "1 of 2 nodes remain" in shown.text
        assert "sum 1.0 of 1" in login.run("%%distribute\n" + SUM).text


def test_a_restart_can_wait_for_the_node(login: LiveKernel, slurm: Slurm) -> None:
    assert login.run(CELL + SUM).status == "ok"
    with slurm.dead("nodeb"):
        dies(login, lambda: slurm.kill("nodeb"))
        cell = login.send("%nbdist restart --wait")
        login.collect(cell, until="waiting for nodeb: slurmd does not respond")
    shown = login.collect(cell)
    assert shown.status == "ok", shown.text
    assert "sum 3.0 of 2" in login.run("%%distribute\n" + SUM).text


def test_inside_an_allocation_a_restart_goes_on_with_what_is_left_of_it(
    slurm: Slurm, tmp_path: Path
) -> None:
    with slurm.allocation() as inside, LiveKernel(tmp_path, **inside) as kernel:
        kernel.run("%load_ext nbdist")
        assert "sum 3.0 of 2" in kernel.run("%%distribute --on slurm\n" + SUM).text
        try:
            shown = dies(kernel, lambda: slurm.update("nodeb", "down"))
            assert "nodeb" in shown.text
            shown = kernel.run("%nbdist restart")
            assert "1 of 2 nodes remain" in shown.text, shown.text
            assert "sum 1.0 of 1" in kernel.run("%%distribute\n" + SUM).text
            assert slurm.jobs() == [inside["SLURM_JOB_ID"]]
        finally:
            slurm.revive("nodeb")
        kernel.run("%nbdist stop")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--on slurm -n 2 --partition none", "invalid partition"),
        ("--on slurm --nodes 9 -n 9", "Slurm rejected the request"),
        ("--on slurm -n 2 --interface none0", "no interface 'none0'"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    login: LiveKernel, slurm: Slurm, options: str, words: str
) -> None:
    assert words in refused(login, options)
    eventually(lambda: not slurm.jobs(), within_s=10)


def test_inside_an_allocation_its_nodes_are_used(slurm: Slurm, tmp_path: Path) -> None:
    with slurm.allocation() as inside, LiveKernel(tmp_path, **inside) as kernel:
        job = inside["SLURM_JOB_ID"]
        kernel.run("%load_ext nbdist")
        shown = kernel.run("%%distribute --on slurm\n" + SUM)
        assert "sum 3.0 of 2" in shown.text
        assert slurm.jobs() == [job]
        kernel.run("%nbdist stop")
        assert f"inside Slurm job {job}" in refused(kernel, "--on slurm --partition short")
        assert slurm.jobs() == [job]


def test_a_killed_kernel_leaves_no_job(slurm: Slurm, tmp_path: Path) -> None:
    with LiveKernel(tmp_path, **slurm.environ) as kernel:
        kernel.run("%load_ext nbdist")
        assert "sum 3.0 of 2" in kernel.run(CELL + SUM).text
        kernel.manager.signal_kernel(signal.SIGKILL)
        eventually(lambda: not slurm.jobs(), within_s=30)
    lines = [line for process in psutil.process_iter() for line in readable(process)]
    assert not [line for line in lines if "nbdist.cluster.agent" in line]
    eventually(nothing_after_sweeping, within_s=20)


def nothing_after_sweeping() -> bool:
    """As the next start does: folders of those that were killed with everything else."""
    run_dir.remove_orphans(grace_s=1)
    return not run_dir.find_orphans()
