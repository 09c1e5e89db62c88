"""Ray and Slurm without either: what is asked of them, how ranks are spread, what they say."""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster import node_bootstrap, slurm
from nbdist.cluster.allocation import (
    AllocatedNode,
    AllocationRequest,
    RankDistribution,
    check_versions,
    fit_to_nodes,
    requested_counts,
)
from nbdist.cluster.ray import RayCluster, error_cause
from nbdist.cluster.slurm import SlurmCluster, parse_ended_tasks
from nbdist.errors import OptionError, StartError
from nbdist.hardware.discovery import Gpu, Machine, SessionNode
from nbdist.magics import arguments
from nbdist.session import config
from nbdist.session import device_placement as session_placement
from nbdist.session.config import SessionCluster

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nbdist.cluster.allocation import DeviceType

TWO_OF_FOUR = {"a": 4, "b": 4}


def wanted(
    nproc: int | None = None,
    nodes: int | None = None,
    each: int | None = None,
    kind: DeviceType = "cuda",
) -> AllocationRequest:
    return AllocationRequest(kind=kind, nproc=nproc, nodes=nodes, gpus_per_node=each)


@pytest.mark.parametrize(
    ("wish", "there_are", "spread"),
    [
        (wanted(8), TWO_OF_FOUR, (2, 4)),
        (wanted(4), TWO_OF_FOUR, (1, 4)),
        (wanted(6), {"a": 4, "b": 2, "c": 2}, (3, 2)),
        (wanted(nodes=2), {"a": 4, "b": 8, "c": 2}, (2, 4)),
        (wanted(4, nodes=2), TWO_OF_FOUR, (2, 2)),
        (wanted(each=2), {"a": 4, "b": 2, "c": 1}, (2, 2)),
        (wanted(nodes=2, each=1), TWO_OF_FOUR, (2, 1)),
        (wanted(), {"a": 4, "b": 4, "head": 0}, (2, 4)),
        (wanted(2, kind="cpu"), {"a": 2, "b": 2}, (1, 2)),
        (wanted(nodes=2, kind="cpu"), {"a": 2, "b": 2}, (2, 1)),
        (wanted(kind="cpu"), {"a": 2, "b": 16}, (2, 1)),
    ],
)
def test_ranks_are_spread_evenly_over_few_nodes(
    wish: AllocationRequest, there_are: Mapping[str, int], spread: tuple[int, int]
) -> None:
    found = fit_to_nodes(wish, there_are, "The cluster")
    assert (found.num_nodes, found.ranks_per_node) == spread
    assert found.nproc == spread[0] * spread[1]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (wanted(16), "has 8 GPUs (4 on a, 4 on b), not enough for 16 ranks"),
        (wanted(nodes=3), "not enough for ranks on 3 nodes. Use --nodes 2 --gpus-per-node 4"),
        (wanted(nodes=2, each=8), "on 2 nodes with 8 GPUs each"),
        (wanted(16, kind="cpu"), "Use --nodes 2 -n 8 or less"),
    ],
)
def test_too_few_says_how_many_there_are_and_what_is_granted(
    wish: AllocationRequest, words: str
) -> None:
    with pytest.raises(StartError) as refused:
        fit_to_nodes(wish, TWO_OF_FOUR, "The cluster")
    assert words in str(refused.value)


def test_a_cluster_without_gpus_says_so() -> None:
    with pytest.raises(StartError, match=r"has 0 GPUs .none., .* --gpus-per-node 0 for CPU ranks"):
        fit_to_nodes(wanted(1), {"a": 0}, "The cluster")


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (wanted(7, nodes=2), "Use -n 6 or -n 8"),
        (wanted(1, nodes=2), "Use -n 2"),
        (wanted(7, each=4), "cannot be spread evenly with --gpus-per-node 4"),
        (wanted(8, nodes=2, each=2), "which are 4 ranks"),
    ],
)
def test_contradictions_are_refused(wish: AllocationRequest, words: str) -> None:
    with pytest.raises(OptionError) as refused:
        requested_counts(wish)
    assert words in str(refused.value)


def place(name: str, **versions: str) -> AllocatedNode:
    return AllocatedNode(name=name, address="10.0.0.1", ranks=1, versions=versions)


HERE = {"python": "3.11.7", "torch": "2.13.0", "nbdist": "0.1.0"}


def test_equal_versions_pass_and_python_may_differ_in_its_last_number() -> None:
    check_versions(HERE, [place("a", **HERE), place("b", **{**HERE, "python": "3.11.9"})])


def test_other_versions_are_listed_with_their_nodes() -> None:
    other = {**HERE, "torch": "2.12.0", "python": "3.12.1"}
    with pytest.raises(StartError) as refused:
        check_versions(HERE, [place("a", **HERE), place("b", **other), place("c", **other)])
    assert "python 3.11.7 on the notebook, a, 3.12.1 on b, c" in str(refused.value)
    assert "torch 2.13.0 on the notebook, a, 2.12.0 on b, c" in str(refused.value)
    assert "nbdist 0" not in str(refused.value)


@pytest.mark.parametrize("on", ["ray", "ray://auto", "ray://head:10001", "ray://10.0.0.1"])
def test_ray_is_named_in_four_ways(on: str) -> None:
    assert isinstance(config.create_cluster(on, {"nodes": 2}), RayCluster)


def test_what_tab_offers_is_a_place() -> None:
    assert set(arguments.OPTION_VALUES["--on"]) >= {"local", "ray", "ray://auto", "slurm"}
    for on in arguments.OPTION_VALUES["--on"]:
        config.create_cluster(on + "head" * on.endswith("//"), {})


@pytest.mark.parametrize(
    ("on", "given", "words"),
    [
        ("slum", {}, "Unknown --on 'slum'"),
        ("ray:/head", {}, "Unknown --on"),
        ("ray://a b", {}, "Unknown --on"),
        ("local", {"nodes": 2}, "--nodes can be used with --on ray or --on slurm only"),
        ("local", {"gpus_per_node": 2}, "--gpus-per-node can be used"),
        ("ray", {"partition": "p", "time": "1"}, "--partition, --time can be used with --on slurm"),
        ("slurm", {"time": "1h"}, "is not a Slurm time"),
    ],
)
def test_what_a_place_does_not_have_is_refused(
    on: str, given: Mapping[str, object], words: str
) -> None:
    with pytest.raises(OptionError) as refused:
        config.create_cluster(on, given)
    assert words in str(refused.value)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("srun")
def test_slurm_distributes_ranks_as_requested() -> None:
    cluster = SlurmCluster()
    assert cluster.distribute_ranks(2, None, None) == RankDistribution("cpu", 1, 2)
    assert cluster.distribute_ranks(8, 2, None) == RankDistribution("cpu", 2, 4)
    assert cluster.distribute_ranks(None, 2, 4) == RankDistribution("cuda", 2, 4)
    assert cluster.distribute_ranks(8, None, 4) == RankDistribution("cuda", 2, 4)
    with pytest.raises(OptionError, match="needs the number of ranks"):
        cluster.distribute_ranks(None, None, None)


@pytest.mark.usefixtures("srun")
def test_inside_an_allocation_its_own_numbers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert SlurmCluster().distribute_ranks(None, None, None) == RankDistribution("cuda", 3, 4)
    with pytest.raises(OptionError, match="inside Slurm job 7"):
        SlurmCluster(partition="other")


@pytest.mark.parametrize(
    ("line", "tasks"),
    [
        ("srun: error: n1: task 1: Killed", [1]),
        ("srun: error: n1: tasks 0,2-3: Exited with exit code 1", [0, 2, 3]),
        ("srun: job 5 queued and waiting for resources", []),
    ],
)
def test_the_ends_that_srun_tells(line: str, tasks: list[int]) -> None:
    assert list(parse_ended_tasks(line)) == tasks


FAKE = """#!{python}
import json, sys
print("a banner of the site", flush=True)
{body}
"""
ANSWERS = """
for line in sys.stdin:
    if "about" in json.loads(line):
        for task, address in enumerate(["10.0.0.2", "10.0.0.1"]):
            about = dict(host=f"n{task}", address=address, toward="10.0.0.1", gpus=[],
                         has_folder=True, versions=VERSIONS)
            print("nbdist-place " + json.dumps(dict(task=task, about=about)), flush=True)
    else:
        given = json.loads(line)["tickets"]
        print("nbdist-place " + json.dumps(dict(task=1, ended=f"got {given[1]}")), flush=True)
        print("srun: error: Node failure on n0", file=sys.stderr, flush=True)
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: None) -> Path:  # noqa: ARG001
    """A program in the place of srun, whose body the test writes."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    file = tmp_path / "srun"
    file.touch(mode=0o700)
    return file


def allotted(srun: Path, body: str) -> tuple[SlurmCluster, list[AllocatedNode]]:
    srun.write_text(FAKE.format(python=sys.executable, body=body))
    cluster = SlurmCluster()
    cluster.distribution = RankDistribution("cpu", 2, 1)
    return cluster, cluster.allocate_nodes(lambda _: None)


def test_tasks_become_places_and_get_their_own_tickets(srun: Path) -> None:
    cluster, places = allotted(
        srun, ANSWERS.replace("VERSIONS", repr(node_bootstrap.software_versions()))
    )
    try:
        assert [(one.name, one.address) for one in places] == [
            ("n1", "10.0.0.1"),
            ("n0", "10.0.0.2"),
        ]
        assert cluster.kernel_address == "10.0.0.1"
        cluster.start_agents(["first", "second"])
        while len(cluster.lost_nodes()) < 2:
            pass
        assert cluster.lost_nodes() == {
            0: "is lost: got first",
            1: "is lost: Slurm reported a node failure",
        }
    finally:
        cluster.close()
    assert cluster.lost_nodes() == {}


SINFO = """#!/bin/sh
echo 'n0 debug idle
n0 short* idle
n1 short* mixed
n2 short* down*
n3 short* drained
n4 short* idle*
n5 debug allocated'
"""
SQUEUE = """#!/bin/sh
echo 'n[0-1]'
"""
SCONTROL = """#!/bin/sh
if [ "$2" = hostnames ]; then echo n0; echo n1; exit; fi
if [ "$3" = n1 ]; then echo "NodeName=n1 NodeAddr=127.0.0.1 NodeHostName=n1 Port={port} X=1"; fi
"""


def install(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)


@pytest.mark.parametrize(
    ("job", "partition", "names"),
    [("", "", {"n0", "n1"}), ("", "debug", {"n0", "n5"}), ("7", "", {"n0", "n1"})],
)
def test_the_nodes_that_slurm_gives_jobs(
    srun: Path, job: str, partition: str, names: set[str]
) -> None:
    install(srun.parent, sinfo=SINFO, squeue=SQUEUE, scontrol=SCONTROL)
    assert slurm.usable_nodes(job=job, partition=partition) == names


def test_after_a_death_fewer_nodes_are_left_where_one_is_silent(srun: Path) -> None:
    cluster, _ = allotted(
        srun, ANSWERS.replace("VERSIONS", repr(node_bootstrap.software_versions()))
    )
    cluster.close()
    assert cluster.num_available_nodes("cpu", 1, 2) == 2  # Slurm says nothing
    with socket.create_server(("127.0.0.1", 0)) as slurmd:
        port = slurmd.getsockname()[1]
        install(srun.parent, sinfo=SINFO, scontrol=SCONTROL.format(port=port))
        assert slurm.is_reachable("n0")  # Slurm does not say where it is
        assert slurm.is_reachable("n1")
        assert cluster.num_available_nodes("cpu", 1, 2) == 2
    assert not slurm.is_reachable("n1")
    assert cluster.num_available_nodes("cpu", 1, 2) == 1


def test_a_refusal_of_srun_is_quoted(srun: Path) -> None:
    with pytest.raises(StartError, match="rejected the request: no such account"):
        allotted(srun, 'sys.exit("srun: error: no such account")')


def test_without_srun_it_says_where_to_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outside: None
) -> None:
    assert outside is None
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match="login node"):
        SlurmCluster().distribute_ranks(2, None, 0)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartError, match=r"pip install 'ray\[client\]'"):
        RayCluster().distribute_ranks(2, None, None)


def test_the_connection_of_a_session_is_not_used_for_another_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(RayCluster, "connected_to", "10.0.0.1:10001")
    with pytest.raises(
        StartError, match=r"another \(10\.0\.0\.1:10001\)\. End it with %nbdist stop"
    ):
        RayCluster("10.0.0.2").distribute_ranks(2, None, None)


def test_rays_errors_lose_their_numbers_and_guesses() -> None:
    class ActorDiedError(Exception):
        pass

    error = ActorDiedError(
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Node\n"
        "The actor is dead because its worker process has died. Some common causes include: (1)"
    )
    assert error_cause(error) == (
        "Ray reported that its actor died: The actor is dead because its worker process has died"
    )


class FakeCluster:
    """Says what `Where` asks."""

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, ...]] = []
        self.nodes = 2

    def distribute_ranks(
        self, nproc: int | None, nodes: int | None, each: int | None
    ) -> RankDistribution:
        self.asked.append((nproc, nodes, each))
        kind: DeviceType = "cpu" if each == 0 else "cuda"
        return fit_to_nodes(wanted(nproc, nodes, each or None, kind), TWO_OF_FOUR, "It")

    def num_available_nodes(self, _kind: DeviceType, _each: int, nodes: int) -> int:
        return min(nodes, self.nodes)


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> SessionCluster:
    monkeypatch.setattr(config, "create_cluster", lambda *_: FakeCluster())
    return SessionCluster({"on": "ray"})


def chosen(where: SessionCluster, **given: object) -> config.SessionConfig:
    return config.SessionConfig.from_options({"auto": False, **given}, where)


def test_a_choice_on_a_cluster_counts_nodes(where: SessionCluster) -> None:
    choice = chosen(where, nproc=8)
    assert choice.describe_devices == "8 GPU ranks on 2 nodes"
    assert choice.placement.num_nodes == 2
    assert choice.hardware.bf16
    assert chosen(where, nproc=2, devices="none").describe_devices == "2 CPU ranks on 1 node"
    assert choice.diff(chosen(where, nproc=4)) == {
        "nproc": (8, 4),
        "devices": ((0, 1, 2, 3) * 2, (0, 1, 2, 3)),
        "nodes": (2, 1),
    }


def test_once_the_nodes_are_there_their_gpus_decide_the_precision(where: SessionCluster) -> None:
    before = chosen(where, nproc=8)
    given = chosen(where, nproc=8, precision="bf16")
    assert before.options.precision == "bf16"
    assert before.with_node_hardware(where) is before
    t4 = Gpu("GPU-a", "Tesla T4", 15 << 30, (7, 5))
    where.nodes = [SessionNode("alpha", (0, 1, 2, 3), Machine((t4,) * 4, "PCIe", 16))]
    assert before.with_node_hardware(where).options.precision == "no"
    assert chosen(where, nproc=8).diff(before.with_node_hardware(where)) == {}
    with pytest.raises(OptionError, match="bf16 needs a GPU of compute capability 8"):
        given.with_node_hardware(where)
    undecided = chosen(where, nproc=8, auto=True).with_node_hardware(where)
    assert (undecided.is_auto_pending, undecided.options.precision) == (True, "no")


def test_shards_can_be_replicated_across_its_nodes(where: SessionCluster) -> None:
    choice = chosen(where, nproc=8, backend="fsdp2", replicate_across="nodes")
    assert choice.hardware.nodes == 2
    with pytest.raises(OptionError, match="needs ranks on several machines"):
        chosen(where, nproc=4, backend="fsdp2", replicate_across="nodes")


def test_the_cluster_is_asked_once_for_the_same_wish(where: SessionCluster) -> None:
    chosen(where, nproc=8)
    chosen(where, nproc=8)
    assert isinstance(where.cluster, FakeCluster)
    assert where.cluster.asked == [(8, None, None)]


def test_gpus_of_this_machine_cannot_be_named_there(where: SessionCluster) -> None:
    with pytest.raises(OptionError, match="--gpus 0,1 selects GPUs of this machine"):
        chosen(where, devices="0,1")


@pytest.mark.parametrize("given", [{"nodes": 0}, {"nodes": "two"}, {"gpus_per_node": -1}])
def test_numbers_are_checked(where: SessionCluster, given: Mapping[str, object]) -> None:
    with pytest.raises(OptionError, match="must be an integer"):
        chosen(where, **given)


def test_fewer_nodes_have_fewer_ranks(where: SessionCluster) -> None:
    placement = session_placement.cluster_placement(RankDistribution("cuda", 2, 4))
    assert where.options_for_remaining_nodes(placement) == {}
    assert isinstance(where.cluster, FakeCluster)
    where.cluster.nodes = 1
    assert where.options_for_remaining_nodes(placement) == {"nodes": 1, "nproc": 4}
    where.cluster.nodes = 0
    with pytest.raises(StartError, match="No remaining node of ray"):
        where.options_for_remaining_nodes(placement)


def test_a_session_does_not_move(where: SessionCluster) -> None:
    where.check_changes({"on": "ray", "nodes": 4})
    with pytest.raises(OptionError, match="--on slurm: this session's ranks are on ray"):
        where.check_changes({"on": "slurm"})


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ({"nproc": 8, "nodes": 2}, {"nodes": 1}, {"nproc": None, "nodes": 1}),
        ({"gpus_per_node": 4, "nodes": 2}, {"nproc": 4}, {"nodes": None, "nproc": 4}),
        (
            {"gpus_per_node": 4, "nodes": 2},
            {"nproc": 4, "nodes": 1},
            {"gpus_per_node": None, "nproc": 4, "nodes": 1},
        ),
        ({"gpus_per_node": 0, "nproc": 4}, {"nodes": 2}, {"gpus_per_node": 0, "nproc": None}),
    ],
)
def test_new_numbers_push_old_ones_out(
    before: dict[str, object], changes: dict[str, object], after: dict[str, object]
) -> None:
    made = config.merge_options({"auto": False, **before}, changes)
    assert {name: made[name] for name in after} == after


def test_what_is_the_clusters_own_is_not_handed_on() -> None:
    given = {"RAY_AUTH_TOKEN_PATH": "x", "SLURM_JOB_ID": "1", "HOME": "/h", "PYTHONPATH": "/p"}
    kept = node_bootstrap.agent_environment(given)
    assert set(kept) == {"HOME", "PYTHONPATH"}
    assert kept["PYTHONPATH"].endswith(":/p")
