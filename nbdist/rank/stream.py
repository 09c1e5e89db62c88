"""stdout and stderr of a rank: ipykernel's, with a flush that costs nothing when idle."""

from __future__ import annotations

from ipykernel.iostream import OutStream


class RankStream(OutStream):
    """Skips a flush when nothing was written since the last one.

    ipykernel 7.4 flushes both streams twice a cell and waits each time for its output
    thread, about 0.3 ms: a third of what an empty cell costs.
    """

    _written = False

    def write(self, string: str) -> int | None:  # type: ignore[override]
        """Buffer text as ipykernel does."""
        self._written = True
        return super().write(string)

    def flush(self) -> None:
        """Send what was written and wait until it is sent."""
        if self._written:
            self._written = False  # before: what is written meanwhile needs a flush of its own
            super().flush()  # type: ignore[no-untyped-call]
