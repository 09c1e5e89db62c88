"""Training time lost to a save that goes on in the background, and to one that is waited for.

Steps are trained before a save, while it goes on, and after it, in one cell. What is lost is
the time from the call of `save` to its end, less that of the steps made meanwhile at the pace of
those around it. The two ways take turns, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from results import Row, middle

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROUNDS = 5
SETUP = """
import statistics, time
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel

tokens = torch.randint(0, 16000, (1, 32))
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=16000, n_positions=128, n_layer=4, n_embd=512, n_head=8, bos_token_id=0,
    eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
AROUND = 8

def step(name):
    "Train a step; returns its seconds, and whether the save was whole at its end."
    begin = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    whole = torch.tensor(float(Path(folder, name).exists()))
    torch.distributed.all_reduce(whole, torch.distributed.ReduceOp.MIN)
    return time.perf_counter() - begin, bool(whole)

def lost(name, blocking):
    "Save in the middle of training; returns the seconds lost, and those of the save."
    around = [step(name)[0] for _ in range(AROUND)]
    begin = time.perf_counter()
    save(name, folder=folder)
    steps, whole = 0, False
    while not whole:
        if blocking:
            time.sleep(0.005)
            whole = Path(folder, name).exists()
        else:
            _, whole = step(name)
            steps += 1
    taken = time.perf_counter() - begin
    around += [step(name)[0] for _ in range(AROUND)]
    return taken - steps * statistics.median(around), taken

for _ in range(AROUND):
    step("none")
"""


def measure(build: Path) -> Iterator[Row]:
    """Time lost on one rank beside a free core, as a GPU leaves one, and on as many as cores."""
    yield row(1, build / "bench-saves", 0.2)
    yield row(2, build / "bench-saves", 1.0)


def row(nproc: int, folder: Path, limit: float) -> Row:
    """Time lost with so many ranks."""
    lost: dict[bool, list[float]] = {False: [], True: []}
    taken: list[float] = []
    shutil.rmtree(folder, ignore_errors=True)
    with nbdist.Session(nproc=nproc, backend="fsdp2", precision="no") as session:
        session.push(folder=str(folder))
        session.run(SETUP, output="none")
        for number in range(-1, ROUNDS):
            for blocking in (False, True):
                name = f"{'waited' if blocking else 'async'}{number}"
                answer = session.run(f"lost({name!r}, {blocking})", output="none")
                seconds, whole = answer.values[0]
                shutil.rmtree(folder / name)
                if number >= 0:
                    lost[blocking].append(seconds)
                    taken += [] if blocking else [whole]
    shutil.rmtree(folder)
    ranks = f"{nproc} rank{'s' * (nproc > 1)} on {os.cpu_count()} cores"
    return Row(
        name=f"training lost to a save in the background, {ranks}",
        value=middle(lost[False]) / middle(lost[True]),
        unit="x",
        limit=limit,
        detail=f"{middle(lost[False]):.2f} / {middle(lost[True]):.2f} s if waited for; saved in"
        f" {middle(taken):.1f} s",
    )
