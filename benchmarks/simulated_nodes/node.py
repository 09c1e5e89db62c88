"""A simulated node: the real agent, with the launcher of `benchmarks.simulated_nodes.ranks`.

python -m benchmarks.simulated_nodes.node    with the ticket as a line of its input
"""

from __future__ import annotations

from nbdist.cluster.agent import main
from nbdist.cluster.local_launcher import Launcher


class FakeLauncher(Launcher):
    """Starts ranks without torch."""

    module = "benchmarks.simulated_nodes.ranks"


if __name__ == "__main__":
    main(FakeLauncher)
