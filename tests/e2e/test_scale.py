"""The simulation of many ranks, with few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_kernel_gets_as_many_messages_as_there_are_nodes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulated_nodes", "2", "8"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sockets"] == 2
    assert found["flood_shown_lines"] == 100  # each once, of all 16 ranks
    # 16 ranks reply and are idle: two messages for each node, a few more where one is late
    assert found["cell_messages"] < 16
    assert found["flood_messages"] < 16 * 10
