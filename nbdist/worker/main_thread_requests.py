"""Carries out on the main thread what arrives on the control thread while a cell runs.

The shell channel is not read while a cell runs, so expressions of `%nbdist inspect` and the front
end's messages for widgets, such as a click, arrive on the control thread. It only queues them:
evaluated there, an expression would see weights in the middle of an optimizer step.

    expressions         before the next optimizer step, while the main thread waits at a prompt, or
                        when no cell runs
    widgets' callbacks  between two optimizer steps, or when no cell runs
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from IPython.lib.pretty import pretty

from nbdist.protocol import messages
from nbdist.worker import stacks
from nbdist.worker.debugger import keyboard
from nbdist.worker.optimizer_step_gate import optimizer_step_gate
from nbdist.worker.output_streams import MAX_ERROR_CHARS, truncate

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel

    Message = dict[str, Any]


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
            if time.monotonic() >= expires_at:
                continue
            try:
                value = eval(request["expression"], self._variables())  # noqa: S307 - the user's own
                text = pretty(value)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - shown to the user
                text = f"{type(error).__name__}: {error}"
            content = messages.InspectedValue(text=truncate(text, longest=MAX_ERROR_CHARS))
            self._kernel.session.send(
                self._kernel.iopub_socket, messages.INSPECTED, dict(content), parent=parent
            )

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


class WidgetMessages:
    """The front end's messages for the widgets of this rank, in order of arrival."""

    def __init__(self, kernel: IPythonKernel) -> None:
        self._kernel = kernel
        self._lock = threading.Lock()
        self._pending: deque[Message] = deque()
        self.in_callback = False
        """True while a callback runs."""

    def add(self, _stream: object, _ident: object, message: Message) -> None:
        """Queue a message; on the control thread."""
        with self._lock:
            # As a front end does while a kernel is busy: of a moved slider, the last value counts.
            if not (self._pending and _merge_update(self._pending[-1], message)):
                self._pending.append(message)
        self._kernel.io_loop.add_callback(self.run_callbacks_when_idle)

    def run_callbacks(self) -> None:
        """Run the callbacks of all queued messages, on the main thread.

        The output of a callback appears where its widget is.
        """
        kernel = self._kernel
        while self._pending and not self.in_callback:
            with self._lock:
                message = self._pending.popleft()
            cell = kernel.get_parent("shell")
            kernel.set_parent([], message, "shell")
            self.in_callback = True
            try:
                kernel.shell_handlers[message["header"]["msg_type"]](None, [], message)
            finally:
                self.in_callback = False
                sys.stdout.flush()
                sys.stderr.flush()
                kernel.set_parent([], cell, "shell")

    def run_callbacks_when_idle(self) -> None:
        """Run them while no cell runs; an interrupt ends one of them."""
        # ipykernel 7.4 ignores SIGINT outside of cells
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.run_callbacks()
        except KeyboardInterrupt:
            sys.stderr.write("KeyboardInterrupt: the callback of a widget was interrupted\n")
        finally:
            signal.signal(signal.SIGINT, before)


def _merge_update(earlier: Message, later: Message) -> bool:
    """Add the state of `later` to `earlier` if both update the same widget; return whether so."""
    before, after = earlier["content"], later["content"]
    data = before.get("data"), after.get("data")
    if (
        before["comm_id"] != after["comm_id"]
        or any(not isinstance(part, dict) or part.get("method") != "update" for part in data)
        or earlier["buffers"]
        or later["buffers"]
    ):
        return False
    before["data"]["state"].update(after["data"]["state"])
    return True
