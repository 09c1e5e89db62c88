"""Shows the open lines of all ranks in one display that is updated in place.

A live display keeps its position while other output appears below it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING
from uuid import uuid4

from nbdist.output.ansi import rank_label

if TYPE_CHECKING:
    from nbdist.output.sink import OutputSink
    from nbdist.output.terminal_line import TerminalLines

UPDATE_INTERVAL_S = 0.125
_MAX_ROWS = 64


@dataclass(slots=True)
class LiveDisplay:
    """Rows of open text in one display."""

    output_serial: int
    """Serial number of the last output before it. A rank with later output needs a new display."""
    _members: list[tuple[int, TerminalLines]] = field(default_factory=list)
    _display_id: str = field(default_factory=lambda: f"nbdist-live-{uuid4().hex}")
    _sent: str | None = None
    _sent_at: float = float("-inf")

    def add_lines(self, rank: int, block: TerminalLines) -> None:
        """Add open lines of a rank."""
        block.is_displayed = True
        self._members.append((rank, block))

    @property
    def has_open_lines(self) -> bool:
        """True if any of its lines is still open."""
        return not all(block.is_closed for _, block in self._members)

    @property
    def is_full(self) -> bool:
        """True if the next open line needs another live display."""
        return len(self._members) >= _MAX_ROWS

    def release_lines(self) -> None:
        """Release the open lines, which must be shown elsewhere because the display was cleared."""
        for _, block in self._members:
            block.is_displayed = False

    def draw(self, screen: OutputSink, *, now: float, final: bool = False) -> bool:
        """Send the rows if they changed, at most once per ``UPDATE_INTERVAL_S``."""
        if not final and now - self._sent_at < UPDATE_INTERVAL_S:
            return False
        text = self.text()
        if text == self._sent or (self._sent is None and not text):
            return False
        update = self._sent is not None
        self._sent, self._sent_at = text, now
        screen.display({"text/plain": text}, {}, display_id=self._display_id, update=update)
        return True

    def text(self) -> str:
        """Return the rows with labels, merging equal rows of several ranks."""
        rows: dict[tuple[str, int], list[int]] = {}
        seen: Counter[tuple[int, str]] = Counter()
        for rank, block in sorted(self._members, key=itemgetter(0)):
            for line in block.lines():
                if line.strip():
                    seen[rank, line] += 1
                    rows.setdefault((line, seen[rank, line]), []).append(rank)
        shown = [f"[{rank_label(tuple(ranks))}] {line}" for (line, _), ranks in rows.items()]
        if len(shown) > _MAX_ROWS:
            shown[_MAX_ROWS:] = [f"... {len(shown) - _MAX_ROWS} more rows"]
        return "\n".join(shown)
