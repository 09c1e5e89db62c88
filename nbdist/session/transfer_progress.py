"""How far values are on their way to nodes or from there; runs in the notebook's kernel."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from nbdist.errors import CellInterrupted
from nbdist.operations.switch import size
from nbdist.output.status_line import StatusLine

if TYPE_CHECKING:
    from types import TracebackType

PATIENCE_S = 0.5
"""What takes less is not worth a line."""
SHOWN_EVERY_S = 0.25


class Moving:
    """Files that move between this machine and nodes; hears of each chunk.

    with Moving("push") as told:
        fleet.fetch(rank, path, told)
    """

    def __init__(self, doing: str) -> None:
        """Know what the user has asked for."""
        self._doing = doing
        self._line = StatusLine()
        self._began = time.monotonic()
        self._due = self._began + PATIENCE_S
        self._shown = False
        self._done = self._total = 0

    def __call__(self, done: int, total: int) -> None:
        """Hear how many bytes are there."""
        self._done, self._total = done, total
        now = time.monotonic()
        if now >= self._due and done < total:
            self._due, self._shown = now + SHOWN_EVERY_S, True
            self._show(f"{size(done)} of {size(total)}, {self._rate(now)}, {done / total:.0%}")

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say in one line how it ended, where it took long enough to be seen.

        Raises:
            CellInterrupted: Stop was pressed.
        """
        half_way = self._done < self._total
        stopped = "stopped"
        if half_way:
            stopped = f"stopped after {size(self._done)} of {size(self._total)}"
        if self._shown:
            now = time.monotonic()
            done = f"{size(self._done)} in {now - self._began:.1f} s, {self._rate(now)}"
            self._show(stopped if half_way else done)
        with self._line:
            if kind is KeyboardInterrupt:
                late = self._doing == "push" and not half_way
                kept = "the ranks may have the values" if late else "all variables are as they were"
                raise CellInterrupted(f"the {self._doing} was {stopped}; {kept}.") from None

    def _rate(self, now: float) -> str:
        return f"{size(int(self._done / max(now - self._began, 1e-6)))}/s"

    def _show(self, text: str) -> None:
        self._line.show(f"nbdist: {self._doing}: {text}")
