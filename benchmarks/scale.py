"""1,024 ranks on 16 nodes, simulated: kernel, hub and agents are real, the ranks have no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_client.session import Session
from results import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES, RANKS = 16, 64


def unrelayed_ms() -> float:
    """CPU time to read two messages of each rank, as a kernel without agents would."""
    rank, kernel = Session(key=b"k" * 32), Session(key=b"k" * 32)
    request = kernel.msg("execute_request")
    messages = [
        rank.serialize(rank.msg("execute_reply", {"status": "ok"}, parent=request))
        for _ in range(2 * NODES * RANKS)
    ]
    began = time.process_time()
    for message in messages:
        kernel.deserialize(kernel.feed_identities(message)[1])
    return 1000 * (time.process_time() - began)


def measure() -> Iterator[Row]:
    """Rows about the kernel of many ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulated_nodes", str(NODES), str(RANKS)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    messages = f"{found['cell_messages']:.0f} messages at the kernel"
    what = f"{NODES * RANKS:,} simulated ranks"
    yield Row(
        name=f"{what}: kernel CPU time of an empty cell",
        value=found["cell_cpu_ms"] / unrelayed_ms(),
        unit="x",
        limit=0.5,
        detail=f"{found['cell_cpu_ms']:.0f} ms, {found['cell_ms']:.0f} ms with all processes on"
        f" this machine, {messages}; against reading two of each rank with jupyter_client",
    )
    yield Row(
        name=f"{what}: memory of the kernel, peak",
        value=found["peak_mb"],
        unit="MB",
        limit=300,
        detail=f"{found['idle_mb']:.0f} MB after the start, then a flood",
    )
    yield Row(
        name=f"{what}: connections of the kernel",
        value=found["sockets"],
        unit="",
        limit=NODES,
        detail=f"{NODES} nodes",
    )
