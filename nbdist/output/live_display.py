"""The live region: open lines of all ranks in one display that is updated in place.

Runs in the notebook's kernel; used by the renderer alone. A region stays where it began;
its bars go on in place while other output appears below.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING
from uuid import uuid4

from nbdist.output.ansi import rank_label

if TYPE_CHECKING:
    from nbdist.output.sink import Screen
    from nbdist.output.terminal_line import Block

INTERVAL_S = 0.125
_MAX_ROWS = 64


@dataclass(slots=True)
class Region:
    """Rows of open text, one display."""

    began: int
    """Serial of the output before it; a rank that wrote something later needs a new region."""
    _members: list[tuple[int, Block]] = field(default_factory=list)
    _display_id: str = field(default_factory=lambda: f"nbdist-live-{uuid4().hex}")
    _sent: str | None = None
    _sent_at: float = float("-inf")

    def add(self, rank: int, block: Block) -> None:
        """Show a block here from now on."""
        block.shown = True
        self._members.append((rank, block))

    @property
    def live(self) -> bool:
        """Whether any of its text is still open."""
        return not all(block.closed for _, block in self._members)

    @property
    def full(self) -> bool:
        """Whether the next open line should begin another region."""
        return len(self._members) >= _MAX_ROWS

    def forget(self) -> None:
        """Let go of open text: the display was cleared, it is to be shown elsewhere."""
        for _, block in self._members:
            block.shown = False

    def draw(self, screen: Screen, *, now: float, final: bool = False) -> bool:
        """Send the rows if they changed, not more often than every INTERVAL_S."""
        if not final and now - self._sent_at < INTERVAL_S:
            return False
        text = self.text()
        if text == self._sent or (self._sent is None and not text):
            return False
        update = self._sent is not None
        self._sent, self._sent_at = text, now
        screen.display({"text/plain": text}, {}, display_id=self._display_id, update=update)
        return True

    def text(self) -> str:
        """Rows with labels; equal rows of several ranks once."""
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
