"""Entry point of an agent: `python -m nbdist.cluster.agent`, with the ticket on stdin's first line.

The end of stdin, also after the parent was killed, ends the agent, and with it the launcher and the
ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

from nbdist.cluster.local_launcher import Launcher
from nbdist.cluster.protocol import AgentCredentials

AGENT_LEFT_BEHIND = 3
"""Exit code when the parent has ended."""
END_S = 9.5
"""Time for the agent to end launcher and ranks, which otherwise end after it."""


def main(launcher: type[Launcher] = Launcher) -> None:
    """Serve one session on this node until it ends; leave nothing behind.

    Args:
        launcher: class of the launcher.

    Raises:
        ValueError: the first line is not a ticket.
    """
    signal.signal(signal.SIGHUP, _exit)
    signal.signal(signal.SIGTERM, _exit)  # until the agent reports it to the kernel
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # only the line: the thread reads the rest
        if not byte:
            sys.exit(AGENT_LEFT_BEHIND)
        line += byte
    threading.Thread(target=_exit_with_parent, name="stdin", daemon=True).start()
    ticket = AgentCredentials.from_json(line.decode())
    sys.path[:] = [*dict.fromkeys([*ticket.path, *sys.path])]
    with contextlib.suppress(OSError):  # reported by the agent later
        os.chdir(ticket.cwd)
    from nbdist.cluster.agent.agent import NodeAgent  # import with the session's own path

    agent = NodeAgent(ticket, launcher=launcher)
    agent.report_sigterm()
    agent.serve()


def _exit(*_: object) -> None:
    """Leave `serve`, which then cleans up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(AGENT_LEFT_BEHIND)


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        continue  # ignore further input
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(END_S)
    os._exit(AGENT_LEFT_BEHIND)


if __name__ == "__main__":
    main()
