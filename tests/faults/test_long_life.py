"""A session that is used for days holds no more at its end than at its beginning."""

from __future__ import annotations

import ctypes
import gc
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pytest

from nbdist import CellError, Session
from nbdist.launcher.__main__ import WARM_UP_IMPORTS
from tests.conftest import eventually
from tests.faults import training
from tests.processes import wait_until_idle
from tests.session_internals import workers

MB = 1e6
RSS_TOLERANCE = 8 * MB
"""What an allocator keeps for a while, in each process."""


@dataclass(frozen=True)
class Held:
    """What one process holds."""

    rss: int
    fds: int
    threads: int


def of(pid: int) -> Held:
    process = psutil.Process(pid)
    return Held(process.memory_info().rss, process.num_fds(), process.num_threads())


@dataclass(frozen=True)
class Everything:
    """What all processes of a session hold."""

    processes: dict[str, Held]
    files: Counter[str]


def everything(session: Session) -> Everything:
    """What each process of the session holds, and the files in its private folders."""
    tidy = "import ctypes, gc; gc.collect(); ctypes.CDLL(None).malloc_trim(0)"
    session.run(tidy, output="none")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    ranks = [psutil.Process(rank["pid"]) for rank in session.status()["ranks"]]
    held = {"kernel": of(psutil.Process().pid), "launcher": of(ranks[0].ppid())}
    held |= {f"rank {rank}": of(process.pid) for rank, process in enumerate(ranks)}
    folder = workers(session).launcher_group.run_dir
    files = Counter(
        # numbers and random parts of names do not count
        re.sub(r"(?<=_)\w{8}(?=/|$)|\d+", "*", str(path.relative_to(top)))
        for top in (folder.path, folder.payload_dir)
        for path in top.rglob("*")
    )
    return Everything(held, files)


def cell(session: Session, number: int) -> None:
    match number % 10:
        case 0:
            with pytest.raises(CellError):
                session.run("big = torch.ones(1_000_000)\nraise ValueError(rank)")
        case 1:
            session.push(value={"x": [1, 2, 3], "t": b"0" * 1_000_000})
        case 2:
            assert len(session.pull("value")["t"]) == 1_000_000
        case 3:
            session.run("for i in range(200): print('line', i, rank)", output="none")
        case 4:
            session.run("display({'text/html': '<b>x</b>' * 1000}, raw=True)", output="none")
        case 5:
            session.run("report(loss=step())")
        case 6:
            session.run("1", background=True).wait(30)
        case 7:
            session.run("send('got', torch.ones(100_000)) if rank == 0 else None")
        case _:
            session.run("train(2)", output="none")


def use(session: Session, what: str, times: int) -> None:
    for number in range(times):
        if what == "cells":
            cell(session, number)
        elif what == "switches":
            session.switch("fsdp2" if session.backend == "ddp" else "ddp")
            session.run("train(1)", output="none")
        else:
            session.restart()
            session.run(training.MODEL)
            session.run("build(); train(1)", output="none")


def holds_no_more(session: Session, before: Everything, exempt: set[str]) -> None:
    """It holds what it held before; what is on its way to its end may take a moment."""
    found: list[str] = []

    def settled() -> bool:
        found[:] = grown(before, everything(session), exempt)
        return not found

    with suppress(AssertionError):
        eventually(settled, within_s=5)
    assert found == []


def grown(before: Everything, after: Everything, exempt: set[str]) -> list[str]:
    """What is more than before, in words; the memory of some processes does not count."""
    found = [f"file {name}" for name in (after.files - before.files).elements()]
    for name, held in after.processes.items():
        for what, tolerance in (("rss", RSS_TOLERANCE), ("fds", 0), ("threads", 0)):
            was, now = getattr(before.processes[name], what), getattr(held, what)
            if now - was > tolerance and not (what == "rss" and name in exempt):
                found.append(f"{what} of {name}: {was:,} -> {now:,}")
    return found


def warmed_up(session: Session) -> None:
    """Ranks of a launcher that has imported all it ever will: it does so while none are there."""
    imported = False
    while not imported:
        launcher = psutil.Process(psutil.Process(session.status()["ranks"][0]["pid"]).ppid())
        workers(session).stop_ranks()
        wait_until_idle(launcher.pid)
        session.restart()
        imported = bool(
            session.run(f"import sys; {WARM_UP_IMPORTS[-1]!r} in sys.modules").values[0]
        )


UNKNOWN = {"launcher", "rank 0", "rank 1"}
"""Whose memory grows by imports while the launcher is not warm."""


def check(cells: int, restarts: int, switches: int, *, warm: bool) -> None:
    """After a third of each, nothing grows any more."""
    with Session(nproc=2) as session:
        if warm:
            warmed_up(session)
        session.run(training.MODEL)
        # torch keeps records of the last 2,000 collectives
        session.run("build(); losses = train(1500)", output="none")
        for what, times in (("cells", cells), ("switches", switches), ("restarts", restarts)):
            use(session, what, times // 3)
            before = everything(session)
            use(session, what, times - times // 3)
            holds_no_more(session, before, UNKNOWN if what == "restarts" and not warm else set())


@pytest.mark.nightly
@pytest.mark.fault("F7")
@pytest.mark.timeout(180)
def test_what_a_session_holds_does_not_grow() -> None:
    check(cells=30, restarts=3, switches=4, warm=False)  # an even number: same backend


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_cells_fifty_restarts_fifty_switches() -> None:
    check(cells=1_000, restarts=50, switches=50, warm=True)
