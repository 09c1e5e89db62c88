"""1,024 ranks on 16 nodes, simulated: kernel, hub and agents are real, the ranks have no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from results import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES, RANKS = 16, 64
LIMIT_S = 600


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
        name=f"{what}: empty cell, p50",
        value=found["cell_ms"],
        unit="ms",
        limit=250,
        detail=f"{messages}; start {found['start_s']:.1f} s",
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
