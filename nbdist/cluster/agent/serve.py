"""Runs an agent from its ticket until the session, or the connection to it, ends."""

from __future__ import annotations

import contextlib
import os
import sys

from nbdist.cluster.protocol import AgentTicket


def run_agent(text: str) -> None:
    """Serve one session on this node until it ends; leave nothing behind.

    Args:
        text: the ticket as JSON.

    Raises:
        ValueError: not a ticket.
    """
    ticket = AgentTicket.from_json(text)
    sys.path[:] = [*dict.fromkeys([*ticket.path, *sys.path])]
    with contextlib.suppress(OSError):  # reported by the agent later
        os.chdir(ticket.cwd)
    from nbdist.cluster.agent.agent import NodeAgent  # import with the session's own path

    NodeAgent(ticket).serve()
