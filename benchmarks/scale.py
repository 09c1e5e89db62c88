"""1,024 ranks on 16 nodes, simulated: kernel, hub and agents are real, the ranks have no torch."""

from __future__ import annotations

import hashlib
import hmac
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from results import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES, RANKS = 16, 64
LIMIT_S = 600


def floor_ms() -> float:
    """CPU time to read two signed messages of each rank, as a kernel without agents would."""
    key, message = b"k" * 32, json.dumps({"type": "ended", "rank": 1, "cell": 7, "s": 0.5}).encode()
    began = time.process_time()
    for _ in range(2 * NODES * RANKS):
        hmac.new(key, message, hashlib.sha256).digest()
        json.loads(message)
    return 1000 * (time.process_time() - began)


def measure() -> Iterator[Row]:
    """Rows about the kernel of many ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulated_nodes", str(NODES), str(RANKS)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    messages = f"{found['cell_messages']:.0f} messages at the kernel"
    what = f"{NODES * RANKS:,} simulated ranks"
    yield Row(
        name=f"{what}: kernel CPU time of an empty cell",
        value=found["cell_cpu_ms"] / floor_ms(),
        unit="x",
        limit=4,
        detail=f"{found['cell_cpu_ms']:.0f} ms, {found['cell_ms']:.0f} ms with all processes on"
        f" this machine, {messages}; against reading each rank's messages without agents",
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
