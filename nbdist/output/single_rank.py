"""Output of a cell in which one rank writes: unchanged and without labels.

`multi_rank` is the counterpart for several ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.output.ansi import replace_invalid_chars
from nbdist.output.terminal_line import truncate_lines, truncation_note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.output.rate_limit import OmittedOutput
    from nbdist.output.sink import MimeBundle, OutputSink, StreamName

MAX_OPEN_LINE_CHARS = 200_000
"""Maximum number of characters without a newline in one write."""


class SingleRankOutput:
    """Forwards all output; the front end handles progress bars and half lines."""

    limits_open_text = True

    def __init__(self, screen: OutputSink) -> None:
        self.sink = screen
        self._midline = False
        self._dirty = False

    def write_text(self, _ranks: Sequence[int], name: StreamName, text: str, _now: float) -> None:
        """Write a piece of a stream."""
        body = replace_invalid_chars(truncate_lines(text))
        if len(body) > MAX_OPEN_LINE_CHARS and body.rfind("\n") < len(body) - MAX_OPEN_LINE_CHARS:
            cut = body.rfind("\n") + 1 + MAX_OPEN_LINE_CHARS
            body = body[:cut] + truncation_note(len(body) - cut + MAX_OPEN_LINE_CHARS)
        if body:
            self._midline = not body.endswith("\n")
            self._dirty = True
            self.sink.write(name, body)

    def display(
        self,
        _rank: int,
        bundle: MimeBundle,
        metadata: MimeBundle,
        *,
        display_id: str | None,
        now: float,
    ) -> None:
        """Show a bundle."""
        del now
        self.sink.display(bundle, metadata, display_id=display_id)
        self._midline = False
        self._dirty = True

    def show_omitted(self, ranks: Sequence[int], gap: OmittedOutput, _now: float) -> None:
        """Write a note about omitted output."""
        start = "\n" if self._midline else ""
        self._midline = False
        self._dirty = True
        self.sink.write("stderr", f"{start}{gap.describe(ranks[0])}\n")

    def clear(self, _rank: int, *, wait: bool, now: float) -> None:
        """Clear the cell's output if it is not empty."""
        del now
        if self._dirty:
            self.sink.clear(wait=wait)
        self._midline = self._dirty = False

    def is_mid_line(self, _rank: int, _name: StreamName) -> bool:
        """Return False: no unfinished line is buffered."""
        return False

    def holds_display(self, _display_id: str) -> bool:
        """Return False: no display is buffered."""
        return False

    def tick(self, now: float) -> None:
        """Do nothing: no output is buffered."""

    def close(self, now: float) -> None:
        """Do nothing: no output is buffered."""
