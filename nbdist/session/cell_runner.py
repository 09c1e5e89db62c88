"""Runs, waits for and interrupts the cells of a session; runs in the notebook's kernel.

The only place that knows which cell is running. One cell runs at a time. Earlier cells are kept for
a while: a background thread of a rank may still print, and tracebacks refer to their code.
"""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist import rank_sets
from nbdist.errors import CellInterrupted
from nbdist.output.renderer import OutputRenderer
from nbdist.output.sink import finished_cell, running_cell
from nbdist.protocol import messages
from nbdist.session import collective_request
from nbdist.session.cell import Cell
from nbdist.session.interrupt import InterruptEscalation
from nbdist.session.prompts import InputPrompts, has_keyboard
from nbdist.session.visual_debugger import VisualDebugger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.errors import RankDied
    from nbdist.output.renderer import ShownRanks
    from nbdist.output.replay import RankLogTail
    from nbdist.output.sink import OutputSink
    from nbdist.session.profiler import SessionProfiler
    from nbdist.session.rank_activity import RankActivityPoller
    from nbdist.session.worker_group import WorkerGroup

MAX_CELLS = 64
"""Number of past cells for which late output (of a rank's background thread) is shown, and of which
the widgets work."""


class CellRunner:
    """The running cell and the cells before it.

    Args:
        workers: the worker group.
        rank_activity: polls the ranks while a cell runs.
        profiler: profiles a cell if this was requested.
        on_send: called with rank, name and path of each value of send().
    """

    def __init__(
        self,
        workers: WorkerGroup,
        rank_activity: RankActivityPoller,
        profiler: SessionProfiler,
        *,
        on_send: Callable[[int, str, str], None],
    ) -> None:
        self.running_cell: Cell | None = None
        self.last_cell: Cell | None = None
        """The cell that finished last."""
        self.changed_at = 0.0
        """Unix time at which a cell was last sent or finished, in seconds."""
        self.escalation: InterruptEscalation | None = None
        """Escalation of the running cell, or of the last one until the ranks are resynchronized."""
        self._prompts: InputPrompts | None = None
        """Prompts of the cell that a thread waits for."""
        self.background_cell: Cell | None = None
        """The last background cell."""
        self._recent_cells: list[Cell] = []
        self._lock = threading.Lock()
        """Protects `running_cell` and the kept cells, which several threads change."""
        self._counter = itertools.count(1)
        self._workers, self._rank_activity, self._profiler = workers, rank_activity, profiler
        self._on_send = on_send
        self.visual_debugger = VisualDebugger(workers)

    # -- a cell's life

    def run(  # noqa: PLR0913 - options of a cell
        self,
        code: str,
        ranks: Sequence[int],
        *,
        logs: Mapping[int, RankLogTail],
        checkpoints: str,
        background: bool = False,
        shown: ShownRanks = "all",
        count: int | None = None,
        debugs_error: bool = False,
    ) -> Cell:
        """Send a cell to ranks; unless `background`, wait until it has finished.

        Args:
            code: source of the cell.
            ranks: ranks that run it.
            logs: logs of these ranks.
            checkpoints: target of `save()` in the cell.
            background: return at once.
            shown: ranks whose output is displayed.
            count: number of the cell in the notebook. Default: counts the session's cells.
            debugs_error: whether it debugs the error of the last cell, which stays the last one.

        Raises:
            CellError: the code raised on a rank.
            CellInterrupted: the cell was interrupted.
            RankDied: a rank ended.
        """
        pinned = finished_cell()  # output stays below this notebook cell, also while others run
        screen = pinned if background else running_cell()
        renderer = OutputRenderer(screen, ranks=ranks, show=shown, logs=logs)
        profile = self._profiler.start_recording(ranks, None)
        cell = Cell(
            ranks,
            renderer,
            on_send=self._on_send,
            on_done=self._cell_done,
            on_comm=lambda cell, rank, message: self._workers.send_comm_message(
                rank, cell.request_id, message
            ),
        )
        cell.code, cell.count = code, count or next(self._counter)
        if profile is not None:
            profile.cell, profile.sources = cell, self.cell_sources(cell)
        note = messages.CellMetadata(
            count=cell.count, checkpoints=checkpoints, ranks=list(ranks), debugs_error=debugs_error
        )
        failed = self.last_cell if debugs_error else None
        if not background:
            self.visual_debugger.attach(cell)
        prompts = self.send(cell, note, allow_stdin=not background and has_keyboard())
        if background:
            self.background_cell = cell
            cell.detach(pinned)
            return cell
        self._join(cell, prompts, pinned)
        self.last_cell = failed or self.last_cell
        problem = self.resync_ranks()
        if cell.is_interrupted:  # possibly by another thread
            words = f"but {problem}" if problem else "all variables are kept"
            raise CellInterrupted(f"{cell.deadlock}Interrupted on all ranks; {words}.") from None
        cell.raise_errors()
        return cell

    def send(self, cell: Cell, note: messages.CellMetadata, *, allow_stdin: bool) -> InputPrompts:
        """Send a cell to its ranks; return its prompts."""
        self.escalation = InterruptEscalation(cell, self._workers, self._rank_activity)
        with self._lock:
            self.running_cell, self.changed_at = cell, time.time()
            self._recent_cells.append(cell)
            old, self._recent_cells = (
                self._recent_cells[:-MAX_CELLS],
                self._recent_cells[-MAX_CELLS:],
            )
        for past in old:
            self._workers.drop_requests({past.request_id})
            past.comms.close()
        content = messages.make_execute_request(cell.code, allow_stdin=allow_stdin)
        cell.request_id = self._workers.send_request(
            cell.ranks,
            "shell",
            "execute_request",
            content,
            cell.on_message,
            note=note,
        )
        self._prompts = InputPrompts(cell, self.escalation, self._workers, self._rank_activity)
        return self._prompts

    def _join(self, cell: Cell, prompts: InputPrompts, afterwards: OutputSink) -> None:
        """Show the cell's output until it has finished; forward interrupts to the ranks.

        `afterwards` shows output that arrives later.

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
                    cell.render_pending()
                    prompts.answer_next()
                except KeyboardInterrupt:
                    pressed = not prompts.take_cancelled()
            if not cell.finished.is_set():
                cell.show_errors()
                raise CellInterrupted(
                    f"{rank_sets.describe_ranks(cell.pending)} did not stop yet: Python handles an"
                    " interrupt only when the library call returns. Use %nbdist wait to keep"
                    " waiting, %nbdist interrupt to end the ranks, or %nbdist restart to start new"
                    " ones."
                )
            self._profiler.show_pending(cell)
        finally:
            self.visual_debugger.detach()
            cell.detach(afterwards)

    def escalate_interrupt(self) -> bool:
        """Escalate the interrupt of the running cell by one stage; return False without one."""
        if self.running_cell is None or self.escalation is None:
            return False
        self._cancel_prompt()
        self.visual_debugger.detach()
        self.escalation.escalate()
        return True

    def _cancel_prompt(self) -> None:
        """End the prompt that a thread shows, because its ranks stop or have ended."""
        if self._prompts is not None:
            self._prompts.cancel()

    def stop_after_step(self, patience_s: float) -> None:
        """Interrupt the running cell when its ranks have completed their optimizer step.

        Args:
            patience_s: time for the step; then as an interrupt.
        """
        if self.running_cell is not None and self.escalation is not None:
            self._cancel_prompt()
            if not self.escalation.num_interrupts:
                self.escalation.escalate(patience_s=patience_s)
            self._workers.wake()

    def resync_ranks(self) -> str:
        """Resynchronize the ranks if needed. Returns an error message, or ""."""
        if self.escalation is None:
            return ""
        problem = collective_request.resync_ranks(self.escalation, self._workers)
        self.escalation = None
        return problem

    # -- messages, on the reader thread

    def _cell_done(self, cell: Cell) -> None:
        if self.running_cell is cell:
            self.running_cell, self.last_cell, self.changed_at = None, cell, time.time()
            self._rank_activity.clear()

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
        waiting = [
            cell for cell in self._recent_cells if cell.detached and not cell.has_no_pending_output
        ]
        for cell in waiting:
            cell.render_pending(0)
        return bool(waiting)

    # -- all cells

    def fail_all(self, death: RankDied) -> None:
        """Fail unfinished cells and drop all, because their ranks have ended."""
        with self._lock:
            dying, self._recent_cells = self._recent_cells, []
        for cell in dying:
            cell.comms.close()
            if not cell.finished.is_set():
                cell.fail(death)
                self._cancel_prompt()
                if cell.detached:
                    cell.render_pending(0)

    def cell_numbers_by_file(self) -> dict[str, int]:
        """Return the numbers of the kept cells by the file name of their code on the ranks."""
        from ipykernel.compiler import get_file_name

        return {Path(get_file_name(cell.code)).name: cell.count for cell in self._recent_cells}

    def cell_sources(self, cell: Cell) -> list[tuple[str, str]]:
        """Return name and code of the kept cells, `cell` last, for advice about their lines."""
        before = [past for past in self._recent_cells if past is not cell]
        return [(f"In[{past.count}]", past.code) for past in (*before, cell)]
