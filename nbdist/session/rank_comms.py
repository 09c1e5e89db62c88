"""Forwards the front end's messages for widgets of the ranks, such as a click, to the ranks.

A rank's widget opens a comm, and the front end sends that comm's messages to the notebook's kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.output.sink import get_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.rank_channels import Message


class RankComm:
    """Comm of a rank in the comm manager of the notebook's kernel; the manager calls both handlers.

    Not a `comm.BaseComm`, which triggers the events of a cell in the notebook's kernel for each
    message, and of which ipykernel 7.4 dispatches messages to the shell that a cell blocks
    (`_reply_subshell_for`).

    Args:
        comm_id: id that the rank has sent.
        forward: called with each message of the front end, on any thread.
    """

    target_name = "nbdist.rank"
    """Not "jupyter.widget": a page that is loaded asks the kernel for the comms of that target and
    waits until each of them has sent its state."""

    def __init__(self, comm_id: str, forward: Callable[[Message], None]) -> None:
        self.comm_id = comm_id
        self.handle_msg = self.handle_close = forward


class RankComms:
    """Comms that the ranks have opened in one cell.

    Args:
        forward: called with a rank and a message of the front end, on any thread.
    """

    def __init__(self, forward: Callable[[int, Message], None]) -> None:
        self._forward = forward
        self._comm_ids: set[str] = set()
        self._manager = getattr(get_kernel(), "comm_manager", None)  # None in a script

    def follow(self, rank: int, msg_type: str, comm_id: str) -> None:
        """Register a comm that a rank opens, and forget one that it closes."""
        manager = self._manager
        if manager is None:
            return
        if msg_type == "comm_open":
            self._comm_ids.add(comm_id)
            manager.register_comm(RankComm(comm_id, lambda message: self._forward(rank, message)))
        elif msg_type == "comm_close":
            self._comm_ids.discard(comm_id)
            manager.comms.pop(comm_id, None)

    def close(self) -> None:
        """Forget all comms: further messages of the front end are dropped."""
        manager, self._manager = self._manager, None
        while manager is not None and self._comm_ids:
            manager.comms.pop(self._comm_ids.pop(), None)
