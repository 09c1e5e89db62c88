"""Destinations of a cell's output: the notebook, a terminal or a file.

``RunningCellWriter`` serves a cell that blocks, and all cells in a terminal or a script, where it
prints. ``FinishedCellSink`` serves a cell of a kernel that has returned and may be used from any
thread. `running_cell` and `finished_cell` return them, or in a marimo notebook their counterpart
`MarimoCell`. `RankComms` is the way back: it passes what the
front end sends to widgets on to the ranks.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.output.dedup import MimeBundle, StreamName

PANEL_FORMATS = ("auto", "widget", "html", "text")
"""Output formats of the panel. Defined here so that magics need not import the panel."""


class OutputSink(Protocol):
    """Destination of one cell's output."""

    @property
    def can_update(self) -> bool:
        """Return whether a display can be changed after it was shown."""

    @property
    def has_output_area(self) -> bool:
        """Return whether displays are shown apart from text, as in marimo."""

    def write(self, name: StreamName, text: str) -> None:
        """Write text to a stream of the cell."""

    def display(
        self,
        bundle: MimeBundle,
        metadata: MimeBundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Show a MIME bundle, or update the display with this id."""

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output; with `wait`, when new output arrives."""

    def relay_comm(
        self, msg_type: str, content: MimeBundle, metadata: MimeBundle, buffers: list[Any]
    ) -> None:
        """Forward a comm message of a rank's widget to the front end."""

    def flush(self) -> None:
        """Flush all written text."""


class RunningCellWriter:
    """The cell that runs now, through `print` and `display`; in a kernel on the main thread only.

    Uses sys.stdout, sys.stderr and IPython's display publisher, so %%capture, Output
    widgets, terminal IPython and plain scripts work as with the user's own prints.
    """

    has_output_area = False

    def __init__(self) -> None:
        self._last: StreamName | None = None

    @property
    def can_update(self) -> bool:
        """Return True in a notebook; False in terminals, scripts and under %%capture."""
        publisher = getattr(get_shell(), "display_pub", None)
        captured = not hasattr(sys.stdout, "set_parent")
        return getattr(publisher, "pub_socket", None) is not None and not captured

    def write(self, name: StreamName, text: str) -> None:
        """Write to the current sys.stdout or sys.stderr."""
        if self._last not in (None, name):
            self.flush()  # ipykernel 7.4 flushes each stream on its own timer: keep the order
        self._last = name
        stream = sys.stdout if name == "stdout" else sys.stderr
        try:
            stream.write(text)
        except UnicodeEncodeError:  # the encoding of the terminal or file lacks a character
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def display(
        self,
        bundle: MimeBundle,
        metadata: MimeBundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Publish through IPython; without IPython print the plain text."""
        shell = get_shell()
        if shell is not None:
            transient = {} if display_id is None else {"display_id": display_id}
            shell.display_pub.publish(bundle, metadata, transient=transient, update=update)
        elif "text/plain" in bundle:
            self.write("stdout", f"{bundle['text/plain']}\n")

    def clear(self, *, wait: bool) -> None:
        """Clear the running cell's output."""
        shell = get_shell()
        if shell is not None:
            shell.display_pub.clear_output(wait)

    def relay_comm(
        self, msg_type: str, content: MimeBundle, metadata: MimeBundle, buffers: list[Any]
    ) -> None:
        """Send a comm message on the kernel's iopub channel; ignored outside a kernel."""
        if get_kernel() is not None:
            _send(msg_type, content, parent_header(), metadata=metadata, buffers=buffers)

    def flush(self) -> None:
        """Flush both streams if anything was written."""
        if self._last is None:  # ipykernel 7.4 takes 0.4 ms per flush
            return
        self._last = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


class FinishedCellSink:
    """The cell of a kernel that runs on this thread now, also after it has returned.

    Messages have the cell's parent header.

    ipykernel 7.4: `kernel.iopub_socket` passes messages to the IOPub thread and Session signs with
    a copy of its key, so any thread may send (tested: 200 messages from 4 threads while a cell
    prints). Front ends show them below the pinned cell. nbclient 0.11 drops every message whose
    parent is not the cell that it runs, as it does with the output of any thread.
    """

    can_update, has_output_area = True, False

    def __init__(self) -> None:
        self._parent = parent_header()
        self._lock = threading.RLock()
        self._text: list[str] = []
        self._name: StreamName = "stdout"

    def write(self, name: StreamName, text: str) -> None:
        """Write to the pinned cell. The text is buffered until the next flush."""
        with self._lock:
            if name != self._name:
                self.flush()
                self._name = name
            self._text.append(text)

    def display(
        self,
        bundle: MimeBundle,
        metadata: MimeBundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Send a display to the pinned cell, or update one."""
        transient = {} if display_id is None else {"display_id": display_id}
        content = {"data": bundle, "metadata": metadata, "transient": transient}
        self._send("update_display_data" if update else "display_data", content)

    def clear(self, *, wait: bool) -> None:
        """Clear the pinned cell's output."""
        self._send("clear_output", {"wait": wait})

    def relay_comm(
        self, msg_type: str, content: MimeBundle, metadata: MimeBundle, buffers: list[Any]
    ) -> None:
        """Send a comm message of a widget."""
        self._send(msg_type, content, metadata=metadata, buffers=buffers)

    def flush(self) -> None:
        """Send the buffered text."""
        with self._lock:
            text, self._text = "".join(self._text), []
            if text:
                _send("stream", {"name": self._name, "text": text}, self._parent)

    def _send(self, msg_type: str, content: MimeBundle, **more: Any) -> None:
        with self._lock:
            self.flush()
            _send(msg_type, content, self._parent, **more)


class RankComm:
    """Comm of a rank in the comm manager of the notebook's kernel; the manager calls both handlers.

    Not a `comm.BaseComm`, which triggers the events of a cell in the notebook's kernel for each
    message, and of which ipykernel 7.4 dispatches messages to the shell that a cell blocks
    (`_reply_subshell_for`).

    Args:
        comm_id: id that the rank has sent.
        forward: called with each message of the front end, on any thread.
    """

    target_name = "nbdist.rank"
    """Not "jupyter.widget": a page that is loaded asks the kernel for the comms of that target and
    waits until each of them has sent its state."""

    def __init__(self, comm_id: str, forward: Callable[[MimeBundle], None]) -> None:
        self.comm_id = comm_id
        self.handle_msg = self.handle_close = forward


class RankComms:
    """Comms that the widgets of the ranks have opened in one cell.

    The front end sends the messages of these comms, such as a click, to the notebook's kernel.

    Args:
        forward: called with a rank and a message of the front end, on any thread.
    """

    def __init__(self, forward: Callable[[int, MimeBundle], None]) -> None:
        self._forward = forward
        self._comm_ids: set[str] = set()
        self._manager = getattr(get_kernel(), "comm_manager", None)  # None in a script

    def follow(self, rank: int, msg_type: str, comm_id: str) -> None:
        """Register a comm that a rank opens, and forget one that it closes."""
        manager = self._manager
        if manager is None:
            return
        if msg_type == "comm_open":
            self._comm_ids.add(comm_id)
            manager.register_comm(RankComm(comm_id, lambda message: self._forward(rank, message)))
        elif msg_type == "comm_close":
            self._comm_ids.discard(comm_id)
            manager.comms.pop(comm_id, None)

    def close(self) -> None:
        """Forget all comms: further messages of the front end are dropped."""
        manager, self._manager = self._manager, None
        while manager is not None and self._comm_ids:
            manager.comms.pop(self._comm_ids.pop(), None)


def running_cell() -> OutputSink:
    """Return the sink of the cell that runs now on this thread, for this thread."""
    return _marimo_cell(uses_streams=True) or RunningCellWriter()


def finished_cell() -> OutputSink:
    """Return a sink pinned to the cell that runs now on this thread, for any thread."""
    if marimo_cell := _marimo_cell(uses_streams=False):
        return marimo_cell
    return RunningCellWriter() if get_kernel() is None else FinishedCellSink()


def in_marimo_cell() -> bool:
    """Return whether a cell of a marimo notebook runs on this thread. Never imports marimo."""
    marimo = sys.modules.get("marimo")
    if marimo is None or not marimo.running_in_notebook():  # False in `python notebook.py`
        return False
    context = sys.modules["marimo._runtime.context"].get_context()
    return context.execution_context is not None


def _marimo_cell(*, uses_streams: bool) -> OutputSink | None:
    if not in_marimo_cell():
        return None
    from nbdist.output.marimo_cell import MarimoCell

    return MarimoCell(uses_streams=uses_streams)


def parent_header() -> MimeBundle:
    """Return the header of the cell that runs now on this thread; {} outside a kernel."""
    shell = get_shell()
    parent = shell.get_parent() if hasattr(shell, "get_parent") else None
    header: MimeBundle = (parent or {}).get("header", parent) or {}
    return header


def get_shell() -> Any:
    """Return the IPython shell, or None. Never imports IPython."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def get_kernel() -> Any:
    """Return the notebook kernel; None in a terminal or a script."""
    return getattr(get_shell(), "kernel", None)


def _send(
    msg_type: str,
    content: MimeBundle,
    parent: MimeBundle,
    *,
    metadata: MimeBundle | None = None,
    buffers: list[Any] | None = None,
) -> None:
    kernel = get_kernel()
    kernel.session.send(
        kernel.iopub_socket,
        msg_type,
        content,
        parent=parent,
        ident=msg_type.encode(),
        metadata=metadata,
        buffers=buffers,
    )
