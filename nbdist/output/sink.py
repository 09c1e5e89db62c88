"""Where the output of one cell goes: the notebook, a terminal, or a file.

Runs in the notebook's kernel. `LiveScreen` belongs to a cell that blocks and is used on the
main thread only. `PinnedScreen` belongs to a cell that has returned; any thread may use it.
Neither needs a kernel: in a terminal or a script they print.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Literal, Protocol

StreamName = Literal["stdout", "stderr"]
Bundle = dict[str, Any]
FACES = ("auto", "widget", "html", "text")
"""Of the panel; here, where magics can name them without importing the panel."""


class Screen(Protocol):
    """Where one cell's output goes."""

    @property
    def can_update(self) -> bool:
        """Whether a display can be changed after it was shown."""

    def write(self, name: StreamName, text: str) -> None:
        """Print text as the cell's own."""

    def display(
        self,
        bundle: Bundle,
        metadata: Bundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Show a mime bundle, or change the one with this id."""

    def clear(self, *, wait: bool) -> None:
        """Remove the cell's output; with `wait`, when the next one comes."""

    def relay(self, msg_type: str, content: Bundle, metadata: Bundle, buffers: list[Any]) -> None:
        """Pass a widget's comm message of a rank to the front end."""

    def flush(self) -> None:
        """Let everything written so far be seen."""


class LiveScreen:
    """The cell that runs now, as `print` and `display` reach it; main thread only.

    Uses sys.stdout, sys.stderr and IPython's display publisher, so %%capture, Output
    widgets, terminal IPython and plain scripts work as with the user's own prints.
    """

    def __init__(self) -> None:
        self._last: StreamName | None = None

    @property
    def can_update(self) -> bool:
        """True in a notebook; False in terminals, scripts and under %%capture."""
        publisher = getattr(shell_here(), "display_pub", None)
        captured = not hasattr(sys.stdout, "set_parent")
        return getattr(publisher, "pub_socket", None) is not None and not captured

    def write(self, name: StreamName, text: str) -> None:
        """Write to sys.stdout or sys.stderr as they are now."""
        if self._last not in (None, name):
            self.flush()  # ipykernel 7.4 sends each stream on its own timer: keep their order
        self._last = name
        _write(name, text)

    def display(
        self,
        bundle: Bundle,
        metadata: Bundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Publish through IPython; without it print the plain text."""
        shell = shell_here()
        if shell is None:
            _print_plain(bundle)
            return
        shell.display_pub.publish(bundle, metadata, transient=_transient(display_id), update=update)

    def clear(self, *, wait: bool) -> None:
        """Clear the running cell's output."""
        shell = shell_here()
        if shell is not None:
            shell.display_pub.clear_output(wait)

    def relay(self, msg_type: str, content: Bundle, metadata: Bundle, buffers: list[Any]) -> None:
        """Send on the kernel's iopub channel; nothing outside a kernel."""
        if kernel_here() is not None:
            _send(msg_type, content, parent_header(), metadata=metadata, buffers=buffers)

    def flush(self) -> None:
        """Flush both streams, if anything was written: ipykernel 7.4 takes 0.4 ms for each."""
        if self._last is None:
            return
        self._last = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


class PinnedScreen:
    """A cell that has returned: its output area stays reachable by its header.

    ipykernel 7.4: `kernel.iopub_socket` hands messages to the IOPub thread and Session signs
    on a copy of its key, so any thread may send (tried: 200 messages of 4 threads while a
    cell prints). Front ends put them under the pinned cell. nbclient 0.11 drops every message
    whose parent is not the cell it runs, as it does with the output of any thread.
    """

    def __init__(self, parent: Bundle | None = None) -> None:
        """Pin to a cell; by default to the one that runs now on this thread."""
        self._parent = parent_header() if parent is None else parent
        self._lock = threading.RLock()
        self._text: list[str] = []
        self._name: StreamName = "stdout"

    @property
    def can_update(self) -> bool:
        """True in a notebook's kernel."""
        return kernel_here() is not None

    def write(self, name: StreamName, text: str) -> None:
        """Print to the pinned cell; sent with the next flush, few messages in all."""
        if kernel_here() is None:
            _write(name, text)
            return
        with self._lock:
            if name != self._name:
                self.flush()
                self._name = name
            self._text.append(text)

    def display(
        self,
        bundle: Bundle,
        metadata: Bundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Send a display to the pinned cell, or change one."""
        if kernel_here() is None:
            _print_plain(bundle)
            return
        content = {"data": bundle, "metadata": metadata, "transient": _transient(display_id)}
        self._send("update_display_data" if update else "display_data", content)

    def clear(self, *, wait: bool) -> None:
        """Clear the pinned cell's output."""
        if kernel_here() is not None:
            self._send("clear_output", {"wait": wait})

    def relay(self, msg_type: str, content: Bundle, metadata: Bundle, buffers: list[Any]) -> None:
        """Send a widget's message; nothing outside a kernel."""
        if kernel_here() is not None:
            self._send(msg_type, content, metadata=metadata, buffers=buffers)

    def flush(self) -> None:
        """Send the text that waits; in a terminal flush it."""
        if kernel_here() is None:
            sys.stdout.flush()
            sys.stderr.flush()
            return
        with self._lock:
            text, self._text = "".join(self._text), []
            if text:
                _send("stream", {"name": self._name, "text": text}, self._parent)

    def _send(self, msg_type: str, content: Bundle, **more: Any) -> None:
        with self._lock:
            self.flush()
            _send(msg_type, content, self._parent, **more)


def parent_header() -> Bundle:
    """Header of the cell that runs now on this thread; {} outside a kernel."""
    shell = shell_here()
    parent = shell.get_parent() if hasattr(shell, "get_parent") else None
    header: Bundle = (parent or {}).get("header", parent) or {}
    return header


def shell_here() -> Any:
    """IPython's shell if there is one; never imports IPython."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def kernel_here() -> Any:
    """The notebook's kernel; None in a terminal or a script."""
    return getattr(shell_here(), "kernel", None)


def _send(
    msg_type: str,
    content: Bundle,
    parent: Bundle,
    *,
    metadata: Bundle | None = None,
    buffers: list[Any] | None = None,
) -> None:
    kernel = kernel_here()
    kernel.session.send(
        kernel.iopub_socket,
        msg_type,
        content,
        parent=parent,
        ident=msg_type.encode(),
        metadata=metadata,
        buffers=buffers,
    )


def _write(name: StreamName, text: str) -> None:
    stream = sys.stdout if name == "stdout" else sys.stderr
    try:
        stream.write(text)
    except UnicodeEncodeError:  # a terminal or file with a smaller alphabet
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _print_plain(bundle: Bundle) -> None:
    text = bundle.get("text/plain")
    if text is not None:
        _write("stdout", f"{text}\n")


def _transient(display_id: str | None) -> Bundle:
    return {} if display_id is None else {"display_id": display_id}
