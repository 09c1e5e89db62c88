"""Stop within work of phases; runs on a rank.

A load or a switch that is cut at any line leaves a model in pieces. So the first Stop is heard
where a phase ends: there all ranks agree, and the work fails on all of them and goes back. Only a
further Stop cuts the phase itself, but never the agreement, nor the way back.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stops:
    """How often Stop has come in the work of now."""

    def __init__(self) -> None:
        """None yet."""
        self._begin()

    def _begin(self) -> None:
        self._came = 0
        self._heard = True
        """Whether Stop can end the work still."""
        self._whole = False
        """Whether what happens now must not be cut."""
        self.failed = ""
        """The error with which this rank waits for the others to agree."""

    @property
    def wanted(self) -> bool:
        """Whether the work is to end."""
        return self._heard and self._came > 0

    @contextlib.contextmanager
    def in_phases(self) -> Iterator[None]:
        """Work of phases, on the main thread."""
        self._begin()
        before = signal.signal(signal.SIGINT, lambda *_: self._hear())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._begin()

    @contextlib.contextmanager
    def whole(self, error: BaseException | None = None) -> Iterator[None]:
        """Let no Stop cut what happens in this: the agreement, to which a rank may bring an error.

        Args:
            error: that of this rank.
        """
        self._whole, self.failed = True, "" if error is None else type(error).__name__
        try:
            yield
        finally:
            self._whole, self.failed = False, ""

    def no_more(self) -> None:
        """The work has failed: what follows is the way back."""
        self._heard = False

    def _hear(self) -> None:
        self._came += 1
        if self._came > 1 and self._heard and not self._whole:
            raise KeyboardInterrupt


stops = Stops()
"""Of this rank."""
