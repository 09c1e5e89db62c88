"""Ranks on two hosts of a Ray cluster: network namespaces with a link that can be cut.

The tests of one module share the cluster, and later ones meet what earlier ones killed.
"""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster import run_dir
from tests.conftest import eventually
from tests.live_kernel import LiveKernel
from tests.nodes.cells import (
    CUT_OFF_S,
    DEATH_S,
    SUM,
    TRAIN,
    dies,
    lines_of,
    refused,
    stops,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.nodes.hosts import Hosts

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(400)]

CELL = "%%distribute --on ray --nodes 2 -n 2\n"
RAYLET = "raylet/raylet"
OWN_END_S = 30.0
WIDE = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
first = next(iter(model.parameters()))
if world_size == 4:
    print(first.device_mesh.mesh_dim_names, first.device_mesh.mesh.tolist())
    print("half", round(first.to_local().sum().item(), 6))
for step in range(4):
    loss = model(torch.ones(4, 8)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", round(loss.item(), 5))
"""


@pytest.fixture(autouse=True)
def nothing_stays(notebook: LiveKernel, hosts: Hosts) -> Iterator[None]:
    """A stopped session leaves nothing on either host."""
    hosts.there.link("up")
    if not hosts.there.processes(RAYLET):
        hosts.start_ray(hosts.there)
    yield
    notebook.run("%nbdist stop")
    eventually(lambda: not hosts.ours(), within_s=OWN_END_S)


def test_a_cell_runs_on_two_hosts(notebook: LiveKernel, hosts: Hosts) -> None:
    shown = notebook.run(CELL + SUM)
    assert shown.status == "ok", shown.text
    assert "2 CPU ranks on 2 nodes" in shown.text
    for host in (hosts.here, hosts.there):
        assert f"sum 3.0 of 2 over {host.name}" in shown.text
        assert host.ours()
    again = notebook.run("%%distribute\nprint('still', total.item())\n")
    assert "still 3.0" in again.text
    status = notebook.run("%nbdist status").text
    for rank, host in enumerate((hosts.here, hosts.there)):
        node = rf"node .*{host.address}.*: 1 CPU rank, .* host memory .* GiB"
        assert re.search(rf"{node}\s+rank {rank}: .* alive, .* GiB", status), status


def test_no_secret_is_in_a_command_line_or_an_environment(
    notebook: LiveKernel, hosts: Hosts
) -> None:
    assert notebook.run(CELL + SUM).status == "ok"
    for host in (hosts.here, hosts.there):
        for process in host.ours():
            assert "hub_key" not in " ".join(process.cmdline())
            assert "hub_key" not in str(process.environ())


def test_an_error_and_stop_leave_the_ranks_alive(notebook: LiveKernel) -> None:
    shown = notebook.run(CELL + "1 / rank\n")
    assert "ZeroDivisionError" in shown.text
    stops(notebook)
    assert "sum 3.0 of 2" in notebook.run("%%distribute\n" + SUM).text


def test_weights_are_sharded_in_a_host_and_replicated_across(notebook: LiveKernel) -> None:
    cell = "%%distribute --on ray --nodes 2 -n 4 --backend fsdp --replicate-across nodes\n"
    shown = notebook.run(cell + WIDE)
    assert shown.status == "ok", shown.text
    assert "4 CPU ranks on 2 nodes" in shown.text
    lines = [lines_of(shown, rank, 4) for rank in range(4)]
    assert {one[0] for one in lines} == {"('dp_replicate', 'dp_shard_cp') [[0, 1], [2, 3]]"}
    halves = [one[1] for one in lines]
    assert halves[:2] == halves[2:]
    assert halves[0] != halves[1]
    sharded = {tuple(one[2:]) for one in lines}
    assert len(sharded) == 1
    notebook.run("%nbdist stop")
    shown = notebook.run(CELL + WIDE)
    assert {tuple(lines_of(shown, rank, 2)) for rank in range(2)} == sharded


@pytest.mark.parametrize("how", ["ray::Node", "nbdist.cluster.agent"])
def test_a_killed_process_of_a_node_is_a_death_and_new_ranks_start(
    notebook: LiveKernel, hosts: Hosts, how: str
) -> None:
    assert notebook.run(CELL + SUM).status == "ok"
    ranks = hosts.ours()
    assert hosts.there.address in dies(notebook, lambda: hosts.there.kill(how)).text
    eventually(lambda: not any(p.is_running() for p in ranks), within_s=DEATH_S)
    again = notebook.run("%nbdist restart")
    assert again.status == "ok", again.text
    assert "sum 3.0 of 2" in notebook.run("%%distribute\n" + SUM).text


def test_training_goes_on_from_a_checkpoint_on_the_nodes_that_are_left(
    notebook: LiveKernel, hosts: Hosts
) -> None:
    first = notebook.run(CELL + TRAIN)
    assert first.status == "ok", first.text
    saved = notebook.run("%nbdist save base --wait --overwrite")
    assert saved.status == "ok", saved.text
    then = notebook.run("%%distribute\nprint('loss', round(step(), 4))\n").text
    assert hosts.there.address in dies(notebook, lambda: hosts.there.kill(RAYLET)).text
    again = notebook.run("%nbdist restart")
    assert again.status == "ok", again.text
    assert "1 of 2 nodes remain" in again.text
    assert notebook.run("%%distribute\n" + TRAIN).status == "ok"
    assert notebook.run("%nbdist load base").status == "ok"
    last = notebook.run("%%distribute\nprint('loss', round(step(), 4), world_size)\n").text
    assert f"{then.strip().removeprefix('[0-1] ')} 1" in last


def test_of_three_hosts_two_go_on(notebook: LiveKernel, hosts: Hosts) -> None:
    hosts.start_ray(hosts.third)
    try:
        shown = notebook.run("%%distribute --on ray --nodes 3 -n 3\n" + SUM)
        assert "sum 6.0 of 3" in shown.text
        assert all(host.ours() for host in hosts.all)
        shown = dies(notebook, lambda: hosts.third.link("down"), within_s=CUT_OFF_S)
        assert hosts.third.address in shown.text
        again = notebook.run("%nbdist restart")
        assert "2 of 3 nodes remain" in again.text, again.text
        assert "sum 3.0 of 2" in notebook.run("%%distribute\n" + SUM).text
        eventually(lambda: not hosts.third.ours(), within_s=OWN_END_S)
    finally:
        hosts.third.kill()


def test_a_restart_can_wait_for_another_node(notebook: LiveKernel, hosts: Hosts) -> None:
    assert notebook.run(CELL + SUM).status == "ok"
    dies(notebook, lambda: hosts.there.kill(RAYLET))
    cell = notebook.send("%nbdist restart --wait")
    notebook.collect(cell, until="waiting for 2 nodes x 1 CPU rank, but the cluster has 1 node")
    hosts.start_ray(hosts.there)
    again = notebook.collect(cell)
    assert again.status == "ok", again.text
    assert "sum 3.0 of 2" in notebook.run("%%distribute\n" + SUM).text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--on ray --nodes 4 -n 4", "not enough for 4 ranks on 4 nodes"),
        ("--on ray --gpus-per-node 1 -n 1", "has 0 GPUs"),
        ("--on ray://10.213.0.1:1 -n 2", "No response from 10.213.0.1:1"),
        ("--on ray -n 2 --nodes 2 --interface none0", "no interface 'none0'"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    notebook: LiveKernel, hosts: Hosts, options: str, words: str
) -> None:
    assert words in refused(notebook, options)
    assert not hosts.ours()


def test_a_notebook_outside_of_the_cluster_uses_rays_client(hosts: Hosts, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="ray[client] is not installed")
    within, cell = hosts.there.within, CELL.replace("ray", f"ray://{hosts.here.address}:10001")
    with LiveKernel(tmp_path, within=within, **hosts.environ) as kernel:
        kernel.run("%load_ext nbdist")
        shown = kernel.run(cell + SUM)
        assert shown.status == "ok", shown.text
        assert f"sum 3.0 of 2 over {hosts.there.name}" in shown.text
        assert kernel.run("%nbdist stop").status == "ok"


def test_without_the_token_nothing_starts(hosts: Hosts, tmp_path: Path) -> None:
    environ = {**hosts.environ, "RAY_AUTH_MODE": "disabled"}
    with LiveKernel(tmp_path, within=hosts.here.within, **environ) as kernel:
        kernel.run("%load_ext nbdist")
        shown = kernel.run(CELL + SUM)
    assert shown.status == "error"
    assert "rejects this notebook" in shown.text
    assert "RAY_AUTH_MODE=token" in shown.text


def test_a_killed_kernel_leaves_nothing(hosts: Hosts, tmp_path: Path) -> None:
    with LiveKernel(tmp_path, within=hosts.here.within, **hosts.environ) as kernel:
        kernel.run("%load_ext nbdist")
        assert "sum 3.0 of 2" in kernel.run(CELL + SUM).text
        kernel.manager.signal_kernel(signal.SIGKILL)
        eventually(lambda: not hosts.ours(), within_s=OWN_END_S)
        run_dir.remove_orphans(grace_s=1)  # as the next start does: the kernel's own folders


def test_a_folder_that_nodes_do_not_share_is_brought_there(hosts: Hosts, tmp_path: Path) -> None:
    hosts.there.kill(RAYLET)
    hosts.start_ray(hosts.there, hidden=tmp_path)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "helper.py").write_text("value = 7\n")
    with LiveKernel(folder, within=hosts.here.within, **hosts.environ) as kernel:
        kernel.run("%load_ext nbdist")
        shown = kernel.run(CELL + "import helper\nprint('helper', helper.value, world_size)\n")
        assert shown.status == "ok", shown.text
        assert "helper 7 2" in shown.text
        kernel.run("%%distribute\n" + TRAIN)
        refused = kernel.run("%nbdist save base --wait")
        assert refused.status == "error"
        assert hosts.there.address in refused.text
        kernel.run("%nbdist stop")
    hosts.there.kill(RAYLET)


def test_other_versions_are_listed_before_anything_starts(hosts: Hosts, tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "torch-9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Name: torch\nVersion: 9.9\n")
    hosts.there.kill(RAYLET)  # else the node may be one that was started without the fake
    hosts.start_ray(hosts.there, PYTHONPATH=f"{fake.parent}:{os.environ.get('PYTHONPATH', '')}")
    with LiveKernel(tmp_path, within=hosts.here.within, **hosts.environ) as kernel:
        kernel.run("%load_ext nbdist")
        shown = kernel.run(CELL + SUM)
    assert shown.status == "error"
    assert "Versions differ between the nodes: torch" in shown.text
    assert "9.9 on" in shown.text
    assert "Nothing was started" in shown.text
    assert not hosts.ours()
