"""Start an agent with its ticket; it ends with the notebook's session, or the network to it."""

from __future__ import annotations

import contextlib
import os
import sys

from nbdist.cluster.protocol import Ticket


def serve(text: str) -> None:
    """Serve one session on this node until it ends; then nothing of it is left here.

    Args:
        text: the ticket, as the session has made it.

    Raises:
        ValueError: it is none.
    """
    ticket = Ticket.from_json(text)
    sys.path[:] = [*dict.fromkeys([*ticket.path, *sys.path])]
    with contextlib.suppress(OSError):  # told by the agent, with the other things it lacks
        os.chdir(ticket.cwd)
    from nbdist.cluster.agent.agent import Agent  # the session's own path first

    Agent(ticket).serve()
