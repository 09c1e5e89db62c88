"""Progress of transfers to and from cluster nodes; runs in the notebook's kernel."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from nbdist.display.units import format_bytes
from nbdist.errors import CellInterrupted
from nbdist.output.status_line import StatusLine

if TYPE_CHECKING:
    from types import TracebackType

SHOW_AFTER_S = 0.5
"""Shorter transfers show no line."""
PROGRESS_INTERVAL_S = 0.25


class FileTransferStatus:
    """Progress of files between this machine and nodes; called with each chunk.

    with FileTransferStatus("push") as callback:
        group.fetch_file(rank, path, callback)
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._line = StatusLine()
        self._began = time.monotonic()
        self._due = self._began + SHOW_AFTER_S
        self._shown = False
        self._done = self._total = 0

    def __call__(self, done: int, total: int) -> None:
        """Update the number of transferred bytes."""
        self._done, self._total = done, total
        now = time.monotonic()
        if now >= self._due and done < total:
            self._due, self._shown = now + PROGRESS_INTERVAL_S, True
            self._show(
                f"{format_bytes(done)} of {format_bytes(total)}, {self._rate(now)},"
                f" {done / total:.0%}"
            )

    def __enter__(self) -> Self:
        """Return the callback."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the result if progress was shown.

        Raises:
            CellInterrupted: the transfer was interrupted.
        """
        half_way = self._done < self._total
        stopped = "interrupted"
        if half_way:
            stopped = f"interrupted after {format_bytes(self._done)} of {format_bytes(self._total)}"
        if self._shown:
            now = time.monotonic()
            done = f"{format_bytes(self._done)} in {now - self._began:.1f} s, {self._rate(now)}"
            self._show(stopped if half_way else done)
        with self._line:
            if kind is KeyboardInterrupt:
                late = self._doing == "push" and not half_way
                kept = "the ranks may have the values" if late else "no variable was changed"
                raise CellInterrupted(f"The {self._doing} was {stopped}; {kept}.") from None

    def _rate(self, now: float) -> str:
        return f"{format_bytes(int(self._done / max(now - self._began, 1e-6)))}/s"

    def _show(self, text: str) -> None:
        self._line.show(f"nbdist: {self._doing}: {text}")
