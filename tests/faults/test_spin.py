"""Ranks that are in C: they spin or sleep there, hold the GIL, or are stopped. Stop always ends.

A rank that waits for NCCL spins in `cudaStreamSynchronize` without the GIL; a C loop that does the
same stands for it here. On a CPU rank nothing ends such a loop but the end of the process.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist import CellInterrupted, Session, SessionBusy
from nbdist.session import interrupt, rank_activity
from tests.conftest import eventually
from tests.faults.training import TRAPPED
from tests.interrupts import meanwhile, press
from tests.nightly import nightly
from tests.session_internals import escalation, num_stops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SOURCE = """
#include <unistd.h>
void spin(volatile int *flag) { while (!*flag) ; }
void nap(void) { for (;;) pause(); }
"""
PREPARE = """
import ctypes, os, pathlib, signal, torch
trap = None
flag = ctypes.c_int(0)

def spring():
    global trap
    kind, trap = trap, None
    pathlib.Path(MARK).touch()
    if kind == "spins":
        ctypes.CDLL(LIBRARY).spin(ctypes.byref(flag))
    if kind == "sleeps":
        ctypes.CDLL(LIBRARY).nap()
    if kind == "holds the GIL":
        ctypes.PyDLL(LIBRARY).spin(ctypes.byref(flag))
    if kind == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
"""
TRAPS = ["spins", "sleeps", "holds the GIL", "is stopped"]
WORKS = ["cell", "switch", "save", "load", "export", "pull", "resize"]
SILENT = {"holds the GIL", "is stopped"}
"""Ranks whose control thread does not answer either."""
SHOWN = [("cell", "spins"), ("save", "holds the GIL")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spin")
    (folder / "spin.c").write_text(SOURCE)
    compiler = shutil.which("gcc")
    assert compiler is not None
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", "libspin.so", "spin.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "libspin.so"


@pytest.fixture(scope="module", autouse=True)
def soon() -> Iterator[None]:
    """Shorter times, as only their order is shown."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RETURN_AFTER_S", "END_AFTER_S", "SILENT_S", "MIN_FIRST_STAGE_S", "GRACE_S"):
            patch.setattr(interrupt, name, 1.0)
        patch.setattr(rank_activity, "HANG_AFTER_S", 1.0)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def session(library: Path, whole: Path) -> Iterator[Session]:
    """Two CPU ranks; a checkpoint of their model."""
    with nbdist.Session(nproc=2) as running:
        prepare(running, library, whole / "mark")
        running.save("whole", folder=whole, wait=True)
        yield running


@pytest.fixture
def works(session: Session, whole: Path, tmp_path: Path) -> dict[str, Callable[[], object]]:
    """What all ranks do together, by name."""
    return {
        "cell": lambda: session.run("if rank == 1: spring()\nwhile rank == 0: pass"),
        "save": lambda: session.save("another", folder=tmp_path, wait=True),
        "load": lambda: session.load("whole", folder=whole),
        "switch": lambda: session.switch("fsdp2"),
        "export": lambda: session.export(tmp_path / "exported"),
        "pull": lambda: session.pull("model"),
        "resize": lambda: session.switch(nproc=1),
    }


def prepare(session: Session, library: Path, mark: Path) -> None:
    session.run(f"LIBRARY, MARK = {str(library)!r}, {str(mark)!r}\n{PREPARE + TRAPPED}")


@pytest.mark.fault("C17")
@pytest.mark.parametrize(
    ("work", "trap"),
    [pair if pair in SHOWN else nightly(*pair) for pair in itertools.product(WORKS, TRAPS)],
)
def test_two_stops_return_the_prompt_and_a_third_ends_the_ranks(
    session: Session,
    library: Path,
    works: dict[str, Callable[[], object]],
    tmp_path: Path,
    work: str,
    trap: str,
) -> None:
    mark, seen = tmp_path / "mark", []
    prepare(session, library, mark)
    session.run(f"if rank == 1: trap = {trap!r}")

    def press_twice() -> None:
        eventually(mark.exists, within_s=60)
        named = f"rank 1 {trap}"
        if trap in SILENT:  # named without being asked for
            eventually(lambda: named in session.standstill, within_s=20)
        press()
        eventually(lambda: num_stops(session) == 1, within_s=10)
        eventually(lambda: named in session.standstill, within_s=20)
        seen.append(session.standstill)
        press()

    with (
        meanwhile(press_twice),
        pytest.raises(CellInterrupted, match=r"did not stop yet|is still running: .*rank 1"),
    ):
        works[work]()
    assert f"rank 1 {trap}" in seen[0]
    with pytest.raises(SessionBusy):
        session.run("rank")
    began = time.monotonic()
    assert session.interrupt()
    eventually(lambda: session.state == "ready" or session.death, within_s=20)
    assert time.monotonic() - began < 20  # 3 s on a machine of our own
    assert session.run("rank").values == {0: 0, 1: 1}


@pytest.mark.fault("C5")
def test_a_rank_that_spins_when_another_has_failed_is_reported_and_aborted_without_a_stop(
    session: Session, library: Path, tmp_path: Path
) -> None:
    prepare(session, library, tmp_path / "mark")
    code = "if rank == 0: raise ValueError('boom')\ntrap = 'spins'\nspring()"
    session.run(code, background=True)
    says = "rank 0 raised ValueError at line 1; rank 1 has been in ctypes.CDLL"
    eventually(lambda: says in session.standstill, within_s=20)
    eventually(lambda: "aborting the process groups" in session.standstill, within_s=20)
    assert num_stops(session) == 0
    eventually(lambda: "rank 1 spins" in session.standstill, within_s=20)
    for _ in range(3):
        assert session.interrupt()
    eventually(lambda: session.death is not None, within_s=20)
    with pytest.raises(CellInterrupted, match="rank 1 spins"):
        session.run("rank")
    assert session.run("rank").values == {0: 0, 1: 1}


def test_a_request_that_fails_on_one_rank_while_another_spins_is_freed_without_a_stop(
    session: Session, library: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    prepare(session, library, mark)
    session.run(
        "from nbdist.worker.operations import collective_phases as phases\n"
        "def fail(name):\n"
        "    if name == 'keeping': raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "def spin(name):\n"
        "    global trap\n"
        "    if name == 'keeping': trap = 'spins'; spring()\n"
        "phases.before_phase.append(spin if rank == 1 else fail)"
    )
    lines: list[str] = []

    def press_on() -> None:
        eventually(lambda: "aborting the process groups" in session.standstill, within_s=60)
        lines.append(session.standstill)
        assert num_stops(session) == 0
        for _ in range(3):
            session.interrupt()

    with meanwhile(press_on), pytest.raises(CellInterrupted, match="all ranks were replaced"):
        session.switch("fsdp2")
    assert "rank 1 spins" in lines[0]


@pytest.mark.nightly
def test_a_rank_that_computes_in_c_keeps_its_process_group_when_it_is_stopped(
    session: Session, library: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    prepare(session, library, mark)
    timer = "import threading\nthreading.Timer(4, lambda: setattr(flag, 'value', 1)).start()"
    stages: list[interrupt.InterruptStage] = []

    def press_once() -> None:
        eventually(mark.exists, within_s=60)
        found = escalation(session)
        assert found is not None
        press()
        eventually(lambda: "spin" in session.standstill, within_s=20)
        eventually(found.work.finished.is_set, within_s=20)
        stages.append(found.stage)

    with meanwhile(press_once), pytest.raises(CellInterrupted, match="all variables are kept"):
        session.run(f"{timer}\ntrap = 'spins'\nspring()")
    assert stages == [interrupt.InterruptStage.INTERRUPTED]
