"""Ranks on two nodes: everything that works on one machine, and what happens to a lost node."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import zmq

from nbdist import CellError, CellInterrupted, CheckpointError, RankDied, Session, StartError
from nbdist.cluster.allocation import AllocatedNode, RankDistribution
from nbdist.cluster.node_group import ClusterLauncherProvider
from nbdist.hardware import discovery
from nbdist.magics import results
from nbdist.panel.controller import PanelData
from nbdist.session import config, planner, push_pull
from nbdist.session.progress import StatusLine
from tests.conftest import eventually
from tests.doubles import different_nodes
from tests.interrupts import runs_for, stopped
from tests.nightly import nightly
from tests.processes import gone
from tests.session_internals import workers
from tests.two_nodes import Hosts, LocalNodes

if TYPE_CHECKING:
    from collections.abc import Iterator

DEAD_S = 15.0
"""5 s is promised, and 1 s seen on a machine of our own."""
CUT_S = 30.0
"""The same: 15 s."""
LEASE_S, SILENT_S = 6, 3
"""Shorter than in real sessions, where they are 20 s and 10 s."""
TRAIN = """
import torch.distributed as dist
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
batch = torch.ones(4, 8) * (rank + 1)

def step():
    loss = model(batch).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

def train(steps):
    return [step() for _ in range(steps)]
"""
STUCK = "dist.all_reduce(torch.ones(1)) if rank == 0 else None"
SPIN = "import time\nwhile True: time.sleep(0.01)"


@pytest.fixture(scope="module")
def cluster() -> LocalNodes:
    """Two nodes with room for two ranks each."""
    return LocalNodes("alpha", "beta", ranks=2)


@pytest.fixture(scope="module")
def one_session(cluster: LocalNodes, folder: Path) -> Iterator[Session]:  # noqa: ARG001 - runs there
    with Session(3, engine=ClusterLauncherProvider(cluster)) as running:
        yield running


@pytest.fixture
def session(one_session: Session) -> Session:
    """Three living ranks: two on alpha, one on beta."""
    if one_session.state != "ready":
        one_session.restart()
    return one_session


def pids(session: Session, node: str = "") -> list[int]:
    """Ranks' processes, of one node where it is named."""
    members = session.status()["ranks"]
    return [one["pid"] for one in members if node in {"", one["node"]}]


# ---------------------------------------------------------------------------------------- cells


def test_the_ranks_are_where_they_should_be(session: Session) -> None:
    code = "import os\n(rank, local_rank, world_size, os.environ['NBDIST_TEST_NODE'])"
    values = session.run(code).values
    assert values == {0: (0, 0, 3, "alpha"), 1: (1, 1, 3, "alpha"), 2: (2, 0, 3, "beta")}


def test_output_values_and_errors_come_from_all_nodes(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    result = session.run("print(f'hello {rank}')\nrank * 2")
    assert result.values == {0: 0, 1: 2, 2: 4}
    assert "[2] hello 2" in capsys.readouterr().out
    with pytest.raises(CellError, match="ValueError: on rank 2"):
        session.run("if rank == 2: raise ValueError('on rank 2')")


def test_collectives_go_from_node_to_node(session: Session) -> None:
    code = (
        "import torch.distributed as dist\nt = torch.tensor([1.0 + rank])\ndist.all_reduce(t)\n"
        "pair = dist.new_group([0, 2])\nt2 = torch.ones(1)\n"
        "if rank != 1: dist.all_reduce(t2, group=pair)\n(t.item(), t2.item())"
    )
    assert session.run(code).values == {0: (6.0, 2.0), 1: (6.0, 1.0), 2: (6.0, 2.0)}


def test_report_and_send_arrive(session: Session) -> None:
    session.run("for n in range(3): report(step=n, loss=float(rank + n))\nsend('weights', [rank])")
    eventually(lambda: session.metrics.last_step == 2, within_s=5)
    assert session.sent_values["weights"] in ([0], [1], [2])


@pytest.mark.nightly
def test_fifty_megabytes_go_there_and_back(session: Session) -> None:
    given = np.random.default_rng(0).integers(0, 255, 50_000_000, dtype=np.uint8)
    session.push(given=given)
    for rank in (0, 2):
        assert np.array_equal(session.pull("given", rank=rank, as_numpy=True), given)
    session.run("del given")


def test_a_slow_push_and_pull_say_how_far_they_are(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = np.arange(5_000_000, dtype=np.float64)
    monkeypatch.setattr(push_pull, "SHOW_AFTER_S", 600)  # as if the machine were fast
    session.push(given=given)
    session.pull("given", rank=2)
    assert "nbdist: pu" not in capsys.readouterr().out
    monkeypatch.setattr(push_pull, "SHOW_AFTER_S", 0)
    session.push(given=given)  # to two nodes
    session.pull("given", rank=2)
    lines = capsys.readouterr().out.splitlines()
    share = r"nbdist: {}: [0-9.]+ MiB of {} MiB, [0-9.]+ .iB/s, [0-9]{{1,2}}%"
    end = r"nbdist: {}: {} MiB in [0-9.]+ s, [0-9.]+ .iB/s"
    for doing, total in (("push", "76"), ("pull", "38")):
        lines_of_progress = [line for line in lines if line.startswith(f"nbdist: {doing}")]
        assert re.fullmatch(share.format(doing, total), lines_of_progress[0])
        assert re.fullmatch(end.format(doing, total), lines_of_progress[-1])
    session.run("del given")


@pytest.mark.parametrize("doing", ["push", nightly("pull")])
def test_stop_ends_a_push_or_pull_and_leaves_no_file(
    session: Session, cluster: LocalNodes, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = np.ones(10_000_000)
    session.push(given=given)
    monkeypatch.setattr(push_pull, "SHOW_AFTER_S", 0)
    pressed: list[str] = []

    class Pressed(StatusLine):
        def show(self, text: str) -> None:
            pressed.append(text)
            if len(pressed) == 1:
                os.kill(os.getpid(), signal.SIGINT)  # while chunks are on their way

    monkeypatch.setattr(push_pull, "StatusLine", Pressed)
    ways = {
        "push": lambda: session.push(given=given * 2),
        "pull": lambda: session.pull("given", rank=2),
    }
    with pytest.raises(CellInterrupted, match=rf"The {doing} was interrupted after .* of .* MiB"):
        ways[doing]()
    assert pressed[-1].startswith("interrupted after")
    assert session.run("given[0]").values == dict.fromkeys(range(3), 1.0)
    eventually(lambda: not payloads(session, cluster), within_s=5)
    session.run("del given")


def payloads(session: Session, cluster: LocalNodes) -> list[Path]:
    """Files with values in the private folders of the notebook and of the agents."""
    folders = {
        folder
        for rank in range(3)
        for folder in workers(session).launcher_group.payload_folders(rank)
    }
    folders |= {str(folder) for folder in workers(session).launcher_group.run_dir.folders}
    assert len(folders) == 2 * (len(cluster.names) + 1)
    return [file for folder in folders for file in Path(folder).glob("*.payload")]


def test_the_panel_shows_memory_by_node_and_asks_each_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    fleet: Any = workers(session).launcher_group
    send = fleet.agent_connections.send

    def counted(index: int, *what: Any) -> None:
        asked.append(index)
        send(index, *what)

    monkeypatch.setattr(fleet.agent_connections, "send", counted)
    view = PanelData(session)
    moment = view.devices.sample_once()
    assert sorted(asked) == [0, 1]
    assert [seat.node for seat in view.devices.device_slots] == ["alpha", "alpha", "beta"]
    used = [one.used_bytes or 0 for one in moment.readings]
    expected = [psutil.Process(pid).memory_info().rss for pid in pids(session)]
    assert used == pytest.approx(expected, rel=0.2)
    assert {name: node["host_bytes"] for name, node in by_name(view).items()} == dict.fromkeys(
        ("alpha", "beta"), discovery.host_memory_bytes()
    )
    assert all(node["host_used_bytes"] for node in by_name(view).values())


def by_name(view: PanelData) -> dict[str, Any]:
    """Nodes as the panel shows them."""
    return {node["name"]: node for node in view.snapshot()["nodes"]}


def test_an_open_panel_asks_every_second_and_a_closed_one_does_not(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    fleet: Any = workers(session).launcher_group
    now = fleet.node_usage

    def counted(within_s: float) -> Any:
        asked.append(time.monotonic())
        return now(within_s)

    monkeypatch.setattr(fleet, "node_usage", counted)
    view = PanelData(session)
    view.devices.start()
    eventually(lambda: len(view.devices.history) >= 3, within_s=15)
    view.devices.stop()
    count = len(asked)
    assert count <= 4
    assert all(later - sooner > 0.5 for sooner, later in itertools.pairwise(asked))
    session.run("1")
    assert len(asked) == count


def test_status_says_what_each_node_and_rank_holds(session: Session) -> None:
    _, alpha, rank0, rank1, beta, rank2 = results.status_lines(session)
    cores = discovery.discover_machine().num_cpus
    assert re.fullmatch(
        rf"  node alpha: 2 CPU ranks, {cores} cores, host memory [\d.]+ of [\d.]+ GiB", alpha
    )
    assert beta.startswith("  node beta: 1 CPU rank, ")
    for rank, line in enumerate((rank0, rank1, rank2)):
        assert re.fullmatch(rf"  rank {rank}: pid \d+, cpu, alive, [\d.]+ GiB", line)


def test_what_a_silent_node_holds_is_unknown(cluster: LocalNodes, session: Session) -> None:
    agent = cluster.processes("beta")[0]
    view = PanelData(session)
    agent.suspend()
    try:
        began = time.monotonic()
        moment = view.devices.sample_once()
        taken = time.monotonic() - began
        lines = list(results.status_lines(session))
    finally:
        agent.resume()
    assert [one.used_bytes is None for one in moment.readings] == [False, False, True]
    assert taken < 5
    assert any(line.startswith("  node beta") and line.endswith("not responding") for line in lines)
    eventually(lambda: "beta" in session.nodes_now(), within_s=10)


def test_stacks_come_from_all_nodes(session: Session) -> None:
    session.run(
        f"def wait():\n    {SPIN.splitlines()[0]}\n    while True: time.sleep(0.01)\nwait()",
        background=True,
        count=7,
    )
    eventually(
        lambda: all("In[7], line 3 in wait" in s for s in session.stacks().values()), within_s=10
    )
    session.interrupt()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        session.wait(10)


def test_a_restart_keeps_the_nodes(session: Session, cluster: LocalNodes) -> None:
    agents = {name: one.pid for name, one in cluster.agents.items()}
    session.run("mine = 1")
    session.restart()
    assert session.run("'mine' in globals()").values == dict.fromkeys(range(3), False)
    assert {name: one.pid for name, one in cluster.agents.items()} == agents


# ----------------------------------------------------------------------------------------- stop


def test_stop_ends_python_code_on_all_nodes(session: Session) -> None:
    session.run("kept = 'mine'")
    text, seconds = stopped(session, SPIN, when=runs_for(session, 0.3))
    assert "all variables are kept" in text
    assert seconds < 5
    assert session.run("kept").values == dict.fromkeys(range(3), "mine")


@pytest.mark.fault("N5")
def test_stop_frees_a_stuck_collective(session: Session) -> None:
    session.run("import torch.distributed as dist")
    _, seconds = stopped(session, STUCK, when=runs_for(session, 0.5))
    assert seconds < 10
    code = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    assert session.run(code).values == dict.fromkeys(range(3), 3.0)


# ------------------------------------------------------------------------------------- training


def test_a_training_switches_saves_and_loads(session: Session) -> None:
    session.run(TRAIN)
    session.run("train(3)")
    session.save("base", wait=True)
    expected = session.run("train(4)").values
    session.load("base")
    report = session.switch("fsdp")
    assert report.verified > 0
    found = session.run("train(4)").values
    for rank, losses in expected.items():
        assert found[rank] == pytest.approx(losses, rel=1e-6)


def test_a_training_goes_to_fewer_ranks_and_back(session: Session) -> None:
    session.switch("ddp", nproc=2)
    assert [one["node"] for one in session.status()["ranks"]] == ["alpha", "alpha"]
    assert all(isinstance(one, float) for one in session.run("train(1)[0]").values.values())
    session.switch("ddp", nproc=3)
    assert [one["node"] for one in session.status()["ranks"]] == ["alpha", "alpha", "beta"]
    assert len(session.run("train(1)[0]").values) == 3


# ------------------------------------------------------------------- folders that are not shared


class Apart(LocalNodes):
    """Two nodes; of a folder beta has another one."""

    def __init__(self, folder: Path) -> None:
        super().__init__("alpha", "beta")
        self._folder = folder

    def prefix(self, name: str) -> list[str]:
        """Put an empty disk where the folder was, for this node alone."""
        if name == "alpha":
            return []
        mount = 'mount -t tmpfs none "$0" && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, str(self._folder)]


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Two ranks; the notebook's folder is another one for the second."""
    alone = ["/usr/bin/env", "unshare", "--mount", "true"]
    if subprocess.run(alone, check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    monkeypatch.chdir(tmp_path)
    with Session(2, engine=ClusterLauncherProvider(Apart(tmp_path))) as running:
        yield running


@pytest.mark.nightly
@pytest.mark.fault("N7")
def test_a_folder_that_is_not_shared_is_reported_early_and_at_save(
    apart: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []

    def warned() -> bool:
        lines.append(capsys.readouterr().err)
        return "save() would fail" in "".join(lines)

    eventually(warned, within_s=20)  # before anything is trained
    assert f"node beta (127.0.0.1): {tmp_path} is not the same folder there" in "".join(lines)
    apart.run(TRAIN)
    apart.run("train(1)")
    with pytest.raises(CellError, match=rf"rank 1: {tmp_path}/checkpoints on .* is missing or not"):
        apart.run("save('base')")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".lock"]
    with pytest.raises(CheckpointError, match=r"node beta .* All nodes must see the folder"):
        apart.save("base")
    assert len(apart.run("train(1)[0]").values) == 2  # the training goes on
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]  # no trial is left


@pytest.mark.nightly
def test_nodes_that_share_no_folder_save_to_a_url(
    apart: Session, tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = f"file://{tmp_path_factory.mktemp('store')}"
    apart.run(TRAIN)
    apart.run("train(2)")
    apart.save("base", folder=url, wait=True)
    expected = apart.run("train(2)").values
    apart.run(f"save('later', folder={url!r})")
    eventually(lambda: not apart.saves_running(), within_s=30)
    assert apart.load(f"{url}/base").verified > 0
    assert apart.run("train(2)").values == expected
    assert apart.load("later", folder=url).step == 4


# --------------------------------------------------------------------------------------- safety


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process listens on the network."""
    return {
        (one.laddr.ip, one.laddr.port)
        for one in psutil.Process(pid).net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }


@pytest.mark.fault("S23")
def test_nothing_listens_but_the_hub(session: Session, cluster: LocalNodes) -> None:
    (ticket, _) = map(json.loads, cluster.tickets)
    host, port = ticket["hub"].removeprefix("tcp://").split(":")
    assert listening(os.getpid()) == {(host, int(port))}
    for name in cluster.names:
        agent, launcher, *_ = cluster.processes(name)
        assert listening(agent.pid) | listening(launcher.pid) == set()
    for pid in pids(session):
        assert {ip for ip, _ in listening(pid)} <= {"127.0.0.1"}


@pytest.mark.fault("S23")
def test_a_wrong_key_is_not_let_in(session: Session, cluster: LocalNodes) -> None:
    ticket: dict[str, Any] = json.loads(cluster.tickets[0])
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        public, secret = zmq.curve_keypair()
        stranger.curve_serverkey = ticket["hub_key"].encode()
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        watching = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        stranger.connect(ticket["hub"])
        assert watching.poll(5000)
        stranger.disable_monitor()
        watching.close(0)
    assert session.run("rank").values == {0: 0, 1: 1, 2: 2}


@pytest.mark.fault("S23")
def test_bytes_of_a_stranger_do_no_harm(session: Session, cluster: LocalNodes) -> None:
    host, port = json.loads(cluster.tickets[0])["hub"].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(os.urandom(4096))
    assert session.run("rank").values == {0: 0, 1: 1, 2: 2}


@pytest.mark.fault("S23")
def test_secrets_are_in_no_command_line_and_no_environment(cluster: LocalNodes) -> None:
    secrets = {json.loads(one)["secret"] for one in cluster.tickets}
    for name in cluster.names:
        for process in cluster.processes(name):
            shown = " ".join(process.cmdline()) + json.dumps(process.environ())
            assert not any(secret in shown for secret in secrets)


# --------------------------------------------------------------------------------------- deaths


def told(session: Session, *, within_s: float) -> str:
    eventually(lambda: session.state == "dead", within_s=within_s)
    return str(session.death)


@pytest.mark.fault("N1")
def test_a_killed_rank_is_reported_with_its_node(session: Session) -> None:
    everyone = pids(session)
    session.run(SPIN, background=True)
    os.kill(pids(session, "beta")[0], signal.SIGKILL)
    with pytest.raises(RankDied, match=r"rank 2 on beta ended with signal 9 \(SIGKILL\)"):
        session.wait(DEAD_S)
    eventually(lambda: gone(everyone), within_s=DEAD_S)


@pytest.mark.nightly
@pytest.mark.fault("N1")
def test_a_crash_on_the_other_node_shows_its_stack(session: Session) -> None:
    code = "import ctypes, time\nif rank == 2: ctypes.string_at(0)\ntime.sleep(60)"
    with pytest.raises(RankDied, match=r"rank 2 on beta ended with signal 11") as caught:
        session.run(code, count=9)
    assert "In[9], line 2" in str(caught.value)


@pytest.mark.fault("N2")
def test_a_killed_agent_ends_the_cell_and_the_other_node(
    session: Session, cluster: LocalNodes
) -> None:
    everything = [one.pid for name in cluster.names for one in cluster.processes(name)]
    session.run(SPIN, background=True)
    cluster.agents["beta"].kill()
    with pytest.raises(RankDied, match=r"node beta \(127\.0\.0\.1\) lost its agent"):
        session.wait(DEAD_S)
    eventually(lambda: gone(everything), within_s=CUT_S)


@pytest.mark.nightly
@pytest.mark.fault("N3")
def test_a_node_that_is_silent_is_cut_off(session: Session, cluster: LocalNodes) -> None:
    everything = [one.pid for name in cluster.names for one in cluster.processes(name)]
    session.run(SPIN, background=True)
    os.kill(cluster.agents["beta"].pid, signal.SIGSTOP)
    with pytest.raises(RankDied, match=r"node beta .*was cut off: no message for"):
        session.wait(CUT_S)
    eventually(lambda: gone(everything), within_s=CUT_S)


@pytest.mark.fault("N3")
def test_what_the_cluster_reports_about_a_node_is_shown(
    session: Session, cluster: LocalNodes
) -> None:
    session.run(SPIN, background=True)
    cluster.messages[1] = "was taken back by the cluster (preempted)"
    with pytest.raises(RankDied, match=r"node beta .* was taken back by the cluster"):
        session.wait(DEAD_S)


KILLED = """
import sys
from nbdist import Session
from nbdist.cluster.node_group import ClusterLauncherProvider
from tests.two_nodes import LocalNodes
cluster = LocalNodes("alpha", "beta")
with Session(2, engine=ClusterLauncherProvider(cluster)) as session:
    session.run("1", output="none")
    print(*[one.pid for name in cluster.names for one in cluster.processes(name)])
    sys.stdout.flush()
    session.run("while True: pass")
"""


@pytest.mark.nightly
@pytest.mark.fault("N4")
def test_nodes_end_with_a_killed_kernel(folder: Path) -> None:  # noqa: ARG001 - runs there
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        lines = (line for line in kernel.stdout if not line.startswith(b"nbdist:"))
        everything = [int(pid) for pid in next(lines).split()]
        assert len(everything) == 6
        kernel.kill()
        eventually(lambda: gone(everything), within_s=CUT_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make network namespaces")
@pytest.mark.fault("N3")
@pytest.mark.nightly
def test_a_host_that_is_cut_off_ends_itself() -> None:
    try:
        hosts = Hosts().__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    with contextlib.ExitStack() as stack:
        stack.callback(hosts.__exit__)
        command = [*hosts.inside("alpha"), sys.executable, "-m", "tests.doubles.unplug_host"]
        given = [hosts.prefix, str(LEASE_S), str(SILENT_S)]
        shown = subprocess.run([*command, *given], capture_output=True, text=True, check=True)
        seen = json.loads(shown.stdout.splitlines()[-1])
    assert seen["sum"] == 2.0
    assert set(seen["listening"]) <= {"10.213.0.1", "10.213.0.2", "127.0.0.1"}
    assert seen["told"].startswith("node beta (10.213.0.2) was cut off: no message for")
    assert seen["after_s"] < SILENT_S + 10
    assert seen["left"] == 0
    assert seen["ended_s"] < LEASE_S + 20


@pytest.mark.nightly
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make network namespaces")
@pytest.mark.timeout(300)
def test_a_slow_link_that_loses_packets_does_not_end_the_session() -> None:
    hosts = Hosts(slow=(0.1, 0.05, 1_000_000))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hosts)
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        command = [*hosts.inside("alpha"), sys.executable, "-m", "tests.doubles.over_slow_link"]
        shown = subprocess.run([*command, hosts.prefix], capture_output=True, text=True, check=True)
    seen = json.loads(shown.stdout.splitlines()[-1])
    assert len(seen["weights"]) == 2
    assert len(set(seen["weights"])) == 1
    assert seen["reported"] == 5
    assert seen["taken"] == [True, True]
    assert seen["after"] == [0, 1]
    assert seen["state"] == "ready"
    assert seen["restarts"] == 0
    assert seen["stopped_at_s"] < seen["values_at_s"] + 2.0 + CUT_S


# ---------------------------------------------------------------------------------------- starts


@pytest.mark.fault("N6")
def test_an_agent_that_exits_at_once_is_reported(folder: Path) -> None:  # noqa: ARG001 - runs there
    class Broken(LocalNodes):
        def lost_nodes(self) -> dict[int, str]:
            ended = {n: a.poll() for n, a in enumerate(self.agents.values())}
            return {n: f"ended with exit code {code}" for n, code in ended.items() if code}

        def prefix(self, name: str) -> list[str]:
            return ["false"] if name == "beta" else []

    with pytest.raises(StartError, match=r"node beta .* ended with exit code 1"):
        Session(2, engine=ClusterLauncherProvider(Broken("alpha", "beta"))).start()


# --------------------------------------------------------------------------- nodes that differ


class Unlike(LocalNodes):
    """Two nodes of which the second has less of everything; two GPUs each that nobody can use."""

    name = "ray"
    module = "tests.doubles.different_nodes"
    distribution: RankDistribution | None = None

    def distribute_ranks(
        self, nproc: int | None, nodes: int | None, gpus_per_node: int | None
    ) -> RankDistribution:
        """As it was asked for."""
        assert nodes == 2
        return RankDistribution(
            "cuda" if gpus_per_node else "cpu", 2, gpus_per_node or (nproc or 2) // 2
        )

    def place(self, name: str) -> AllocatedNode:
        """Make one node."""
        assert self.distribution is not None
        gpus = different_nodes.gpus(name) if self.distribution.kind == "cuda" else ()
        return AllocatedNode(
            name=name,
            address=self.kernel_address,
            ranks=self.distribution.ranks_per_node,
            gpus=gpus,
        )

    def disconnect(self) -> None:
        """End what was started."""
        self.close()


@pytest.fixture
def unlike(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Unlike:  # noqa: ARG001 - runs there
    """What `--on ray` means."""
    cluster = Unlike("alpha", "beta")
    monkeypatch.setattr(config, "RayCluster", lambda *_: cluster)
    return cluster


@pytest.mark.nightly
def test_cpu_ranks_are_planned_with_the_least_that_a_node_has(unlike: Unlike) -> None:
    with Session(2, on="ray", nodes=2) as session:
        assert unlike.distribution == RankDistribution("cpu", 2, 1)
        assert [node.machine.num_cpus for node in session.nodes] == [32, 4]
        planned = planner.cluster_spec(session)
        assert (planned.num_nodes, planned.world_size, planned.num_cpus) == (2, 2, 4)
        assert planned.smallest_device.free_bytes == planned.host_memory_bytes == 12 << 30
        assert "beta has the least free host memory, 12.0 GiB against 64.0 GiB" in planned.notes[0]
        # as --auto plans on rank 0, with what each rank has found free
        session.run(
            "from nbdist.worker.engines import accelerator_patch as a, auto_strategy as choose\n"
            "config = a.current_config()\n"
            "there = choose.build_cluster_spec([5 << 30, 3 << 30], config.hardware, config.nodes)"
        )
        values = session.run(
            "(there.num_nodes, there.num_cpus, there.smallest_device.free_bytes)"
        ).values
        assert values == dict.fromkeys(range(2), (2, 4, 3 << 30))


def test_gpus_without_bf16_refuse_it_before_a_rank_starts(unlike: Unlike) -> None:
    session = Session(on="ray", nodes=2, gpus_per_node=2, precision="bf16")
    assert session.options.precision == "bf16"  # nobody has seen them
    with pytest.raises(StartError, match="bf16 needs a GPU of compute capability 8"):
        session.start()
    names = [{gpu.name for gpu in node.machine.gpus} for node in session.nodes]
    assert names == [{"NVIDIA A100-SXM4-80GB"}, {"Tesla T4"}]
    assert unlike.agents == {}
    assert session.state == "new"
    session.stop()
