"""Splits the text of ranks into lines; open lines have no newline yet: progress bars, half lines.

``TerminalEmulator`` holds the open text of one rank: a few rows with a cursor, in which carriage
return, backspace, erase and cursor-up work as in a terminal. So a progress bar of one rank cannot
erase or overwrite output of another rank, and nested bars keep their rows. ``OpenLinesDisplay``
shows the open text of all ranks in one display that is updated in place, and keeps its position
while other output appears below it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from nbdist.number_formatting import format_bytes
from nbdist.output.ansi import (
    COLOUR_SEQUENCE,
    ESCAPE_SEQUENCE,
    RESET,
    add_style,
    close_colours,
)
from nbdist.output.dedup import ClearOutput, DisplayOutput, OutputItem
from nbdist.rank_sets import format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.output.dedup import OutputMerger, StreamName
    from nbdist.output.sink import OutputSink

MAX_LINE = 20_000
"""Maximum number of characters of one line that are shown."""

MAX_OPEN_LINE_CHARS = 200_000
"""Maximum number of characters without a newline in one write of a single rank."""
LIVE_UPDATE_S = 0.125

_NOTE_CHARS = 64
"""Room for the note that ``truncate_lines`` appends to a line."""
_MAX_ROWS = 50
MAX_DISPLAY_ROWS = 64
_BAR_END_S = 0.15
"""A bar is closed if it has ended with a newline and is not continued within this time."""
_DISPLAY_DELAY_S = 1.0
"""Ranks differ in the time to draw a figure or compute a value. One late is better than two."""
_CLEAR_DELAY_S = 1.0
_WIDGET = "application/vnd.jupyter.widget-view+json"
_MAX_RETURNS = 50
_REDRAW = re.compile(r"\r(?!\n|$)|\x08|\x1b\[[0-9;]*[ABGKFEJ]")
_TOKEN = re.compile(rf"\r|\x08|{ESCAPE_SEQUENCE.pattern}|[^\r\x08\x1b]+")
_CURSOR = re.compile(r"\x1b\[([0-9]*)(?:;[0-9]*)*([A-Z])")

StyledRow = list[tuple[str, str]]
"""One row: (character, style) by column."""


class TerminalEmulator:
    """Rows of open text with a cursor."""

    def __init__(self, *, start_time: float, style: str = "") -> None:
        self.began = start_time
        self.style = style
        self.rows: list[StyledRow] = [[]]
        self.is_progress_bar = False
        """True after a cursor movement: the text is a progress bar rather than a half line."""
        self.is_displayed = False
        """True if a live display shows it; its lines are then not printed again."""
        self.is_closed = False
        self.empty_row_since: float | None = None
        """Time at which the cursor reached an empty last row, if it is still there."""
        self._row = 0
        self._column = 0
        self._overflow = 0
        self._final: list[str] | None = None

    def write(self, segment: str) -> None:
        """Write text without a newline."""
        if segment:
            self.empty_row_since = None
        if segment.count("\r") > _MAX_RETURNS:
            segment = "\r" + "\r".join(segment.rsplit("\r", _MAX_RETURNS)[1:])
        if len(segment) > MAX_LINE and "\r" in segment:
            segment = "\r" + segment.rstrip("\r").rpartition("\r")[2]
        free_columns = max(MAX_LINE - self._column, 0) if segment[:1] != "\r" else MAX_LINE + 1
        if len(segment) > free_columns:
            self._overflow += len(segment) - free_columns
            segment = segment[:free_columns]
        for match in _TOKEN.finditer(segment):
            piece = match[0]
            if piece == "\r":
                self._column = 0
                self._overflow = 0
                self.is_progress_bar = True
            elif piece == "\x08":
                self._column = max(self._column - 1, 0)
                self.is_progress_bar = True
            elif COLOUR_SEQUENCE.fullmatch(piece):
                self.style = add_style(self.style, piece)
            elif piece[0] == "\x1b":
                self._move(piece)
            else:
                self._overwrite(piece)

    def newline(self, now: float) -> None:
        """Move the cursor to the next row."""
        if self._overflow:
            self.rows[self._row] += [
                (char, "") for char in truncation_note(self._overflow + MAX_LINE)
            ]
            self._overflow = 0
        self._row += 1
        self._column = 0
        if self._row == len(self.rows):
            self.rows.append([])
        if not any(self.rows[self._row :]):
            self.empty_row_since = now

    def lines(self) -> list[str]:
        """Return the rows as text with closed colours, without trailing blank rows of a bar."""
        if self._final is not None:
            return self._final
        rows = [_text(cells) for cells in self.rows]
        if self._overflow:
            rows[self._row] += truncation_note(self._overflow + MAX_LINE)
        if self.is_progress_bar:
            rows = [row.rstrip(" ") for row in rows]
            while rows and not rows[-1]:
                rows.pop()
        elif not rows[-1].strip():
            rows.pop()
        if self.is_closed:
            self._final = rows
            self.rows = [[]]
        return rows

    def _overwrite(self, text: str) -> None:
        cells = self.rows[self._row]
        if len(cells) < self._column:
            cells += [(" ", "")] * (self._column - len(cells))
        end = self._column + len(text)
        cells[self._column : end] = [(char, self.style) for char in text]
        self._column = end
        del cells[MAX_LINE:]

    def _move(self, sequence: str) -> None:
        match = _CURSOR.fullmatch(sequence)
        if not match:
            return
        count, action = int(match[1] or 0), match[2]
        if action in "AF":
            self._row = max(self._row - max(count, 1), 0)
        elif action in "BE":
            self._row = min(self._row + max(count, 1), len(self.rows) - 1)
        elif action == "K":
            self._erase(count)
        elif action == "J" and count == 0:
            self._erase(0)
            del self.rows[self._row + 1 :]
        if action in "EF":
            self._column = 0
        elif action == "G":
            self._column = min(max(count, 1), MAX_LINE) - 1
        self.is_progress_bar = self.is_progress_bar or action in "ABEFGJK"

    def _erase(self, count: int) -> None:
        cells = self.rows[self._row]
        if count == 0:
            del cells[self._column :]
        elif count == 1:
            cells[: self._column] = [(" ", "")] * min(self._column, len(cells))
        else:
            cells.clear()


class LineSplitter:
    """Splits text into lines and queues them for merging; the same for ranks that write the same.

    Args:
        merger: gets the complete lines, and displays with a key and a delay.
    """

    def __init__(self, merger: OutputMerger[Any]) -> None:
        self._merger = merger
        self._buffers: dict[tuple[int, StreamName], StreamLineBuffer] = {}

    def split(self, ranks: Sequence[int], item: OutputItem[Any]) -> None:
        """Queue an item of these ranks: of text the complete lines."""
        if not isinstance(item.content, str):
            self._queue_display(ranks, item)
            return
        text, now = item.content, item.arrived_at
        if len(text) > MAX_LINE:
            text = truncate_lines(text)
        stream: StreamName = item.stream or "stdout"
        ends_line = text.endswith("\n") and not _REDRAW.search(text)
        # where no line is open, the result depends only on the style in which the lines begin
        by_style: dict[str, dict[int, StreamLineBuffer]] = {}
        for rank in ranks:
            if (rank, stream) not in self._buffers:
                self._buffers[rank, stream] = StreamLineBuffer(stream)
            buffer = self._buffers[rank, stream]
            if ends_line and buffer.open_lines is None:
                by_style.setdefault(buffer.style, {})[rank] = buffer
            else:
                self._merger.add_items((rank,), buffer.feed(text, now=now))
        for buffers in by_style.values():
            first, *others = buffers.values()
            self._merger.add_items(tuple(buffers), first.feed(text, now=now))
            for other in others:
                other.style = first.style

    def _queue_display(self, ranks: Sequence[int], item: OutputItem[Any]) -> None:
        """Queue a display, a clearing or a note; displays start below the half lines of a rank."""
        if isinstance(item.content, DisplayOutput | ClearOutput):
            for (rank, _), buffer in self._buffers.items():
                lines = buffer.open_lines
                if rank in ranks and lines is not None and not lines.is_progress_bar:
                    self._merger.add_items((rank,), buffer.close(item.arrived_at))
        if isinstance(item.content, DisplayOutput):
            self._merger.add_items(ranks, _display_items(ranks, item))
        elif isinstance(item.content, ClearOutput):
            self._merger.add_items(
                ranks, [replace(item, key="clear", merge_delay_s=_CLEAR_DELAY_S)]
            )
        else:
            self._merger.add_items(ranks, [item])

    def end_bars(self, now: float, *, final: bool = False) -> None:
        """Queue the lines of bars that have ended; if `final`, all open lines."""
        for (rank, _), buffer in self._buffers.items():
            since = buffer.open_lines.empty_row_since if buffer.open_lines else None
            if final or (since is not None and now - since >= _BAR_END_S):
                self._merger.add_items((rank,), buffer.close(now))

    def open_lines(self) -> Iterator[tuple[int, TerminalEmulator]]:
        """Yield the open lines, with their ranks."""
        for (rank, _), buffer in self._buffers.items():
            if buffer.open_lines is not None:
                yield rank, buffer.open_lines


def _display_items(ranks: Sequence[int], item: OutputItem[Any]) -> list[OutputItem[Any]]:
    bundle, display_id = item.content.bundle, item.content.display_id
    if display_id is None and bundle.keys() == {"text/plain"}:
        # a plain result is merged by line, as printed text is
        style, items = "", []
        for line in bundle["text/plain"].split("\n"):
            text, style = close_colours(line, style)
            key = "stdout", text
            items.append(OutputItem(text, item.arrived_at, "stdout", key, _DISPLAY_DELAY_S))
        return items
    if not bundle:
        return []
    if display_id is not None or _WIDGET in bundle:
        # never equal to another rank's
        return [replace(item, key=("display", display_id, ranks))]
    # a digest, so that a queue of figures stays small
    packed = json.dumps([bundle, item.content.metadata], sort_keys=True, default=repr)
    digest = blake2b(packed.encode(), digest_size=16).digest()
    return [replace(item, key=digest, merge_delay_s=_DISPLAY_DELAY_S)]


@dataclass(slots=True)
class StreamLineBuffer:
    """One stream of one rank: returns its complete lines and keeps the open ones."""

    stream: StreamName
    open_lines: TerminalEmulator | None = None
    style: str = ""
    """Style in which the next line begins."""

    def feed(self, text: str, *, now: float) -> list[OutputItem[str]]:
        """Add text. Returns the lines that are now complete, each with its colours closed."""
        done: list[OutputItem[str]] = []
        redraws = _REDRAW.search(text) is not None
        *ended, rest = text.split("\n")
        for ended_line in ended:
            line = ended_line.removesuffix("\r")
            is_at_start = self.open_lines is None or self.open_lines.empty_row_since is not None
            if is_at_start and not (redraws and _REDRAW.search(ended_line)):
                if self.open_lines is not None:
                    done += self.close(now)
                if len(line) > MAX_LINE + _NOTE_CHARS:
                    line = line[:MAX_LINE] + truncation_note(len(line))
                if self.style or "\x1b" in line:
                    line, self.style = close_colours(line, self.style)
                done.append(OutputItem(line, now, self.stream, key=(self.stream, line)))
                continue
            lines = self._write_open(line, now)
            lines.newline(now)
            is_full = len(lines.rows) > _MAX_ROWS
            if is_full or not (lines.is_progress_bar or lines.is_displayed):
                done += self.close(now)
        if rest:
            self._write_open(rest, now)
        return done

    def close(self, now: float) -> list[OutputItem[str]]:
        """Close the open lines. Returns them unless a live display shows them already."""
        lines, self.open_lines = self.open_lines, None
        if lines is None:
            return []
        lines.is_closed = True
        self.style = lines.style
        closed = [] if lines.is_displayed else lines.lines()
        return [OutputItem(line, now, self.stream, key=(self.stream, line)) for line in closed]

    def _write_open(self, text: str, now: float) -> TerminalEmulator:
        if self.open_lines is None:
            self.open_lines = TerminalEmulator(start_time=now, style=self.style)
        self.open_lines.write(text)
        return self.open_lines


@dataclass(slots=True)
class OpenLinesDisplay:
    """Rows of open text in one display."""

    output_serial: int
    """Serial number of the last output before it. A rank with later output needs a new display."""
    members: list[tuple[int, TerminalEmulator]] = field(default_factory=list)
    """Ranks and their open lines, at most ``MAX_DISPLAY_ROWS``."""
    _display_id: str = field(default_factory=lambda: f"nbdist-live-{uuid4().hex}")
    _sent: str | None = None
    _sent_at: float = float("-inf")

    def draw(self, screen: OutputSink, *, now: float, final: bool = False) -> None:
        """Send the rows if they changed, at most once per ``LIVE_UPDATE_S``."""
        if not final and now - self._sent_at < LIVE_UPDATE_S:
            return
        # equal rows of several ranks are merged
        ranks_by_row: dict[tuple[str, int], list[int]] = {}
        seen: Counter[tuple[int, str]] = Counter()
        for rank, lines in sorted(self.members, key=itemgetter(0)):
            for line in filter(str.strip, lines.lines()):
                seen[rank, line] += 1
                ranks_by_row.setdefault((line, seen[rank, line]), []).append(rank)
        rows = [f"[{format_ranks(r)}] {line}" for (line, _), r in ranks_by_row.items()]
        if len(rows) > MAX_DISPLAY_ROWS:
            rows[MAX_DISPLAY_ROWS:] = [f"... {len(rows) - MAX_DISPLAY_ROWS} more rows"]
        text = "\n".join(rows)
        if text == (self._sent or ""):
            return
        update = self._sent is not None
        self._sent, self._sent_at = text, now
        screen.display({"text/plain": text}, {}, display_id=self._display_id, update=update)


def truncate_open_line(text: str) -> str:
    """Truncate a long text after the last newline, with a note of its size."""
    start = text.rfind("\n") + 1
    if len(text) - start <= MAX_OPEN_LINE_CHARS:
        return text
    return text[: start + MAX_OPEN_LINE_CHARS] + truncation_note(len(text) - start)


def truncation_note(num_chars: int) -> str:
    """Return the note at the end of a truncated line."""
    return f"... [line of {format_bytes(num_chars)}, truncated]"


def truncate_lines(text: str) -> str:
    """Truncate long lines, with a note of their size; lines of progress bars are kept."""
    parts: list[str] = []
    start = 0
    while (end := text.find("\n", start)) >= 0:
        if end - start > MAX_LINE and text.find("\r", start, end - 1) < 0:
            parts += [text[start : start + MAX_LINE], truncation_note(end - start), "\n"]
        else:
            parts.append(text[start : end + 1])
        start = end + 1
    return "".join([*parts, text[start:]])


def _text(cells: StyledRow) -> str:
    parts: list[str] = []
    style = ""
    for char, wanted in cells:
        if wanted != style:
            parts.append((RESET if style else "") + wanted)
            style = wanted
        parts.append(char)
    return "".join(parts) + (RESET if style else "")
