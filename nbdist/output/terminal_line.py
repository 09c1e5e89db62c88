"""Text that has not ended with a newline yet: progress bars and half lines of one rank.

Pure; used by the renderer alone. `Typist` cuts a stream into complete lines and keeps what
is still open in a `Block`: a few rows with a cursor, in which carriage return, backspace,
erase and cursor-up work as in a terminal. So a bar of one rank can neither erase nor
overwrite anything of another rank, and nested bars keep their rows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.output.ansi import COLOUR, ESCAPE, RESET, add_style, contained, size

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LINE = 20_000
"""Characters of one line that are shown."""

_NOTE_CHARS = 64
"""Room for what `shortened` appends to a line."""
_MAX_ROWS = 50
_KEPT_RETURNS = 50
_DRAWS = re.compile(r"\r(?!\n|$)|\x08|\x1b\[[0-9;]*[ABGKFEJ]")
_TOKEN = re.compile(rf"\r|\x08|{ESCAPE.pattern}|[^\r\x08\x1b]+")
_CURSOR = re.compile(r"\x1b\[([0-9]*)(?:;[0-9]*)*([A-Z])")

Cells = list[tuple[str, str]]
"""One row: (character, style) by column."""


class Block:
    """Rows of open text with a cursor."""

    def __init__(self, *, began: float, style: str = "") -> None:
        self.began = began
        self.style = style
        self.rows: list[Cells] = [[]]
        self.drawn = False
        """Whether a cursor movement was used: a progress bar rather than a half line."""
        self.shown = False
        """Whether a live region shows it; then its lines are not printed again."""
        self.closed = False
        self.fresh_at: float | None = None
        """Since when the cursor stands on an empty last row, if it does."""
        self._row = 0
        self._column = 0
        self._overflow = 0
        self._final: list[str] | None = None

    def put(self, segment: str) -> None:
        """Write text that holds no newline."""
        if segment:
            self.fresh_at = None
        if segment.count("\r") > _KEPT_RETURNS:
            segment = "\r" + "\r".join(segment.rsplit("\r", _KEPT_RETURNS)[1:])
        if len(segment) > MAX_LINE and "\r" in segment:
            segment = "\r" + segment.rstrip("\r").rpartition("\r")[2]
        room = max(MAX_LINE - self._column, 0) if segment[:1] != "\r" else MAX_LINE + 1
        if len(segment) > room:
            self._overflow += len(segment) - room
            segment = segment[:room]
        for found in _TOKEN.finditer(segment):
            self._take(found[0])

    def newline(self, now: float) -> None:
        """Move the cursor to the next row."""
        if self._overflow:
            self.rows[self._row] += [(char, "") for char in cut_note(self._overflow + MAX_LINE)]
            self._overflow = 0
        self._row += 1
        self._column = 0
        if self._row == len(self.rows):
            self.rows.append([])
        if not any(self.rows[self._row :]):
            self.fresh_at = now

    def lines(self) -> list[str]:
        """The rows as text, colours closed; without what a bar left blank at the end."""
        if self._final is not None:
            return self._final
        lines = self._lines()
        if self.closed:
            self._final = lines
            self.rows = [[]]
        return lines

    def _lines(self) -> list[str]:
        rows = [_text(cells) for cells in self.rows]
        if self._overflow:
            rows[self._row] += cut_note(self._overflow + MAX_LINE)
        if not self.drawn:
            return rows if rows[-1].strip() else rows[:-1]
        rows = [row.rstrip(" ") for row in rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def full(self) -> bool:
        """Whether no more rows should be added."""
        return len(self.rows) > _MAX_ROWS

    def _take(self, piece: str) -> None:
        if piece == "\r":
            self._column = 0
            self._overflow = 0
            self.drawn = True
        elif piece == "\x08":
            self._column = max(self._column - 1, 0)
            self.drawn = True
        elif COLOUR.fullmatch(piece):
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
        found = _CURSOR.fullmatch(sequence)
        if not found:
            return
        count, action = int(found[1] or 0), found[2]
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
        self.drawn = self.drawn or action in "ABEFGJK"

    def _erase(self, count: int) -> None:
        cells = self.rows[self._row]
        if count == 0:
            del cells[self._column :]
        elif count == 1:
            cells[: self._column] = [(" ", "")] * min(self._column, len(cells))
        else:
            cells.clear()


class Typist:
    """One stream of one rank: complete lines out of it, and its open block."""

    def __init__(self) -> None:
        self.block: Block | None = None
        self.style = ""
        """In which the next line begins."""

    def between_lines(self, text: str) -> bool:
        """Whether nothing is open, and nothing will be after this text."""
        return self.block is None and text.endswith("\n") and not _DRAWS.search(text)

    def feed(self, text: str, *, now: float) -> list[str]:
        """Take text; lines that are complete, each with its colours closed."""
        if self.block is None and not _DRAWS.search(text):
            return self._ordinary(text, now)
        done: list[str] = []
        for segment, ended in _segments(text):
            done += self._segment(segment, ended=ended, now=now)
        return done

    def close(self) -> list[str]:
        """End the open block; its lines, unless a region shows them already."""
        block, self.block = self.block, None
        if block is None:
            return []
        block.closed = True
        self.style = block.style
        return [] if block.shown else block.lines()

    def _ordinary(self, text: str, now: float) -> list[str]:
        *lines, rest = text.split("\n")
        done = [self._finished(line) for line in lines]
        if rest:
            self.block = Block(began=now, style=self.style)
            self.block.put(rest)
        return done

    def _segment(self, segment: str, *, ended: bool, now: float) -> list[str]:
        done: list[str] = []
        if ended and not _DRAWS.search(segment) and self._at_start():
            done = self.close()
            done.append(self._finished(segment))
            return done
        if self.block is None:
            self.block = Block(began=now, style=self.style)
        self.block.put(segment.removesuffix("\r") if ended else segment)
        if ended:
            self.block.newline(now)
            if self.block.full or not (self.block.drawn or self.block.shown):
                done = self.close() or done
        return done

    def _at_start(self) -> bool:
        return self.block is None or self.block.fresh_at is not None

    def _finished(self, line: str) -> str:
        line = line.removesuffix("\r")
        if len(line) > MAX_LINE + _NOTE_CHARS:
            line = line[:MAX_LINE] + cut_note(len(line))
        line, self.style = contained(line, self.style)
        return line


def cut_note(num_chars: int) -> str:
    """What stands at the end of a line that is too long to show."""
    return f"... [a line of {size(num_chars)}, cut]"


def shortened(text: str) -> str:
    """Text whose long lines are cut, each with its size noted; bars are left alone."""
    if len(text) <= MAX_LINE:
        return text
    parts: list[str] = []
    start = 0
    while (end := text.find("\n", start)) >= 0:
        if end - start > MAX_LINE and text.find("\r", start, end - 1) < 0:
            parts += [text[start : start + MAX_LINE], cut_note(end - start), "\n"]
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


def _text(cells: Cells) -> str:
    parts: list[str] = []
    style = ""
    for char, wanted in cells:
        if wanted != style:
            parts.append((RESET if style else "") + wanted)
            style = wanted
        parts.append(char)
    return "".join(parts) + (RESET if style else "")
