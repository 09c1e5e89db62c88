"""Faults that only a GPU can show: run by hand on a machine that has one.

    python tests/gpu/check_faults.py

1. Stop during a long kernel: the cell ends, and variables are kept.
2. A CUDA OOM in a cell: the next cell has the memory back.
3. With two GPUs: Stop while rank 0 is alone in an all_reduce of NCCL; the model trains on.
4. SIGKILL of a rank: NVML names the holder before, and the memory is back within 5 s.

Prints a line for each finding; the exit status is 1 when one of them is wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import pynvml

import nbdist
from nbdist import CellError, CellInterrupted, RankDied, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Finding = tuple[bool, str]

SLACK_BYTES = 256 << 20
BACK_S = 5.0
STOP_S = 10.0
LONG = "big = torch.ones(8192, 8192, device=device)\nfor _ in range(100_000): big = big @ big * 0"
FULL = "hog = [torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(10_000)]"
PREPARE = """
import torch.distributed as dist
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)

def step():
    loss = model(torch.randn(8, 1024, device=device)).pow(2).mean()
    accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
    return loss.item()

kept = step()
"""


def stopped(session: Session, code: str, *, after_s: float) -> float:
    """Run a cell, press Stop; returns the seconds from Stop to the prompt."""
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after_s, press)
    timer.start()
    try:
        session.run(code)
    except CellInterrupted:
        return time.monotonic() - pressed[0]
    finally:
        timer.cancel()
    return float("inf")


def used_bytes() -> list[int]:
    """Memory in use, by device, of all processes."""
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


def back_within(happened: Callable[[], bool], limit_s: float) -> float:
    """Seconds until something is so; infinite where it is not in time."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > limit_s:
            return float("inf")
        time.sleep(0.05)
    return time.monotonic() - began


def stop_in_a_kernel(session: Session) -> Iterator[Finding]:
    """Stop while the device computes for long."""
    seconds = stopped(session, LONG, after_s=3.0)
    yield seconds < STOP_S, f"Stop during long kernels: prompt after {seconds:.1f} s"
    kept = session.run("kept").values
    yield all(isinstance(one, float) for one in kept.values()), f"variables after it: {kept}"


def out_of_memory(session: Session) -> Iterator[Finding]:
    """A cell fills the device; the next one has the memory back."""
    session.run("torch.cuda.empty_cache()")
    before = used_bytes()
    try:
        session.run(FULL)
        yield False, "the device could not be filled"
    except CellError as error:
        yield "OutOfMemory" in str(error), f"a full device says: {str(error)[:120]}"
    session.run("torch.cuda.empty_cache()")
    left = [now - then for now, then in zip(used_bytes(), before, strict=True)]
    yield max(left) < SLACK_BYTES, f"held after the failed cell: {max(left) >> 20} MiB"
    yield session.run("step()").ok, "the next cell trains"


def alone_in_nccl(session: Session) -> Iterator[Finding]:
    """Stop while rank 0 waits for the others in NCCL."""
    if session.world_size == 1:
        yield True, "one GPU: no rank can wait for another in NCCL (not checked)"
        return
    alone = (
        "t = torch.ones(1, device=device)\nif rank == 0:\n    dist.all_reduce(t)\n    t.item()\n"
        "else:\n    import time\n    while True: time.sleep(0.05)"
    )
    seconds = stopped(session, alone, after_s=6.0)
    yield seconds < STOP_S, f"Stop while rank 0 is alone in NCCL: prompt after {seconds:.1f} s"
    yield session.run("step()").ok, "all ranks train on with new process groups"


def killed(session: Session) -> Iterator[Finding]:
    """A rank is killed: who holds the memory is known, and then it is back."""
    pid = session.status()["ranks"][0]["pid"]
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    holders = {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    yield pid in holders, f"NVML names {sorted(holders)} as holders; rank 0 is {pid}"
    before = used_bytes()[0]
    os.kill(pid, signal.SIGKILL)
    seconds = back_within(lambda: used_bytes()[0] < before - SLACK_BYTES, BACK_S)
    yield seconds < BACK_S, f"after SIGKILL the memory is back in {seconds:.1f} s"
    try:
        session.run("1")
        yield False, "the death was not told"
    except RankDied as death:
        yield "signal 9" in str(death), f"it is told: {str(death)[:120]}"


def main() -> int:
    """Check; returns the exit status."""
    pynvml.nvmlInit()
    wrong = 0
    with nbdist.Session() as session:
        session.run(PREPARE)
        for check in (stop_in_a_kernel, out_of_memory, alone_in_nccl, killed):
            for right, words in check(session):
                wrong += not right
                print("ok   " if right else "WRONG", words, flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
