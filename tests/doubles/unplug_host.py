"""Run on the host alpha: a session over two hosts, and then the cable to beta is pulled out.

Writes as JSON what was seen, on the last line. Arguments: the first part of the namespaces' names,
the lease and the time after which a node is cut off, in seconds, shorter than in real sessions.
"""

import json
import sys
import time

import psutil

from nbdist import RankDied, Session
from nbdist.cluster import agent_connections, node_group
from nbdist.cluster.node_group import ClusterLauncherProvider
from tests.two_nodes import Hosts, NodesOnHosts

LONG_S = 60.0


def listening(processes: list[psutil.Process]) -> list[str]:
    """Addresses on which processes listen on the network."""
    found = [one for process in processes for one in process.net_connections("inet")]
    return sorted({one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN})


def main() -> None:
    hosts = Hosts(sys.argv[1])
    node_group.LEASE_S, agent_connections.NODE_TIMEOUT_S = float(sys.argv[2]), float(sys.argv[3])
    cluster = NodesOnHosts(hosts)
    seen: dict[str, object] = {}
    with Session(2, engine=ClusterLauncherProvider(cluster)) as session:
        code = "import torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
        seen["sum"] = session.run(code, output="none").values[1]
        beta = cluster.processes("beta")
        everywhere = [psutil.Process(), *cluster.processes("alpha"), *beta]
        seen["listening"] = listening(everywhere)
        session.run("while True: dist.all_reduce(torch.ones(1))", background=True)
        began = time.monotonic()
        hosts.cut("beta")
        cluster.unreachable.add("beta")
        try:
            session.wait(LONG_S)
        except RankDied as error:
            seen["told"], seen["after_s"] = str(error), time.monotonic() - began
        _, alive = psutil.wait_procs(beta, timeout=LONG_S)
        seen["left"], seen["ended_s"] = len(alive), time.monotonic() - began
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
