"""Requests for a profile, as this rank's kernel takes them; runs on a rank."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nbdist.protocol import messages
from nbdist.worker.profiling.optimizer_hooks import slot
from nbdist.worker.profiling.window import Window
from nbdist.worker.profiling.window_sync import Agreement

if TYPE_CHECKING:
    from nbdist.worker.profiling.window import Surroundings


def arm(
    asked: messages.ProfileRequest, around: Surroundings, *, running: str | None, over: str | None
) -> messages.ProfileReply:
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
    return messages.ProfileReply(status="ok")


def cell_ended() -> None:
    """Publish what there is at the end of a cell."""
    if (window := slot.window) is not None:
        window.cell_ended()


def _refused(sentence: str) -> messages.ProfileReply:
    return messages.ProfileReply(status="refused", error=sentence)
