"""What an empty cell costs, beside ipyparallel, nbdistributed and the kernels' own `pass`."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import rival_packages
from kernels import Kernel, attached, run_on
from results import Row, middle, ms

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jupyter_client.blocking.client import BlockingKernelClient

ROUNDS = 40
SLOW_ROUNDS = 15
"""nbdistributed takes more than 100 ms a cell; fewer rounds are enough."""
WARM_UP = 5


def measure(others: rival_packages.Rivals) -> Iterator[Row]:
    """Rows about the empty cell; all sessions live at the same time, cells interleaved."""
    with Kernel(sys.executable) as ours, others.kernel() as ipp, others.kernel() as nbd:
        ours.run("%load_ext nbdist")
        ours.run("%%distribute -n 2\npass")
        rival_packages.start_ipyparallel(ipp)
        rival_packages.start_nbdistributed(nbd)
        rank = attached(rank_file(ours))
        times = interleaved(ours, rank, ipp, nbd)
        rank.stop_channels()
        rival_packages.stop_ipyparallel(ipp)
    yield from rows(times)


def rank_file(kernel: Kernel) -> Path:
    """Connection file of rank 0, in the session's private folder."""
    return next(kernel.folder.glob("nbdist-*/*/rank0.json"))


def interleaved(
    ours: Kernel, rank: BlockingKernelClient, ipp: Kernel, nbd: Kernel
) -> dict[str, list[float]]:
    """Seconds of each kind of empty cell, taken in turns."""
    times = defaultdict(list)
    for number in range(-WARM_UP, ROUNDS):
        lap = {
            "pass": ours.run("pass").seconds,
            "nbdist": ours.run("%%distribute\npass").seconds,
            "rank": run_on(rank, "pass", timeout_s=30).seconds,
            "ipyparallel": ipp.run("%%px\npass").seconds,
        }
        if number < SLOW_ROUNDS:
            lap["nbdistributed"] = nbd.run("%%distributed\npass").seconds
        if number >= 0:
            for name, seconds in lap.items():
                times[name].append(seconds)
    return times


def rows(times: dict[str, list[float]]) -> Iterator[Row]:
    """The three rows."""
    p50 = {name: middle(values) for name, values in times.items()}
    own = middle(
        [
            cell - kernel - rank
            for cell, kernel, rank in zip(
                times["nbdist"], times["pass"], times["rank"], strict=True
            )
        ]
    )
    yield Row(
        name="empty cell, against ipyparallel %%px",
        value=p50["nbdist"] / p50["ipyparallel"],
        unit="x",
        limit=0.8,  # the kernel's own pass and one rank's are 0.6 of ipyparallel's
        detail=f"{ms(p50['nbdist'])} / {ms(p50['ipyparallel'])}",
    )
    yield Row(
        name="empty cell minus the kernel's and one rank's own pass",
        value=own * 1000,
        unit="ms",
        limit=3,
        detail=f"{ms(p50['nbdist'])} - {ms(p50['pass'])} - {ms(p50['rank'])}",
    )
    yield Row(
        name="empty cell, against nbdistributed %%distributed",
        value=p50["nbdist"] / p50["nbdistributed"],
        unit="x",
        limit=0.2,  # it polls every 0.1 s; the two passes above take 9 to 14 ms
        detail=f"{ms(p50['nbdist'])} / {ms(p50['nbdistributed'])}",
    )
