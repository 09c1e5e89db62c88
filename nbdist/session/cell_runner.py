"""Sends, joins and interrupts the cells of a session; runs in the notebook's kernel.

One cell runs at a time. Earlier cells are kept for a while: a background thread of a rank may
still print, and tracebacks refer to their code.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from nbdist import rank_sets as rank_names
from nbdist.errors import CellInterrupted
from nbdist.protocol import messages
from nbdist.session import cell_source, collective_request
from nbdist.session.interrupt import InterruptEscalation

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.errors import RankDied
    from nbdist.output.sink import FinishedCellSink
    from nbdist.session.cell import Cell
    from nbdist.session.rank_polling import RankActivityPoller
    from nbdist.session.worker_group import WorkerGroup

MAX_CELLS = 64
"""Number of past cells for which late output (of a rank's background thread) is shown."""


class CellRunner:
    """The running cell and the cells before it."""

    def __init__(self, workers: WorkerGroup, rank_activity: RankActivityPoller) -> None:
        self.running_cell: Cell | None = None
        self.background_cell: Cell | None = None
        """The last background cell."""
        self.last_cell: Cell | None = None
        """The cell that finished last."""
        self._kept: list[Cell] = []
        self._lock = threading.Lock()
        """Protects `running_cell` and the kept cells, which several threads change."""
        self.escalation: InterruptEscalation | None = None
        """Escalation of the running cell, or of the last one until the ranks are resynchronized."""
        self._counter = itertools.count(1)
        self._workers, self._rank_activity = workers, rank_activity

    # -- a cell's life

    def next_cell_number(self, given: int | None) -> int:
        """Return the number of the next cell: the notebook's own, or a count."""
        return given or next(self._counter)

    def send(self, cell: Cell, *, world_size: int, checkpoints: str) -> None:
        """Send a cell to its ranks, with the target of its `save()`."""
        self.escalation = InterruptEscalation(
            cell, self._workers, self._rank_activity, world_size=world_size
        )
        with self._lock:
            self.running_cell = cell
            self._kept.append(cell)
            old, self._kept = self._kept[:-MAX_CELLS], self._kept[-MAX_CELLS:]
        for past in old:
            self._workers.drop_requests(set(past.requests.values()))
        note = messages.CellMetadata(count=cell.count, checkpoints=checkpoints)
        content = messages.make_execute_request(cell.code)
        request = self._workers.queue_request(
            cell.ranks,
            "shell",
            "execute_request",
            content,
            cell.on_message,
            note=note,
            together=True,
        )
        cell.requests.update(dict.fromkeys(cell.ranks, request))
        self._workers.wake()

    def join(
        self,
        cell: Cell,
        afterwards: FinishedCellSink,
        *,
        owed: Callable[[Cell], object],
    ) -> None:
        """Show the cell's output until it has finished; forward interrupts to the ranks.

        Args:
            cell: the running cell.
            afterwards: shows output that arrives later.
            owed: shows pending results, such as a profile, below the finished cell.

        Raises:
            CellInterrupted: interrupted twice, and the ranks did not stop: the cell keeps running.
        """
        pressed = False
        try:
            while not cell.finished.is_set():
                if self.escalation is not None and self.escalation.returns_prompt:
                    break
                try:
                    if pressed:
                        pressed = False
                        self.escalate_interrupt()
                    cell.render_pending(cell.poll_timeout_s)
                except KeyboardInterrupt:
                    pressed = True
            if not cell.finished.is_set():
                cell.show_errors()
                raise CellInterrupted(stuck_ranks_message(cell))
            owed(cell)
        finally:
            cell.detach(afterwards)

    def escalate_interrupt(self) -> bool:
        """Escalate the interrupt of the running cell by one stage; return False without one."""
        if self.running_cell is None or self.escalation is None:
            return False
        self.escalation.escalate()
        return True

    def resync_ranks(self, *, world_size: int) -> str:
        """Resynchronize the ranks if needed. Returns an error message, or ""."""
        if self.escalation is None:
            return ""
        problem = collective_request.resync_ranks(
            self.escalation, self._workers, world_size=world_size
        )
        self.escalation = None
        return problem

    # -- messages, on the reader thread

    def mark_done(self, cell: Cell) -> bool:
        """Mark a cell as finished; return whether it was the running one."""
        if self.running_cell is not cell:
            return False
        self.running_cell, self.last_cell = None, cell
        self._rank_activity.clear()
        return True

    def print_line(self, line: str) -> None:
        """Print a line below the running cell."""
        if self.running_cell is not None:
            self.running_cell.print_line(line)

    def tick(self) -> None:
        """Watch the running cell."""
        if self.running_cell is not None and self.escalation is not None:
            self.escalation.tick()

    def render_background_output(self) -> bool:
        """Show output of background and past cells; return whether there was any."""
        waiting = [cell for cell in self._kept if cell.detached and not cell.has_no_pending_output]
        for cell in waiting:
            cell.render_pending(0)
        return bool(waiting)

    # -- all cells

    def fail_all(self, death: RankDied) -> None:
        """Fail unfinished cells and drop all, because their ranks have ended."""
        with self._lock:
            dying, self._kept = self._kept, []
        for cell in dying:
            if not cell.finished.is_set():
                cell.fail(death)
                if cell.detached:
                    cell.render_pending(0)

    def cell_numbers_by_file(self) -> dict[str, int]:
        """Return the numbers of the kept cells by the file name of their code on the ranks."""
        return {cell_source.cell_file_name(cell.code): cell.count for cell in self._kept}

    def cell_sources(self, cell: Cell) -> list[tuple[str, str]]:
        """Return name and code of the kept cells, `cell` last, for advice about their lines."""
        before = [past for past in self._kept if past is not cell]
        return [(f"In[{past.count}]", past.code) for past in (*before, cell)]


def stuck_ranks_message(cell: Cell) -> str:
    """Return an error message with the ranks that did not stop and what to do."""
    return (
        f"{rank_names.describe_ranks(cell.pending)} did not stop yet: Python handles an interrupt"
        " only when the library call returns. Use %nbdist wait to keep waiting, %nbdist interrupt"
        " to end the ranks, or %nbdist restart to start new ones."
    )
