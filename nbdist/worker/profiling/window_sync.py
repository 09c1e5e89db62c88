"""At which step the ranks begin and end to record, so that their windows cover the same steps.

Runs on a rank. Ranks that train are never more than a step apart, so small files in the
session's private folder are enough: each rank says at which step it was when it was asked, and
the first rank after which step all of them end.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LEAD = {True: 2, False: 1}
"""Steps from the request until recording is put in place, by whether the cell runs already: ranks
of a running loop have heard of one another's request by then."""


class Agreement:
    """What the ranks tell one another of one profile."""

    def __init__(
        self, folder: Path, profile: str, *, running: bool, rank: int, ranks: Sequence[int]
    ) -> None:
        """Meet in a folder that all ranks have, under the profile's own name; `ranks` come."""
        self._lead = LEAD[running]
        self._folder, self._name = folder, f"profile-{''.join(filter(str.isalnum, profile))}"
        self._rank, self._ranks = rank, ranks
        self._begin: int | None = None

    def asked(self, at: int) -> None:
        """Say at which step of its cell this rank was."""
        self._say(str(self._rank), at)

    @property
    def begin(self) -> int | None:
        """The step after which all put recording in place; None while it is not known.

        The window opens a step later, when all ranks have done so.
        """
        if self._begin is None:
            asked = [self._said(str(rank)) for rank in self._ranks]
            known = [at for at in asked if at is not None]
            if len(known) == len(asked):
                self._begin = max(known) + self._lead
        return self._begin

    def end_after(self, step: int) -> None:
        """Say after which step all end."""
        self._say("end", step)

    @property
    def end(self) -> int | None:
        """The step after which all end; None before it is said."""
        return self._said("end")

    @property
    def decides(self) -> bool:
        """Whether this rank says when to end."""
        return self._rank == min(self._ranks)

    def _say(self, what: str, step: int) -> None:
        new = self._folder / f"{self._name}.{what}.new"
        new.write_text(str(step))
        new.replace(self._folder / f"{self._name}.{what}")

    def _said(self, what: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / f"{self._name}.{what}").read_text())
        return None
