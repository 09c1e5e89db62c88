"""Entry point of an agent that is a child of the cluster's process and ends with it.

The first line of stdin is the ticket. The end of stdin, also after the parent was killed, ends the
agent, and with it the launcher and the ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from nbdist.cluster.agent.serve import run_agent

AGENT_LEFT_BEHIND = 3
"""Exit code when the parent has ended."""
END_S = 9.5
"""Time for the agent to end launcher and ranks, which otherwise end after it."""


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(AGENT_LEFT_BEHIND)


def _end(*_: object) -> None:
    """Leave `serve`, which then cleans up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(AGENT_LEFT_BEHIND)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    ticket = b""
    while not ticket.endswith(b"\n"):
        byte = os.read(0, 1)  # only the line: the thread reads the rest
        if not byte:
            sys.exit(AGENT_LEFT_BEHIND)
        ticket += byte
    threading.Thread(target=_exit_with_parent, name="held", daemon=True).start()
    run_agent(ticket.decode())
