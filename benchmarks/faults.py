"""Five faults on nbdist and its rivals: what a user learns, keeps, and has to tidy up.

Each measurement has a fresh kernel. The clock runs from the fault until the cell shows what
happened. The next cells look for a variable and train a model on. Then the kernel is shut down
as Jupyter does it, and processes that live 20 s later are counted.
"""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import psutil
from injected_faults import FAULTS, KEPT, READ, TRAIN, TRAINED, TRAINING, Fault
from kernels import Cell, CellFailed, reply_status, run_on, take_output
from notebook_tools import contenders
from results import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kernels import Kernel
    from notebook_tools import Contender
    from rival_packages import Rivals

NEVER_S = 40.0
"""What the cell does not show by then, it never shows."""
ALONE_S = 10.0
"""So long after a fault no other measurement begins."""
LANES = 8
BEGUN_S = 60.0
STOPPED_S = 5.0
PAUSE_S = 2.0
"""Nobody types the next cell faster."""
NEXT_CELL_S = 15.0
LEFT_S = 20.0
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a fault did to one contender."""

    known_s: float = NEVER_S
    over_s: float = NEVER_S
    """Until the cell had ended."""
    kept: int = 0
    """Ranks whose variable the next cell could read."""
    trained: int = 0
    """Ranks that could train the model on."""
    left: int = 0
    left_after_restart: int | None = None
    """The same once Jupyter has killed the kernel's process group, as it does for a restart."""
    page: str = ""
    """What the user saw."""

    def __str__(self) -> str:
        if self.left_after_restart is not None:
            return f"left {self.left}, {self.left_after_restart} after Jupyter's restart"
        return (
            f"known {seconds(self.known_s)}, cell over {seconds(self.over_s)}, "
            f"kept on {self.kept}, trains on {self.trained}, left {self.left}"
        )


class Running:
    """A cell under way, and when its user knew what happened.

    Args:
        kernel: where.
        code: the cell.
        cause: pattern of what the user must see.
    """

    def __init__(self, kernel: Kernel, code: str, cause: str) -> None:
        self.kernel, self.cell, self.cause = kernel, Cell(), cause
        self.known_at = self.over_at = 0.0
        self._idle = False
        self._request = kernel.client.execute(code)

    @property
    def page(self) -> str:
        """What is to be read in it so far."""
        return ANSI.sub("", "\n".join([self.cell.page, *self.cell.errors]))

    def watch(self, *, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Take its output until it is over, or until this time of day."""
        while not (self.over_at or enough() or time.time() > until):
            if self._idle:
                self.cell.status = reply_status(self.kernel.client, self._request)
                self.over_at = time.time() if self.cell.status else 0.0
            else:
                self._idle = take_output(self.kernel.client, self._request, self.cell)
            if not self.known_at and self.cause and re.search(self.cause, self.page):
                self.known_at = time.time()

    def begun(self) -> dict[int, int]:
        """The pid of each rank, when both have reached their lines."""
        files = [self.kernel.folder / f"rank{rank}" for rank in range(2)]

        def here() -> bool:
            return all(file.exists() and file.read_text() for file in files)

        self.watch(until=time.time() + BEGUN_S, enough=here)
        if not here():
            raise CellFailed(self.page)
        return {rank: int(file.read_text()) for rank, file in enumerate(files)}


def measure(others: Rivals, pages: Path) -> Iterator[Row]:
    """Rows about faults; what users saw is written into the folder `pages`.

    One measurement begins at a time and is alone for its first seconds; long waits overlap.
    """
    who = contenders(others)
    pairs = list(product(FAULTS, who))
    alone = threading.Lock()
    with ThreadPoolExecutor(LANES) as lanes:
        outcomes = list(lanes.map(lambda pair: suffer(*pair, alone), pairs))
    pages.mkdir(exist_ok=True)
    for (fault, contender), outcome in zip(pairs, outcomes, strict=True):
        (pages / f"{fault.name}, {contender.name}.txt").write_text(f"{outcome}\n\n{outcome.page}")
    for number, fault in enumerate(FAULTS):
        of_fault = outcomes[number * len(who) : (number + 1) * len(who)]
        yield from rows(fault, dict(zip([each.name for each in who], of_fault, strict=True)))


def suffer(fault: Fault, contender: Contender, alone: threading.Lock) -> Outcome:
    """One fault on one contender, from a kernel's start to its end."""
    with alone:
        kernel = contender.kernel()
        contender.start(kernel)
        kernel.run(contender.cell(TRAINING))
        running = Running(kernel, contender.cell(fault.lines), fault.cause)
        at = fault.inject(kernel, running.begun())
        if not fault.kills_kernel:
            running.watch(until=at + ALONE_S)
    outcome = bereaved(kernel, at) if fault.kills_kernel else survived(running, contender, at)
    print(f"{fault.name:40}{contender.name:18} {outcome}", flush=True)
    return outcome


def bereaved(kernel: Kernel, at: float) -> Outcome:
    """What is left of a kernel that was killed."""
    _, left = psutil.wait_procs(kernel.tree(), timeout=at + LEFT_S - time.time())
    after_restart = kernel.close(now=True, gone_s=STOPPED_S)
    return Outcome(left=len(left), left_after_restart=len(after_restart))


def survived(running: Running, contender: Contender, at: float) -> Outcome:
    """What is left of a session whose kernel lives."""
    kernel = running.kernel
    running.watch(until=at + NEVER_S)
    if not running.over_at:
        kernel.manager.interrupt_kernel()  # what a user tries in the end
        running.watch(until=time.time() + STOPPED_S)
    kept = ranks_that_say(kernel, contender.cell(READ), KEPT)
    trained = ranks_that_say(kernel, contender.cell(TRAIN), TRAINED) if kept else 0
    left = kernel.close(gone_s=LEFT_S)
    return Outcome(
        known_s=running.known_at - at if running.known_at else NEVER_S,
        over_s=running.over_at - at if running.over_at else NEVER_S,
        kept=kept,
        trained=trained,
        left=len(left),
        page=running.page,
    )


def ranks_that_say(kernel: Kernel, code: str, pattern: str) -> int:
    """How many ranks print this in the next cell, or in a second attempt a moment later."""
    for _ in range(2):
        time.sleep(PAUSE_S)
        cell = run_on(kernel.client, code, timeout_s=NEXT_CELL_S)
        if text := set(re.findall(pattern, cell.page)):
            return len(text)
    return 0


def rows(fault: Fault, outcomes: dict[str, Outcome]) -> Iterator[Row]:
    """What is asked of nbdist, with the rivals' values beside it."""
    ours = outcomes["nbdist"]

    def beside(show: Callable[[Outcome], str]) -> str:
        return ", ".join(f"{name} {show(outcome)}" for name, outcome in outcomes.items())

    if not fault.kills_kernel:
        yield Row(
            name=f"{fault.name}: cause known",
            value=ours.known_s,
            unit="s",
            limit=fault.limit_s,
            detail=beside(lambda outcome: seconds(outcome.known_s)),
        )
    if fault.keeps:
        yield Row(
            name=f"{fault.name}: ranks that train on",
            value=min(ours.kept, ours.trained),
            unit="of 2",
            limit=2,
            sense=">=",
            detail=beside(lambda outcome: str(min(outcome.kept, outcome.trained))),
        )
    yield Row(
        name=f"{fault.name}: processes left",
        value=ours.left,
        unit="",
        limit=0,
        detail=beside(lambda outcome: str(outcome.left)),
    )


def seconds(value: float) -> str:
    """A time, or that it never came."""
    return "never" if value >= NEVER_S else f"{value:.1f} s"
