"""Work of all ranks on files in phases: each succeeds or fails on all of them."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from typing import TYPE_CHECKING

from nbdist.errors import CheckpointError, NbdistError
from nbdist.rank import together
from nbdist.state import wires

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

TOLD_EVERY_S = 0.25


@contextlib.contextmanager
def phase(what: str, name: str) -> Iterator[None]:
    """One phase; a collective at its end, so that there must be none inside that may be missed.

    Args:
        what: "the export".
        name: "writing".

    Raises:
        CheckpointError: on all ranks alike: on which it failed, and why.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        log.exception("%s failed while %s", what, name)
        error = caught
    everyone = wires.everyones((_words(error), isinstance(error, NbdistError)))
    failed = {rank: words for rank, (words, _) in enumerate(everyone) if words is not None}
    if not failed:
        return
    if all(refused for words, refused in everyone if words is not None):
        # A sentence that says all by itself: whose it was does not matter.
        raise CheckpointError(" / ".join(dict.fromkeys(failed.values()))) from error
    reasons = together.said(failed, len(everyone))
    message = f"{what} failed while {name}: {reasons}"
    raise CheckpointError(message) from error


def _words(error: Exception | None) -> str | None:
    """Say an error in one sentence."""
    if isinstance(error, OSError) and error.errno is not None:
        code = errno.errorcode.get(error.errno, str(error.errno))
        where = f" at {error.filename}" if error.filename else ""
        return f"{error.strerror} ({code}){where}; free room, or give another folder."
    return together.words(error)


class Told:
    """How far it is, in words, now and then."""

    def __init__(self, tell: Callable[[str], object], doing: str, total: int) -> None:
        """Begin.

        Args:
            tell: hears the words.
            doing: "writing".
            total: bytes of this rank.
        """
        self._tell, self._doing, self._total = tell, doing, total
        self._due = 0.0

    def __call__(self, done: int) -> None:
        """Hear how many bytes of this rank are done."""
        now = time.monotonic()
        if self._total and now >= self._due:
            self._due = now + TOLD_EVERY_S
            self._tell(f"{self._doing}, {min(done / self._total, 1):.0%}")
