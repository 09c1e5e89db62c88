"""Runs the callbacks of this rank's widgets.

The front end's messages, such as a click, arrive on the control thread, because the shell channel
is not read while a cell runs. Their callbacks run on the main thread: between two optimizer steps,
or when no cell runs.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel

    Message = dict[str, Any]


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
        """Run the callbacks of all queued messages, on the main thread."""
        while self._pending and not self.in_callback:
            with self._lock:
                message = self._pending.popleft()
            self._run_callback(message)

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

    def _run_callback(self, message: Message) -> None:
        """Run the callback of a message; its output appears where the widget is."""
        kernel = self._kernel
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
