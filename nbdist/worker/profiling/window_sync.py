"""Synchronizes the start and end of recording, so that all ranks record the same steps.

Ranks that train together are at most one step apart, so small files in the session's private
folder are sufficient: each rank writes its step at the time of the request, and the first rank
writes the step after which all ranks end.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LEAD_STEPS = {True: 2, False: 1}
"""Whether the cell is already running -> steps from the request until recording starts. By then
all ranks of a running loop have received the request."""


class WindowSync:
    """Shared state of the ranks for one profile."""

    def __init__(
        self, folder: Path, profile: str, *, running: bool, rank: int, ranks: Sequence[int]
    ) -> None:
        """Use files in a folder.

        Args:
            folder: folder that all ranks can access.
            profile: unique ID of the profile.
            running: whether the cell was already running at the time of the request.
            rank: this rank.
            ranks: all ranks that take part.
        """
        self._lead = LEAD_STEPS[running]
        self._folder, self._name = folder, f"profile-{''.join(filter(str.isalnum, profile))}"
        self._rank, self._ranks = rank, ranks
        self._begin: int | None = None

    def announce_step(self, at: int) -> None:
        """Write the step of the cell at which this rank received the request."""
        self._write_step(str(self._rank), at)

    @property
    def begin_step(self) -> int | None:
        """Step after which all ranks start recording; None until all have written theirs.

        The window opens one step later, when all ranks have started.
        """
        if self._begin is None:
            steps = [self._read_step(str(rank)) for rank in self._ranks]
            known = [at for at in steps if at is not None]
            if len(known) == len(steps):
                self._begin = max(known) + self._lead
        return self._begin

    def announce_end(self, step: int) -> None:
        """Set the step after which all ranks end."""
        self._write_step("end", step)

    @property
    def end_step(self) -> int | None:
        """Step after which all ranks end; None until it is set."""
        return self._read_step("end")

    @property
    def is_leader(self) -> bool:
        """True if this rank decides when to end."""
        return self._rank == min(self._ranks)

    def _write_step(self, what: str, step: int) -> None:
        temporary = self._folder / f"{self._name}.{what}.new"
        temporary.write_text(str(step))
        temporary.replace(self._folder / f"{self._name}.{what}")

    def _read_step(self, what: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / f"{self._name}.{what}").read_text())
        return None
