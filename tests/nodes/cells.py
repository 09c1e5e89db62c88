"""Cells that the tests of all clusters run, and how a node's death is looked at."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbdist.rank_sets import resolve_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.live_kernel import LiveKernel, Shown

SUM = """
import os
import torch.distributed as dist
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
print("sum", total.item(), "of", world_size, "over", os.environ["GLOO_SOCKET_IFNAME"])
"""
TRAIN = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
def step():
    loss = model(torch.ones(8, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
print("loss", round(step(), 4))
"""
FOREVER = """%%distribute
import time
import torch.distributed as dist
print("loops")
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
"""
ALONE = """%%distribute
print("loops")
while True: pass
"""
DEATH_S = 5.0
CUT_OFF_S = 15.0


def dies(kernel: LiveKernel, kill: Callable[[], object], within_s: float = DEATH_S) -> Shown:
    """Kill something under a cell of ranks that run; what the cell shows once it has ended."""
    cell = kernel.send(FOREVER)
    kernel.collect(cell, until="loops")
    began = time.monotonic()
    kill()
    shown = kernel.collect(cell)
    assert time.monotonic() - began < within_s
    assert shown.error["ename"] == "RankDied"
    return shown


def stops(kernel: LiveKernel) -> None:
    """Press Stop under a cell of ranks that wait for one another, and of ranks that do not."""
    for forever in (FOREVER, ALONE):
        cell = kernel.send(forever)
        kernel.collect(cell, until="loops")
        kernel.manager.interrupt_kernel()
        shown = kernel.collect(cell)
        assert shown.error["ename"] == "CellInterrupted"
        assert "all variables are kept" in shown.text


def refused(kernel: LiveKernel, options: str) -> str:
    """What a cell with options that cannot be is told: one sentence."""
    kernel.run("%nbdist stop")
    shown = kernel.run(f"%%distribute {options}\n1\n")
    assert shown.status == "error"
    assert "Traceback" not in shown.text
    return shown.text


def lines_of(shown: Shown, rank: int, world_size: int) -> list[str]:
    """What a rank has printed, whoever else has printed the same."""
    lines = [line.partition("] ") for line in shown.text.splitlines() if line.startswith("[")]
    return [text for label, _, text in lines if rank in resolve_ranks(label[1:], world_size)]
