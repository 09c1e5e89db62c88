"""Evaluates expressions of `%nbdist inspect` on the main thread of a rank.

The control thread only queues them: evaluated there, an expression would see weights in the middle
of an optimizer step. The main thread evaluates them before its next optimizer step, while it waits
at a prompt, or when no cell runs.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Any

from IPython.lib.pretty import pretty

from nbdist.protocol import messages
from nbdist.worker import stacks
from nbdist.worker.debugger import keyboard
from nbdist.worker.interrupt.optimizer_step_gate import optimizer_step_gate
from nbdist.worker.output_streams import MAX_ERROR_CHARS, truncate


class Inspection:
    """Expressions that wait for the main thread of a rank.

    Args:
        kernel: the `worker.kernel.RankKernel`, whose type cannot be imported here.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._pending: SimpleQueue[tuple[Any, messages.InspectRequest, float]] = SimpleQueue()
        optimizer_step_gate.before_step = keyboard.while_waiting = self.evaluate_pending

    def queue(self, request: messages.InspectRequest) -> dict[str, Any]:
        """Queue an expression; runs on the control thread."""
        parent = self._kernel.get_parent("control")
        self._pending.put((parent, request, time.monotonic() + request["within_s"]))
        keyboard.wake()
        self._kernel.io_loop.add_callback(self.evaluate_pending)
        return {}

    def evaluate_pending(self) -> None:
        """Evaluate the queued expressions and publish their values."""
        while True:
            try:
                parent, request, expires_at = self._pending.get_nowait()
            except Empty:
                return
            if time.monotonic() < expires_at:
                self._kernel.session.send(
                    self._kernel.iopub_socket,
                    messages.INSPECTED,
                    dict(self._evaluate(request["expression"])),
                    parent=parent,
                )

    def _evaluate(self, expression: str) -> messages.InspectedValue:
        try:
            value = eval(expression, self._variables())  # noqa: S307 - the user's own expression
            text = pretty(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - shown to the user
            text = f"{type(error).__name__}: {error}"
        return messages.InspectedValue(text=truncate(text, longest=MAX_ERROR_CHARS))

    def _variables(self) -> dict[str, Any]:
        """Return a copy of the debugger's frame's variables, of a cell's frame's, or the user's."""
        debugger = keyboard.thread.debugger
        frame = None if debugger is None else debugger.curframe
        if frame is None:
            cell_of = self._kernel.shell.compile.format_code_name
            outwards = stacks.frames_outwards(stacks.main_frame())
            frame = next((f for f in outwards if cell_of(f.f_code.co_filename)), None)
        if frame is None:
            return dict(self._kernel.shell.user_ns)
        # one dictionary: a comprehension does not see the locals of `eval`
        return {**frame.f_globals, **frame.f_locals}
