"""Requests for a profile, as this rank's kernel takes them; runs on a rank."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nbdist import wire
from nbdist.rank.profiling.agreement import Agreement
from nbdist.rank.profiling.steps import slot
from nbdist.rank.profiling.window import Window

if TYPE_CHECKING:
    from nbdist.rank.profiling.window import Surroundings


def arm(
    asked: wire.ProfileRequest, around: Surroundings, *, running: str | None, over: str | None
) -> wire.ProfileReply:
    """Let the steps of a cell be profiled; on the control thread.

    Args:
        asked: which cell, and how.
        around: this rank.
        running: request of the cell that runs now.
        over: request of the cell that ended last.
    """
    if asked["running"] and asked["cell"] == over:
        return _refused("the cell that was to be profiled is over; profile the next one.")
    if slot.window is not None and running is not None:
        return _refused("a profile is under way already; wait until its verdict is shown.")
    agreement = Agreement(
        around.folder,
        asked["id"],
        running=asked["running"],
        rank=around.rank,
        ranks=asked["ranks"],
    )
    window = Window(asked, agreement, around)
    slot.window = window
    if asked["running"]:
        timer = threading.Timer(asked["limit_s"], window.expire)
        timer.daemon = True
        timer.start()
    return wire.ProfileReply(status="ok")


def cell_ended() -> None:
    """Publish what there is at the end of a cell."""
    if (window := slot.window) is not None:
        window.cell_ended()


def _refused(sentence: str) -> wire.ProfileReply:
    return wire.ProfileReply(status="refused", error=sentence)
