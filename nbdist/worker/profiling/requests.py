"""Handles profile requests on a rank."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nbdist.protocol import messages
from nbdist.worker.profiling.optimizer_hooks import active_window
from nbdist.worker.profiling.window import ProfileWindow
from nbdist.worker.profiling.window_sync import WindowSync

if TYPE_CHECKING:
    from nbdist.worker.profiling.window import ProfileContext


def start_profile(
    request: messages.ProfileRequest,
    around: ProfileContext,
    *,
    running: str | None,
    over: str | None,
) -> messages.ProfileStartReply:
    """Arm a profile of the steps of a cell. Called on the control thread.

    Args:
        request: the cell and the options of the profile.
        around: context of this rank.
        running: request ID of the running cell, if any.
        over: request ID of the last finished cell.
    """
    if request["running"] and request["cell"] == over:
        return _refused("the requested cell has already finished; profile the next one.")
    if active_window.window is not None and running is not None:
        return _refused("a profile is already running; wait until its verdict is shown.")
    agreement = WindowSync(
        around.folder,
        request["id"],
        running=request["running"],
        rank=around.rank,
        ranks=request["ranks"],
    )
    window = ProfileWindow(request, agreement, around)
    active_window.window = window
    if request["running"]:
        timer = threading.Timer(request["limit_s"], window.expire)
        timer.daemon = True
        timer.start()
    return messages.ProfileStartReply(status="ok")


def on_cell_end() -> None:
    """Publish the measurements at the end of a cell."""
    if (window := active_window.window) is not None:
        window.on_cell_end()


def _refused(sentence: str) -> messages.ProfileStartReply:
    return messages.ProfileStartReply(status="refused", error=sentence)
