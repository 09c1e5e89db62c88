"""How long a plan takes: importing, and all strategies at six micro-batches."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from results import Row, middle

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMES = 7
IMPORT = """
import time
begin = time.perf_counter()
import nbdist.planner
print(time.perf_counter() - begin)
import nbdist.planner.search, nbdist.planner.build_model_spec, nbdist.planner.target_devices
print(time.perf_counter() - begin)
"""
SEARCH = """
import time, nbdist
sizes = [1, 2, 4, 8, 16, 32]
for _ in range(2):
    begin = time.perf_counter()
    plan = nbdist.plan(%r, devices="8xA100-80GB,nvlink", batch_size=sizes, seq_len=2048)
    print(time.perf_counter() - begin, len(plan.rows))
"""


def measure() -> Iterator[Row]:
    """Rows about the time of a plan; each figure is of a fresh process, the middle of seven."""
    lines = [output(IMPORT).split() for _ in range(TIMES)]
    package, whole = (middle([float(line[i]) for line in lines]) * 1000 for i in range(2))
    yield Row(
        name="plan: import nbdist.planner",
        value=package,
        unit="ms",
        limit=50,
        detail=f"with all that the first plan imports {whole:.0f} ms",
    )
    for size in ("7b", "350m"):
        lines = [output(SEARCH % size).splitlines() for _ in range(TIMES)]
        again = [float(line[1].split()[0]) for line in lines]
        first = [float(line[0].split()[0]) for line in lines]
        yield Row(
            name=f"plan: all strategies and six micro-batches, {size}",
            value=middle(again) * 1000,
            unit="ms",
            limit=50,
            detail=f"{lines[0][1].split()[1]} rows; the first with imports {middle(first):.2f} s",
        )


def output(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout
