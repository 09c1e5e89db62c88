"""What a session weighs in the notebook's kernel: memory at rest, and under a flood of output."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from kernels import Kernel
from results import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

MB = 1e6
LINES = 200_000
FLOOD = f"for number in range({LINES}): print(rank, 'line', number)"
SHOWN = re.compile(r"^\[(\d)\] \1 line \d+$", re.MULTILINE)
COUNTED = re.compile(r"^\[(0|1|0-1)\] ([\d,]+) lines? .*not shown", re.MULTILINE)


def measure() -> Iterator[Row]:
    """Rows about the kernel's memory and about a flood of output."""
    with Kernel(sys.executable) as kernel:
        kernel.run("pass")
        bare = kernel.resident_bytes()
        kernel.run("%load_ext nbdist")
        kernel.run("%%distribute -n 2\nprint(rank)\nworld_size")
        kernel.settle()
        live = kernel.resident_bytes()
        flood = kernel.run(f"%%distribute\n{FLOOD}", timeout_s=600, watch_memory=True)
    shown, counted = lines(flood.page)
    yield Row(
        name="memory that a live session adds to the kernel",
        value=(live - bare) / MB,
        unit="MB",
        limit=60,
        detail=f"{live / MB:.0f} - {bare / MB:.0f} MB",
    )
    yield Row(
        name=f"growth of the kernel while each rank prints {LINES:,} lines",
        value=(flood.peak_bytes - live) / MB,
        unit="MB",
        limit=50,
        detail=f"the cell took {flood.seconds:.1f} s",
    )
    yield Row(
        name="printed lines that were neither shown nor counted",
        value=abs(2 * LINES - shown - counted),
        unit="lines",
        limit=0,
        detail=f"{shown:,} shown, {counted:,} counted",
    )


def lines(page: str) -> tuple[int, int]:
    """Lines of the flood that are shown, and lines that a sentence counts instead."""
    counted = [
        int(number.replace(",", "")) * (2 if label == "0-1" else 1)  # equal gaps are told once
        for label, number in COUNTED.findall(page)
    ]
    return len(SHOWN.findall(page)), sum(counted)
