"""A simulated node: the real agent, with the launcher of `benchmarks.simulated_nodes.ranks`.

python -m benchmarks.simulated_nodes.node    with the ticket as a line of its input
"""

from __future__ import annotations

import sys
import threading

from nbdist.cluster.agent import agent
from nbdist.cluster.agent.__main__ import exit_on_stdin_close
from nbdist.cluster.local import Launcher
from nbdist.cluster.protocol import AgentTicket


class FakeLauncher(Launcher):
    """Starts ranks without torch."""

    module = "benchmarks.simulated_nodes.ranks"


if __name__ == "__main__":
    ticket = AgentTicket.from_json(sys.stdin.buffer.readline().decode())
    threading.Thread(target=exit_on_stdin_close, name="input", daemon=True).start()
    agent.NodeAgent(ticket, launcher=FakeLauncher).serve()
