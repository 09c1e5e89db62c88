"""Entry point of an agent that its cluster's process holds: its end is this one's.

The first line of the standard input is the ticket; the end of the input, which comes also when
the holder is killed, ends the agent, and with it the launcher and the ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from nbdist.cluster.agent.serve import serve

LET_GO = 3
"""Exit code."""
END_S = 9.5
"""For the agent to end launcher and ranks; they end by themselves when it is gone."""


def _until_let_go() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(LET_GO)


def _end(*_: object) -> None:
    """Leave `serve`, which then removes all that is here."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(LET_GO)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    ticket = b""
    while not ticket.endswith(b"\n"):
        byte = os.read(0, 1)  # no more than the line: the thread reads the rest
        if not byte:
            sys.exit(LET_GO)
        ticket += byte
    threading.Thread(target=_until_let_go, name="held", daemon=True).start()
    serve(ticket.decode())
