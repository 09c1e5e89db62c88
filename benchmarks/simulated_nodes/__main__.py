"""A session with many fake ranks on many nodes: the kernel, the hub and the agents are real.

    python -m benchmarks.simulated_nodes NODES RANKS

RANKS is the number of ranks per node. Prints the measurements as JSON.

All of it runs on this machine: 2 processes for each node, and this one, which is the kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nbdist import CellInterrupted, Session
from nbdist.cluster.node_group import ClusterLauncherProvider
from nbdist.cluster.rank_channels import RankChannels
from nbdist.hardware import discovery
from tests.two_nodes import LocalNodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.rank_channels import Channel

CELLS = 21
PRINTING = {
    "flood": "flood(100, 10)",
    "apart": "apart(100, 10)",
    "long": "flood(1000, 50)",
    "own": "own(20, 10)",
    "reports": "reports(10)",
}
MB = 1e6


class Many(LocalNodes):
    """Nodes with fake ranks."""

    module = "benchmarks.simulated_nodes.node"


class Opened:
    """Counts the messages that the kernel reads."""

    def __init__(self) -> None:
        self.number = 0
        whole = RankChannels._deliver

        def take(channels: RankChannels, ranks: Any, channel: Channel, message: Any) -> None:
            self.number += 1
            whole(channels, ranks, channel, message)

        RankChannels._deliver = take  # type: ignore[method-assign]


def measured(nodes: int, ranks: int, *, cells: int = CELLS) -> dict[str, float]:
    """Start, run cells, flood, stop one; what it took.

    Args:
        nodes: how many.
        ranks: of each.
        cells: empty ones.
    """
    opened, found = Opened(), {}
    here = discovery.discover_machine()
    discovery.discover_machine = lambda: dataclasses.replace(
        here, num_cpus=nodes * ranks
    )  # as a cluster has
    engine = ClusterLauncherProvider(Many(*(f"node{one}" for one in range(nodes)), ranks=ranks))
    began = time.monotonic()
    with (
        Session(nodes * ranks, engine=engine) as session,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        session.start()
        found["start_s"] = time.monotonic() - began
        found["idle_mb"] = psutil.Process().memory_info().rss / MB
        session.run("pass")
        found["look_ms"] = timed(lambda: session.nodes_now(within_s=10.0)) * 1000
        before, used = opened.number, time.process_time()
        took = [timed(lambda: session.run("pass")) for _ in range(cells)]
        found["cell_ms"] = statistics.median(took) * 1000
        found["cell_cpu_ms"] = (time.process_time() - used) / cells * 1000
        found["cell_messages"] = (opened.number - before) / cells
        for how, cell in PRINTING.items():
            before, text, used = opened.number, io.StringIO(), time.process_time()
            with contextlib.redirect_stdout(text):
                found[f"{how}_s"] = timed(lambda: session.run(cell))  # noqa: B023
            found[f"{how}_cpu_s"] = time.process_time() - used
            found[f"{how}_messages"] = opened.number - before
            found[f"{how}_shown_lines"] = text.getvalue().count("\n")
        assert len(session.metrics.by_rank("loss")) == nodes * ranks
        before = opened.number
        found["stop_s"] = stopped(session)
        found["stop_messages"] = opened.number - before
        found["settle_s"] = timed(lambda: session.run("pass"))
        found["sockets"] = sum(
            one.status == psutil.CONN_ESTABLISHED for one in psutil.Process().net_connections("tcp")
        )
        found["peak_mb"] = peak_bytes() / MB
    return found


def peak_bytes() -> int:
    """Return the peak memory of this process.

    Not getrusage(): after an exec, its ru_maxrss still counts the memory of the parent process
    (getrusage(2)), here `make bench` with torch.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)


def timed(work: Callable[[], object]) -> float:
    """Seconds it takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def stopped(session: Session) -> float:
    """Seconds from Stop to the end of a cell that waits on all ranks."""
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, press).start()
    with contextlib.suppress(CellInterrupted):
        session.run("wait()")
    return time.monotonic() - pressed[0]


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(measured(int(sys.argv[1]), int(sys.argv[2])))}\n")
