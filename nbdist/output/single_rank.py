"""Output of a cell in which one rank writes: as it is, without labels.

Runs in the notebook's kernel; one of the two lanes of the renderer (`several` is the other).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.output.ansi import clean
from nbdist.output.terminal_line import cut_note, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.output.rate_limit import Gap
    from nbdist.output.sink import Bundle, Screen, StreamName

MAX_OPEN = 200_000
"""Characters without a newline that are passed on in one write."""


class Solo:
    """Passes everything on; the front end itself handles bars and half lines."""

    charges_open_text = True

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._midline = False
        self._dirty = False

    def text(self, _ranks: Sequence[int], name: StreamName, text: str, _now: float) -> None:
        """Print a piece of a stream."""
        body = clean(shortened(text))
        if len(body) > MAX_OPEN and body.rfind("\n") < len(body) - MAX_OPEN:
            cut = body.rfind("\n") + 1 + MAX_OPEN
            body = body[:cut] + cut_note(len(body) - cut + MAX_OPEN)
        if body:
            self._midline = not body.endswith("\n")
            self._dirty = True
            self.screen.write(name, body)

    def display(
        self, _rank: int, bundle: Bundle, metadata: Bundle, *, display_id: str | None, now: float
    ) -> None:
        """Show a bundle."""
        del now
        self.screen.display(bundle, metadata, display_id=display_id)
        self._midline = False
        self._dirty = True

    def gap(self, ranks: Sequence[int], gap: Gap, _now: float) -> None:
        """Say what is not shown."""
        start = "\n" if self._midline else ""
        self._midline = False
        self._dirty = True
        self.screen.write("stderr", f"{start}{gap.sentence(ranks[0])}\n")

    def clear(self, _rank: int, *, wait: bool, now: float) -> None:
        """Clear the cell's output, where there is any since the last time."""
        del now
        if self._dirty:
            self.screen.clear(wait=wait)
        self._midline = self._dirty = False

    def midline(self, _rank: int, _name: StreamName) -> bool:
        """Whether an unfinished line is held; nothing is."""
        return False

    def holds(self, _display_id: str) -> bool:
        """Whether a display with this id waits to be shown."""
        return False

    def tick(self, now: float) -> None:
        """Nothing is held."""

    def close(self, now: float) -> None:
        """Nothing is held."""
