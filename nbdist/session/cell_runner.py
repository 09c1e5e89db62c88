"""The cells of a session: sent to the ranks, joined, stopped; runs in the notebook's kernel.

One cell runs at a time. Those before it are kept for a while, because a background thread of
a rank may still write under them, and because tracebacks name them.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from nbdist import rank_sets as rank_names
from nbdist.errors import CellInterrupted
from nbdist.protocol import messages
from nbdist.session import cell_source, recovery
from nbdist.session.interrupt import Ladder

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.errors import RankDied
    from nbdist.output.sink import PinnedScreen
    from nbdist.session.cell import Cell
    from nbdist.session.rank_activity import Whereabouts
    from nbdist.session.worker_group import Gang

KEPT_CELLS = 64
"""Late output (a rank's background thread) is shown for this many past cells."""


class Cells:
    """The cell that runs, and those before it."""

    def __init__(self, gang: Gang, whereabouts: Whereabouts) -> None:
        """Run nothing yet."""
        self.running: Cell | None = None
        self.background: Cell | None = None
        """The last one that was sent to run in the background."""
        self.last: Cell | None = None
        """The one that ended last."""
        self._kept: list[Cell] = []
        self._lock = threading.Lock()
        """For `running` and those kept: one thread sends a cell while another ends them all."""
        self.ladder: Ladder | None = None
        """Of the cell that runs now, or of the last one until the ranks are seen to be in step."""
        self._counter = itertools.count(1)
        self._gang, self._whereabouts = gang, whereabouts

    # -- a cell's life

    def number(self, given: int | None) -> int:
        """Number of the next cell: the notebook's own, or counted here."""
        return given or next(self._counter)

    def send(self, cell: Cell, *, world_size: int, checkpoints: str) -> None:
        """Send a cell to its ranks, with where its `save()` goes."""
        self.ladder = Ladder(cell, self._gang, self._whereabouts, world_size=world_size)
        with self._lock:
            self.running = cell
            self._kept.append(cell)
            old, self._kept = self._kept[:-KEPT_CELLS], self._kept[-KEPT_CELLS:]
        for one in old:
            self._gang.forget(set(one.requests.values()))
        note = messages.CellNote(count=cell.count, checkpoints=checkpoints)
        content = messages.execute(cell.code)
        request = self._gang.post(
            cell.ranks, "shell", "execute_request", content, cell.deliver, note=note, together=True
        )
        cell.requests.update(dict.fromkeys(cell.ranks, request))
        self._gang.wake()

    def join(
        self,
        cell: Cell,
        afterwards: PinnedScreen,
        *,
        owed: Callable[[Cell], object],
    ) -> None:
        """Show the cell's output until it is over; Stop interrupts the ranks.

        Args:
            cell: the one that runs.
            afterwards: where it shows what comes later.
            owed: shows what belongs below the cell when it is over.

        Raises:
            CellInterrupted: Stop was pressed twice, and the ranks did not stop: the cell goes on.
        """
        pressed = False
        try:
            while not cell.finished.is_set():
                if self.ladder is not None and self.ladder.returns_prompt:
                    break
                try:
                    if pressed:
                        pressed = False
                        self.stop()
                    cell.pump(cell.patience_s)
                except KeyboardInterrupt:
                    pressed = True
            if not cell.finished.is_set():
                cell.show_errors()
                raise CellInterrupted(stuck_words(cell))
            owed(cell)
        finally:
            cell.detach(afterwards)

    def stop(self) -> bool:
        """Go one stage further with the running cell; returns whether there is one."""
        if self.running is None or self.ladder is None:
            return False
        self.ladder.stop()
        return True

    def settle(self, *, world_size: int) -> str:
        """See that the ranks of the cell before are in step; returns what went wrong with it."""
        if self.ladder is None:
            return ""
        problem = recovery.settle(self.ladder, self._gang, world_size=world_size)
        self.ladder = None
        return problem

    # -- what arrives on the reader thread

    def done(self, cell: Cell) -> bool:
        """Note that a cell is over; whether it was the one that runs."""
        if self.running is not cell:
            return False
        self.running, self.last = None, cell
        self._whereabouts.forget()
        return True

    def tell(self, line: str) -> None:
        """Show a line below the cell that runs."""
        if self.running is not None:
            self.running.tell(line)

    def tick(self) -> None:
        """Watch the running cell."""
        if self.running is not None and self.ladder is not None:
            self.ladder.tick()

    def show_late(self) -> bool:
        """Show output of background cells, and what past ones write; whether there was any."""
        waiting = [cell for cell in self._kept if cell.detached and not cell.quiet]
        for cell in waiting:
            cell.pump(0)
        return bool(waiting)

    # -- all of them

    def die(self, death: RankDied) -> None:
        """End those that are not over, and forget all: their ranks are gone."""
        with self._lock:
            dying, self._kept = self._kept, []
        for cell in dying:
            if not cell.finished.is_set():
                cell.die(death)
                if cell.detached:
                    cell.pump(0)

    def files(self) -> dict[str, int]:
        """Numbers of the last cells by the name of the file that ranks give to their code."""
        return {cell_source.file_name(cell.code): cell.count for cell in self._kept}

    def sources(self, cell: Cell) -> list[tuple[str, str]]:
        """Name and code of the cells before this one, and of it, for advice on their lines."""
        before = [one for one in self._kept if one is not cell]
        return [(f"In[{one.count}]", one.code) for one in (*before, cell)]


def stuck_words(cell: Cell) -> str:
    """Say which ranks did not stop, and what can be done."""
    return (
        f"{rank_names.words(cell.pending)} did not stop yet: Python stops when the library that it"
        " has called returns. %nbdist wait goes on waiting; %nbdist interrupt ends the ranks, and"
        " %nbdist restart takes new ones."
    )
