"""A switch from FSDP2 to ZeRO-3 with 110M parameters, against doing it by hand and a plain copy.

By hand means what Accelerate offers: `save_state`, a new `accelerate launch`, `load_state`.
Accelerate cannot convert between the two engines, nor run either on a CPU, so the hand-made
way is measured under DDP, without any conversion: it is the least that it takes.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

from results import Row, middle
from starts import launch_command

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROUNDS = 3
MODEL = """
from transformers import GPT2Config, GPT2LMHeadModel

tokens = torch.randint(0, 32000, (1, 32))
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=32000, n_positions=128, n_layer=12, n_embd=768, bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)

def train(steps):
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
RESET = """
from pathlib import Path
import psutil
Path("/proc/self/clear_refs").write_text("5")
psutil.Process().memory_info().rss
"""
PEAK = """
import re
int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
"""
FLOOR = """
import time
share = torch.ones({elements})
torch.distributed.barrier()
begin = time.perf_counter()
copied = share.clone()
torch.distributed.barrier()
taken = time.perf_counter() - begin
del share, copied
taken
"""
SCRIPT = f"""
import sys, time, torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
{MODEL}
what, folder = sys.argv[1:]
if what == "save":
    train(2)
    accelerator.wait_for_everyone()
    begin = time.perf_counter()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print("seconds", time.perf_counter() - begin)
else:
    accelerator.load_state(folder)
"""


def measure(build: Path) -> Iterator[Row]:
    """Time, bytes and memory of a switch."""
    hand = by_hand(build)
    taken: list[float] = []
    floors: list[float] = []
    peaks: list[float] = []
    with nbdist.Session(nproc=2, backend="fsdp2", precision="no") as session:
        session.run(MODEL + "\ntrain(3)", output="none")
        for number in range(-1, ROUNDS):
            before = values(session, RESET)
            report = session.switch("zero3")
            peak = values(session, PEAK)
            share = report.state_bytes / 2
            floor = max(values(session, FLOOR.format(elements=int(share) // 4)).values())
            session.run("train(1)", output="none")
            session.switch("fsdp2")
            session.run("train(1)", output="none")
            if number >= 0:  # the first round imports
                taken.append(report.total_s)
                floors.append(floor)
                peaks.append(max((peak[rank] - before[rank]) / share for rank in peak))
    state = f"{report.state_bytes / 2**30:.2f} GiB of state, 2 ranks"
    yield Row(
        name="switch FSDP2 to ZeRO-3, against save, launch and load by hand",
        value=middle(taken) / hand,
        unit="x",
        limit=0.1,
        detail=f"{middle(taken):.1f} / {hand:.1f} s, {state}",
    )
    yield Row(
        name="the same, against copying the state once",
        value=middle([a / b for a, b in zip(taken, floors, strict=True)]),
        unit="x",
        limit=4,
        detail=f"{middle(taken):.2f} / {middle(floors):.2f} s",
    )
    yield Row(
        name="bytes that cross between ranks in it, of the state",
        value=100 * report.moved_bytes / report.state_bytes,
        unit="%",
        limit=5,
        detail=state,
    )
    yield Row(
        name="peak host memory in it over training, of a rank's share",
        value=middle(peaks),
        unit="x",
        limit=1.2,
        detail=state,
    )


def values(session: nbdist.Session, code: str) -> dict[int, Any]:
    """The value of a cell on each rank."""
    return dict(session.run(code, output="none").values)


def by_hand(build: Path) -> float:
    """Seconds of saving in one job, and of a second one that loads."""
    folder = build / "bench-switch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    saved = output(script, "save", folder / "state")
    seconds = float(next(line for line in saved.splitlines() if "seconds" in line).split()[1])
    begin = time.monotonic()
    output(script, "load", folder / "state")
    taken = seconds + time.monotonic() - begin
    shutil.rmtree(folder)
    return taken


def output(script: Path, what: str, folder: Path) -> str:
    """What a script under accelerate launch prints."""
    command = launch_command(script, what, str(folder))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
