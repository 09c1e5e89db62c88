"""Keeps output: the last text of each rank, and what a cell shows, to show it again.

jupyter-server passes the output of a running cell on only to the page that sent the cell, so a
notebook that is opened again misses it. What is kept are the items of the last stage: complete
lines, displays in their last state, and progress bars as a terminal would show them now.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from nbdist.output.dedup import DisplayOutput, OutputItem
from nbdist.output.line_splitter import StreamLineBuffer
from nbdist.output.rate_limit import LINES_PER_DISPLAY, OutputBudget, display_cost

if TYPE_CHECKING:
    from nbdist.output.dedup import MimeBundle, StreamName
    from nbdist.output.sink import OutputSink

_MAX_COMMS = 500
"""Widgets of which the state is kept."""
MAX_CHARS = 1_000_000
"""Kept characters of each rank."""
_OPEN_CHARS = 20_000
_LAST_CHUNKS = 20
"""Number of chunks that are searched for the last line."""


class RankLogTail:
    """The last text of one rank, for `%nbdist log RANK` and for reports of dead ranks.

    The renderer appends everything, including output that is not shown. Of a progress bar only the
    last state is kept.

    Safe to read from another thread while the renderer appends.
    """

    def __init__(self, *, limit: int = MAX_CHARS) -> None:
        self._limit = limit
        self._chunks: deque[str] = deque()
        self._chars = 0
        self._open: dict[str, str] = {}
        self._lock = threading.Lock()
        self.written = 0
        """Number of characters that were appended, kept or not."""

    def append(self, text: str, *, name: str = "stdout") -> None:
        """Append text of a stream. Lines of the two streams are not interleaved."""
        body, newline, rest = text.rpartition("\n")
        with self._lock:
            self.written += len(text)
            if newline:
                head = self._open.pop(name, "")
                lines = head + body[-self._limit :] + newline
                if "\r" in lines:
                    shown = (_overwritten(line.rstrip("\r")) for line in lines.split("\n"))
                    lines = "\n".join(shown)
                self._chunks.append(lines)
                self._chars += len(lines)
                while self._chars > self._limit and len(self._chunks) > 1:
                    self._chars -= len(self._chunks.popleft())
                if self._chars > self._limit:
                    self._chunks[0] = self._chunks[0][-self._limit :]
                    self._chars = len(self._chunks[0])
            open_line = self._open.get(name, "") + rest[-_OPEN_CHARS:]
            if open_line:
                self._open[name] = _overwritten(open_line)[-_OPEN_CHARS:]

    def text(self) -> str:
        """Return the kept text, oldest first."""
        with self._lock:
            return "".join([*self._chunks, *self._open.values()])

    def last_line(self) -> str:
        """Return the last line that is not empty, in constant time."""
        with self._lock:
            ends = [*self._open.values(), *islice(reversed(self._chunks), _LAST_CHUNKS)]
        lines = (line for text in ends for line in reversed(text.splitlines()) if line.strip())
        return next(lines, "").strip()

    def tail(self, lines: int = 20) -> str:
        """Return the last lines, joined with newlines."""
        all_lines = self.text().removesuffix("\n").split("\n")
        return "\n".join(all_lines[-lines:]) if lines > 0 else ""


def _overwritten(line: str) -> str:
    """Return what a terminal shows of a line that carriage returns overwrite."""
    if "\r" not in line:
        return line
    last = line.rstrip("\r").rpartition("\r")[2]
    return last + "\r" if line.endswith("\r") else last


@dataclass(slots=True)
class _WidgetState:
    """The `comm_open` of a widget, with the state of its later updates."""

    content: MimeBundle
    metadata: MimeBundle
    buffers: list[Any]


class RecordingSink:
    """Passes output on to a sink and keeps it, up to the burst of the output budget.

    Args:
        sink: the output sink; may be replaced while the cell runs.
    """

    def __init__(self, sink: OutputSink) -> None:
        self.sink = sink
        self._budget = OutputBudget()
        self._items: deque[tuple[OutputItem[Any], int, int]] = deque()
        """Complete lines and displays, each with its cost in lines and in characters."""
        self._open_lines: dict[StreamName, StreamLineBuffer] = {
            "stdout": StreamLineBuffer("stdout"),
            "stderr": StreamLineBuffer("stderr"),
        }
        self._displays: dict[str, DisplayOutput] = {}
        """The last state of each display with an id."""
        self._widgets: dict[str, _WidgetState] = {}
        self._lines = self._chars = self._num_dropped = 0
        self._clear_next = False

    @property
    def can_update(self) -> bool:
        """Return whether the sink can change a display after it was shown."""
        return self.sink.can_update

    @property
    def has_output_area(self) -> bool:
        """Return whether displays are shown apart from text."""
        return self.sink.has_output_area

    def write(self, name: StreamName, text: str) -> None:
        """Write text to a stream of the cell."""
        self.sink.write(name, text)
        self._begin_output()
        for line in self._open_lines[name].feed(text, now=time.monotonic()):
            self._keep(line)

    def display(
        self,
        bundle: MimeBundle,
        metadata: MimeBundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Show a MIME bundle, or update the display with this id."""
        self.sink.display(bundle, metadata, display_id=display_id, update=update)
        content = DisplayOutput(bundle, metadata, display_id)
        if update:
            if display_id in self._displays:
                self._displays[display_id] = content
            return
        self._begin_output()
        now = time.monotonic()
        for lines in self._open_lines.values():
            if lines.open_lines is not None and not lines.open_lines.is_progress_bar:
                for line in lines.close(now):  # a half line ends above the display
                    self._keep(line)
        if display_id is not None:
            self._displays[display_id] = content
        self._keep(OutputItem(content, now))

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output; with `wait`, when new output arrives."""
        self.sink.clear(wait=wait)
        self._clear_next = True
        if not wait:
            self._begin_output()

    def relay_comm(
        self, msg_type: str, content: MimeBundle, metadata: MimeBundle, buffers: list[Any]
    ) -> None:
        """Forward a comm message of a rank's widget, and keep the widget's state."""
        self.sink.relay_comm(msg_type, content, metadata, buffers)
        comm_id, data = str(content.get("comm_id")), content.get("data")
        widget = self._widgets.get(comm_id)
        if msg_type == "comm_open" and len(self._widgets) < _MAX_COMMS:
            self._widgets[comm_id] = _WidgetState(content, metadata, buffers)
        elif msg_type == "comm_close":
            self._widgets.pop(comm_id, None)
        elif widget is not None and isinstance(data, dict) and data.get("method") == "update":
            opened = widget.content.get("data") or {}
            state = {**opened.get("state", {}), **data.get("state", {})}
            widget.content = {**widget.content, "data": {**opened, "state": state}}

    def flush(self) -> None:
        """Flush all written text."""
        self.sink.flush()

    def replay(self, screen: OutputSink) -> None:
        """Show all that is kept on another sink."""
        for widget in self._widgets.values():
            screen.relay_comm("comm_open", widget.content, widget.metadata, widget.buffers)
        if self._num_dropped:
            screen.write(
                "stderr",
                f"nbdist: the first {self._num_dropped:,} lines and displays are not kept;"
                " `%nbdist log RANK` shows the last of a rank\n",
            )
        for item, _, _ in self._items:
            if isinstance(item.content, DisplayOutput):
                display_id = item.content.display_id
                last = self._displays.get(display_id or "", item.content)
                if last.bundle != {"text/plain": ""}:
                    screen.display(last.bundle, last.metadata, display_id=display_id)
            else:
                screen.write(item.stream or "stdout", f"{item.content}\n")
        for name, lines in self._open_lines.items():
            if lines.open_lines is not None:
                screen.write(name, "\n".join([*lines.open_lines.lines(), ""]))
        screen.flush()

    def _begin_output(self) -> None:
        """Forget earlier output if it is cleared now."""
        if self._clear_next:
            self._clear_next = False
            self._items.clear()
            self._displays.clear()
            for lines in self._open_lines.values():
                lines.close(time.monotonic())
            self._lines = self._chars = self._num_dropped = 0

    def _keep(self, item: OutputItem[Any]) -> None:
        """Append an item; drop the oldest ones beyond the budget."""
        if isinstance(item.content, DisplayOutput):
            lines, chars = LINES_PER_DISPLAY, display_cost(item.content.bundle)
        else:
            lines, chars = 1, len(item.content)
        self._items.append((item, lines, chars))
        self._lines += lines
        self._chars += chars
        while self._lines > self._budget.lines or self._chars > self._budget.chars:
            dropped, lines, chars = self._items.popleft()
            self._lines -= lines
            self._chars -= chars
            self._num_dropped += 1
            if isinstance(dropped.content, DisplayOutput):
                self._displays.pop(dropped.content.display_id or "", None)
