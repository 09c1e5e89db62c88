"""A status line in a cell that is updated in place during a long operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self
from uuid import uuid4

from nbdist.output.sink import RunningCellSink
from nbdist.session import progress

if TYPE_CHECKING:
    from types import TracebackType


class StatusLine:
    """Shows the last text given; without updatable displays, each text on its own line.

    Operations that no cell started (a button of the panel) have no line; the panel shows them.
    """

    def __init__(self) -> None:
        self._screen = RunningCellSink() if progress.is_status_line_shown() else None
        self._listener = progress.current_operation()
        self._display_id = f"nbdist-{uuid4().hex}"
        self._shown_text = ""

    def show(self, text: str) -> None:
        """Replace the text of the line."""
        if text == self._shown_text:
            return
        if self._screen is not None:
            self._screen.display(
                {"text/plain": text}, {}, display_id=self._display_id, update=bool(self._shown_text)
            )
        if self._listener is not None:
            self._listener.set_text(text)
        self._shown_text = text

    def __enter__(self) -> Self:
        """Return the status line."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush the output."""
        if self._screen is not None:
            self._screen.flush()
