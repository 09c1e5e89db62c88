"""Open lines of one rank: progress bars and half lines that have no newline yet.

``LineAssembler`` splits a stream into complete lines and keeps open text in ``TerminalLines``: a
few rows with a cursor, in which carriage return, backspace, erase and cursor-up work as in a
terminal. So a progress bar of one rank cannot erase or overwrite output of another rank, and nested
bars keep their rows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.output.ansi import (
    COLOUR_SEQUENCE,
    ESCAPE_SEQUENCE,
    RESET,
    add_style,
    close_colours,
    format_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LINE = 20_000
"""Maximum number of characters of one line that are shown."""

_NOTE_CHARS = 64
"""Room for the note that ``truncate_lines`` appends to a line."""
_MAX_ROWS = 50
_KEPT_RETURNS = 50
_DRAWS = re.compile(r"\r(?!\n|$)|\x08|\x1b\[[0-9;]*[ABGKFEJ]")
_TOKEN = re.compile(rf"\r|\x08|{ESCAPE_SEQUENCE.pattern}|[^\r\x08\x1b]+")
_CURSOR = re.compile(r"\x1b\[([0-9]*)(?:;[0-9]*)*([A-Z])")

StyledRow = list[tuple[str, str]]
"""One row: (character, style) by column."""


class TerminalLines:
    """Rows of open text with a cursor."""

    def __init__(self, *, began: float, style: str = "") -> None:
        self.output_serial = began
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
        if segment.count("\r") > _KEPT_RETURNS:
            segment = "\r" + "\r".join(segment.rsplit("\r", _KEPT_RETURNS)[1:])
        if len(segment) > MAX_LINE and "\r" in segment:
            segment = "\r" + segment.rstrip("\r").rpartition("\r")[2]
        room = max(MAX_LINE - self._column, 0) if segment[:1] != "\r" else MAX_LINE + 1
        if len(segment) > room:
            self._overflow += len(segment) - room
            segment = segment[:room]
        for match in _TOKEN.finditer(segment):
            self._take(match[0])

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
        lines = self._lines()
        if self.is_closed:
            self._final = lines
            self.rows = [[]]
        return lines

    def _lines(self) -> list[str]:
        rows = [_text(cells) for cells in self.rows]
        if self._overflow:
            rows[self._row] += truncation_note(self._overflow + MAX_LINE)
        if not self.is_progress_bar:
            return rows if rows[-1].strip() else rows[:-1]
        rows = [row.rstrip(" ") for row in rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def is_full(self) -> bool:
        """True if no more rows should be added."""
        return len(self.rows) > _MAX_ROWS

    def _take(self, piece: str) -> None:
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
            self._write(piece)

    def _write(self, text: str) -> None:
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


class LineAssembler:
    """One stream of one rank: returns its complete lines and keeps the open ones."""

    def __init__(self) -> None:
        self.open_lines: TerminalLines | None = None
        self.style = ""
        """Style in which the next line begins."""

    def stays_at_line_start(self, text: str) -> bool:
        """Return whether no line is open, neither now nor after this text."""
        return self.open_lines is None and text.endswith("\n") and not _DRAWS.search(text)

    def feed(self, text: str, *, now: float) -> list[str]:
        """Add text. Returns the lines that are now complete, each with its colours closed."""
        if self.open_lines is None and not _DRAWS.search(text):
            return self._ordinary(text, now)
        done: list[str] = []
        for segment, ended in _segments(text):
            done += self._segment(segment, ended=ended, now=now)
        return done

    def close(self) -> list[str]:
        """Close the open lines. Returns them unless a live display shows them already."""
        block, self.open_lines = self.open_lines, None
        if block is None:
            return []
        block.is_closed = True
        self.style = block.style
        return [] if block.is_displayed else block.lines()

    def _ordinary(self, text: str, now: float) -> list[str]:
        *lines, rest = text.split("\n")
        done = [self._finished(line) for line in lines]
        if rest:
            self.open_lines = TerminalLines(began=now, style=self.style)
            self.open_lines.write(rest)
        return done

    def _segment(self, segment: str, *, ended: bool, now: float) -> list[str]:
        done: list[str] = []
        if ended and not _DRAWS.search(segment) and self._at_start():
            done = self.close()
            done.append(self._finished(segment))
            return done
        if self.open_lines is None:
            self.open_lines = TerminalLines(began=now, style=self.style)
        self.open_lines.write(segment.removesuffix("\r") if ended else segment)
        if ended:
            self.open_lines.newline(now)
            if self.open_lines.is_full or not (
                self.open_lines.is_progress_bar or self.open_lines.is_displayed
            ):
                done = self.close() or done
        return done

    def _at_start(self) -> bool:
        return self.open_lines is None or self.open_lines.empty_row_since is not None

    def _finished(self, line: str) -> str:
        line = line.removesuffix("\r")
        if len(line) > MAX_LINE + _NOTE_CHARS:
            line = line[:MAX_LINE] + truncation_note(len(line))
        line, self.style = close_colours(line, self.style)
        return line


def truncation_note(num_chars: int) -> str:
    """Return the note at the end of a truncated line."""
    return f"... [line of {format_bytes(num_chars)}, truncated]"


def truncate_lines(text: str) -> str:
    """Truncate long lines, with a note of their size; lines of progress bars are kept."""
    if len(text) <= MAX_LINE:
        return text
    parts: list[str] = []
    start = 0
    while (end := text.find("\n", start)) >= 0:
        if end - start > MAX_LINE and text.find("\r", start, end - 1) < 0:
            parts += [text[start : start + MAX_LINE], truncation_note(end - start), "\n"]
        else:
            parts.append(text[start : end + 1])
        start = end + 1
    return "".join([*parts, text[start:]])


def _segments(text: str) -> Iterator[tuple[str, bool]]:
    """Pieces between newlines, and whether a newline ended them."""
    *ended, rest = text.split("\n")
    for segment in ended:
        yield segment, True
    if rest:
        yield rest, False


def _text(cells: StyledRow) -> str:
    parts: list[str] = []
    style = ""
    for char, wanted in cells:
        if wanted != style:
            parts.append((RESET if style else "") + wanted)
            style = wanted
        parts.append(char)
    return "".join(parts) + (RESET if style else "")
