"""Entry point of an agent: `python -m nbdist.cluster.agent` reads its ticket from stdin.

The agent ends at the end of stdin: the process that started it has ended.
"""

from __future__ import annotations

import os
import sys
import threading

from nbdist.cluster.agent.serve import run_agent

CHUNK_BYTES = 4096


def exit_on_stdin_close() -> None:
    """Wait for the end of stdin, then exit; all child processes end too."""
    while os.read(0, CHUNK_BYTES):
        continue  # ignore further input
    os._exit(1)


def main() -> None:
    """Read the ticket and run the agent."""
    ticket = sys.stdin.buffer.readline().decode()
    threading.Thread(target=exit_on_stdin_close, name="input", daemon=True).start()
    run_agent(ticket)


if __name__ == "__main__":
    main()
