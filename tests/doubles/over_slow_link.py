"""Run on the host alpha: everything that a session does, over two hosts with a slow link.

Writes as JSON what was seen, on the last line. Argument: the first part of the namespaces' names.
"""

import json
import os
import signal
import sys
import threading
import time

import numpy as np

from nbdist import CellInterrupted, Session
from nbdist.cluster.agent_connections import NODE_TIMEOUT_S
from nbdist.cluster.node_group import ClusterLauncherProvider
from tests.two_nodes import Hosts, NodesOnHosts

TRAIN = """
import torch.distributed as dist
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    loss = model(torch.ones(4, 8) * (rank + 1)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(step=step, loss=loss.item())
    print(f"step {step}")
sum(one.sum().item() for one in model.parameters())
"""
FOREVER = "while True: dist.all_reduce(torch.ones(1))"


def main() -> None:
    seen: dict[str, object] = {}
    began = time.monotonic()

    def done(what: str) -> None:
        seen[f"{what}_at_s"] = round(time.monotonic() - began, 1)

    with Session(2, engine=ClusterLauncherProvider(NodesOnHosts(Hosts(sys.argv[1])))) as session:
        done("started")
        session.run("pass")
        done("cell")
        weights = session.run(TRAIN).values
        seen["weights"], seen["reported"] = list(weights.values()), len(session.metrics)
        done("trained")
        given = np.arange(100_000, dtype=np.float32)
        session.push(given=given)
        session.run("taken = given * (rank + 1)")
        seen["taken"] = [
            bool((session.pull("taken", rank=rank) == given * (rank + 1)).all()) for rank in (0, 1)
        ]
        done("values")
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            session.run(FOREVER)
        except CellInterrupted:
            done("stopped")
        seen["after"] = list(session.run("rank").values.values())
        session.run(f"import time; time.sleep({NODE_TIMEOUT_S + 2})")
        seen["state"], seen["restarts"] = session.state, session.num_restarts
        done("all")
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
