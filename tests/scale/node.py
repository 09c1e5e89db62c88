"""A node of the simulation: the real agent, with the launcher of `tests.scale.ranks`.

python -m tests.scale.node    with the ticket as a line of its input
"""

from __future__ import annotations

import sys
import threading

from nbdist.cluster.agent import agent
from nbdist.cluster.agent.__main__ import end_with_input
from nbdist.cluster.local import Launcher
from nbdist.cluster.protocol import Ticket


class FakeLauncher(Launcher):
    """Starts ranks without torch."""

    module = "tests.scale.ranks"


if __name__ == "__main__":
    ticket = Ticket.from_json(sys.stdin.buffer.readline().decode())
    threading.Thread(target=end_with_input, name="input", daemon=True).start()
    agent.Agent(ticket, launcher=FakeLauncher).serve()
