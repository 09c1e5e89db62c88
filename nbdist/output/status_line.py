"""One line that changes while something long goes on; runs in the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self
from uuid import uuid4

from nbdist.output.sink import LiveScreen
from nbdist.session import progress

if TYPE_CHECKING:
    from types import TracebackType


class StatusLine:
    """Shows the last text given; where output cannot change, each text on its own line.

    Work that no cell asked for (a button of the panel) has no line; the panel shows it.
    """

    def __init__(self) -> None:
        """Show nothing yet."""
        self._screen = LiveScreen() if progress.shown() else None
        self._listener = progress.listener()
        self._display_id = f"nbdist-{uuid4().hex}"
        self._said = ""

    def show(self, text: str) -> None:
        """Replace the line."""
        if text == self._said:
            return
        if self._screen is not None:
            self._screen.display(
                {"text/plain": text}, {}, display_id=self._display_id, update=bool(self._said)
            )
        if self._listener is not None:
            self._listener.say(text)
        self._said = text

    def __enter__(self) -> Self:
        """Use as a context, so that the line is flushed at its end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush."""
        if self._screen is not None:
            self._screen.flush()
