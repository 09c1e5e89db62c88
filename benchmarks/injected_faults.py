"""Five faults: the cell that runs meanwhile, how the fault is made, and what its user must see."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels import Kernel

BUSY_S = 1.0
"""So long all ranks are at their lines before something is done to them."""

TRAINING = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
layer = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
keepsake = 42
"""
HERE = "open(f'rank{rank}', 'w').write(str(os.getpid()))"
LOOP = f"""
{HERE}
while True:
    time.sleep(0.05)
"""
ALONE = f"""
{HERE}
if rank == 0:
    dist.all_reduce(torch.ones(1))
while lingers:
    time.sleep(0.05)
"""
RAISES = f"""
{HERE}
if rank == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(1))
"""
READ = "print(f'KEPT {rank} {keepsake}')"
KEPT = r"KEPT \d 42"
TRAIN = """
loss = model(torch.ones(2, 4)).sum()
accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
print(f'TRAINED {rank} {loss.isfinite().item()}')
"""
TRAINED = r"TRAINED \d True"
STOPPED = "Keyboard ?Interrupt|interrupted|signal: 2|SIGINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault."""

    name: str
    lines: str
    inject: Callable[[Kernel, dict[int, int]], float]
    """Makes it, given the pid of each rank; the time of day when it happened."""
    cause: str = ""
    """Pattern of what tells the user; "" where it is not the cell that tells."""
    limit_s: float = 2.0
    """nbdist's user must know by then."""
    keeps: bool = True
    """Whether all variables can outlive it."""
    kills_kernel: bool = False


def stop(kernel: Kernel, _: dict[int, int]) -> float:
    time.sleep(BUSY_S)
    now = time.time()
    kernel.manager.interrupt_kernel()
    return now


def raised(kernel: Kernel, _: dict[int, int]) -> float:
    """Rank 1 raises right after it has written its file."""
    return (kernel.folder / "rank1").stat().st_mtime


def kill_rank(_: Kernel, pids: dict[int, int]) -> float:
    """SIGKILL rank 1."""
    time.sleep(BUSY_S)
    now = time.time()
    os.kill(pids[1], signal.SIGKILL)
    return now


def kill_kernel(kernel: Kernel, _: dict[int, int]) -> float:
    """SIGKILL the kernel's process, and no other."""
    time.sleep(BUSY_S)
    now = time.time()
    kernel.process.kill()
    return now


FAULTS = (
    Fault(
        name="Stop in a loop",
        lines=LOOP,
        inject=stop,
        cause=STOPPED,
    ),
    Fault(
        name="Stop in a stuck all_reduce",
        lines=ALONE,
        inject=stop,
        cause=STOPPED,
        limit_s=10,
    ),
    Fault(
        name="one rank raises before an all_reduce",
        lines=RAISES,
        inject=raised,
        cause="ValueError: bad batch",
    ),
    Fault(
        name="SIGKILL of a rank",
        lines=LOOP,
        inject=kill_rank,
        cause=r"SIGKILL|[Ss]ignal 9|exitcode: -9|[Ee]ngine.* died",
        keeps=False,
    ),
    Fault(
        name="SIGKILL of the kernel",
        lines=LOOP,
        inject=kill_kernel,
        keeps=False,
        kills_kernel=True,
    ),
)
