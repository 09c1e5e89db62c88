"""Training time lost to a save that goes on in the background, and to one that is waited for.

The same steps are trained three ways in turns: without a save, with one in the middle, and
with one in the middle that is waited for. What is lost is the time over that without. A rank
has one thread: with as many ranks as cores the save has to take its time from training, with
fewer a core is free for it, as it is where a GPU computes.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from results import Row, middle

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROUNDS = 3
STEPS = 10
"""Before the save, and again after it: it is over by then."""
WAYS = ("none", "async", "blocking")
MODEL = """
from transformers import GPT2Config, GPT2LMHeadModel

tokens = torch.randint(0, 16000, (1, 32))
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=16000, n_positions=128, n_layer=4, n_embd=512, n_head=8, bos_token_id=0,
    eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)

def train(steps):
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def measure(build: Path) -> Iterator[Row]:
    """Time lost on one rank beside a free core, and on two that use both."""
    for nproc in (1, 2):
        yield row(nproc, build / "bench-saves")


def row(nproc: int, folder: Path) -> Row:
    """Time lost with so many ranks."""
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    saves: list[nbdist.Save] = []
    shutil.rmtree(folder, ignore_errors=True)
    with nbdist.Session(nproc=nproc, backend="fsdp2", precision="no") as session:
        session.run(f"{MODEL}\ntrain(3)", output="none")
        for number in range(-1, ROUNDS):
            for way in WAYS:
                begin = time.perf_counter()
                save = trained(session, way, folder)
                spent = time.perf_counter() - begin
                if save is not None:
                    over = save.done
                    save.wait(60)
                    shutil.rmtree(folder)
                if number >= 0:
                    taken[way].append(spent)
                    if way == "async" and save is not None:
                        assert over, "the save outlasted the training"
                        saves.append(save)
    without = middle(taken["none"])
    lost = {way: middle(taken[way]) - without for way in WAYS[1:]}
    return Row(
        name=f"time lost to an asynchronous save, {nproc} rank{'s' * (nproc > 1)}",
        value=lost["async"] / lost["blocking"],
        unit="x",
        limit=0.2,
        detail=f"{lost['async']:.2f} / {lost['blocking']:.2f} s lost of {without:.1f} s; paused"
        f" {middle([one.pause_s for one in saves]):.2f} s, saved in"
        f" {middle([one.seconds for one in saves]):.1f} s",
    )


def trained(session: nbdist.Session, way: str, folder: Path) -> nbdist.Save | None:
    """Train with or without a save in the middle."""
    session.run(f"train({STEPS})", output="none")
    save = None if way == "none" else session.save("middle", folder=folder)
    if save is not None and way == "blocking":
        save.wait(60)
    session.run(f"train({STEPS})", output="none")
    return save
