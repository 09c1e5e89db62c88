"""Entry point of an agent: `python -m nbdist.cluster.agent` reads its ticket from standard input.

The agent ends when that input does: whoever has started it is gone.
"""

from __future__ import annotations

import os
import sys
import threading

from nbdist.cluster.agent.serve import serve

CHUNK_BYTES = 4096


def end_with_input() -> None:
    """Wait until nobody can write to this process any more, and end it; all it started follows."""
    while os.read(0, CHUNK_BYTES):
        continue  # nothing more is said to it
    os._exit(1)


def main() -> None:
    """Read the ticket and serve."""
    ticket = sys.stdin.buffer.readline().decode()
    threading.Thread(target=end_with_input, name="input", daemon=True).start()
    serve(ticket)


if __name__ == "__main__":
    main()
