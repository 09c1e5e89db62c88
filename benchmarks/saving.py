"""Training time lost to a background save, against torch's own asynchronous save.

Steps are trained before a save, while it goes on, and after it, in one cell. What is lost is
the time from the call to the end of the save, less that of the steps made meanwhile at the pace of
those around it. The peer is `torch.distributed.checkpoint.async_save` of the same state. Both take
turns on the same ranks, so that a slow moment of the machine meets both. Two more rows are the size
of the checkpoint of a LoRA run. The last is the time from SIGTERM to a complete checkpoint, less
the rest of the optimizer step that was running, which the ranks complete.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from results import Row, middle, paired_ratio

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 5
PAIRS = 15
SETUP = """
import statistics, time
from pathlib import Path
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

tokens = torch.randint(0, 16000, (1, 32))
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=16000, n_positions=128, n_layer=4, n_embd=512, n_head=8, bos_token_id=0,
    eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
saves = torch.distributed.new_group(backend="gloo")  # torch's thread must not share the training's
AROUND = 8

def step(is_saved):
    "Train a step; returns its seconds, and whether the save is complete on all ranks."
    begin = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    saved = torch.tensor(float(is_saved()))
    torch.distributed.all_reduce(saved, torch.distributed.ReduceOp.MIN)
    return time.perf_counter() - begin, bool(saved)

def begin_save(name, by):
    "Start a save; returns a function that tells whether it is complete."
    path = Path(folder, name)
    if by == "nbdist":
        save(name, folder=folder)
        return path.exists
    inner = getattr(optimizer, "optimizer", optimizer)
    weights, state = get_state_dict(model, inner)
    state = {"model": weights, "optimizer": state}
    return dcp.async_save(state, checkpoint_id=path, process_group=saves).done

def lost(name, by):
    "Save in the middle of training; returns the seconds lost, and those of the save."
    around = [step(lambda: True)[0] for _ in range(AROUND)]
    begin = time.perf_counter()
    is_saved = begin_save(name, by)
    steps, saved = 0, False
    while not saved:
        _, saved = step(is_saved)
        steps += 1
    taken = time.perf_counter() - begin
    around += [step(lambda: True)[0] for _ in range(AROUND)]
    return taken - steps * statistics.median(around), taken

for _ in range(AROUND):
    step(lambda: True)
"""

SETUP_110M = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=32000, n_positions=128))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
tokens = torch.randint(0, 32000, (1, 8))

def train():
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    Path(folder, "stepped").touch()
    optimizer.zero_grad()

train()
"""
TRAIN_110M = "while True: train()"

LORA = """
import peft
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

if rank == 0:
    LlamaForCausalLM(LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8)).save_pretrained(Path(folder, "base"))
torch.distributed.barrier()
model = AutoModelForCausalLM.from_pretrained(Path(folder, "base"))
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
trainable = [p for p in model.parameters() if p.requires_grad]
expected_bytes = 3 * sum(p.nbytes for p in trainable)  # AdamW has two moments
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trainable))
tokens = torch.randint(0, 8000, (1, 16))
accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
optimizer.step()
expected_bytes
"""


def measure(build: Path) -> Iterator[Row]:
    """Time lost on one rank beside a free core, as a GPU leaves one, and on as many as cores."""
    yield row(1, build / "bench-saves")
    yield row(2, build / "bench-saves")
    yield from map(adapter_row, ("fsdp2", "zero3"))
    yield termination_row()


def termination_row() -> Row:
    """Time from SIGTERM to a rank until the checkpoint is complete, less the rest of the step."""
    blocking: list[float] = []
    ended: list[float] = []
    steps: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        nbdist.Session(nproc=2, backend="fsdp2", precision="no", checkpoints=folder) as session,
    ):
        for number in range(ROUNDS):
            session.push(folder=folder)
            session.run(SETUP_110M, output="none")
            stepped = Path(folder, "stepped")
            session.save("first").wait()  # the first save of new ranks reads the base model
            os.sync()  # so that neither save waits for what earlier ones have left to write
            begin = time.perf_counter()
            session.save("blocking").wait()
            blocking.append(time.perf_counter() - begin)
            os.sync()
            pid = session.status()["ranks"][number % 2]["pid"]
            sent: list[float] = []

            def end(pid: int = pid, sent: list[float] = sent) -> None:
                sent.append(time.time())
                os.kill(pid, signal.SIGTERM)

            threading.Timer(4.0, end).start()
            try:
                session.run(TRAIN_110M, output="none")
            except nbdist.CellInterrupted:
                steps.append(max(stepped.stat().st_mtime - sent[0], 0.0))
                ended.append(time.time() - sent[0] - steps[-1])
            while session.state != "dead":
                time.sleep(0.1)
            for saved in list(session.checkpoints):
                shutil.rmtree(str(saved.path))
            session.restart()
    return Row(
        name="SIGTERM in training to a complete checkpoint, less the rest of the step, against a"
        " blocking save, 110M, 2 ranks",
        value=middle(ended) / middle(blocking),
        unit="x",
        limit=1.3,
        detail=f"{middle(ended):.2f} / {middle(blocking):.2f} s; the step {middle(steps):.2f} s",
    )


def adapter_row(backend: str) -> Row:
    """Size of a LoRA checkpoint, with its manifest, over what has to be in it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        nbdist.Session(nproc=2, backend=backend, precision="no") as session,
    ):
        session.push(folder=folder)
        expected = session.run(LORA, output="none").values[0]
        path = Path(str(session.save("lora", folder=folder).wait(60).path))
        size = sum(file.stat().st_size for file in path.iterdir())
    return Row(
        name=f"LoRA checkpoint bytes over trainable and optimizer bytes, {backend}",
        value=size / expected,
        unit="x",
        limit=1.2,
        detail=f"{size / 1e3:.0f} / {expected / 1e3:.0f} kB",
    )


def row(nproc: int, folder: Path) -> Row:
    """Time lost with so many ranks."""
    lost: dict[str, list[float]] = {"nbdist": [], "torch": []}
    taken: dict[str, list[float]] = {"nbdist": [], "torch": []}
    shutil.rmtree(folder, ignore_errors=True)
    with nbdist.Session(nproc=nproc, backend="fsdp2", precision="no") as session:
        session.push(folder=str(folder))
        session.run(SETUP, output="none")
        for number in range(-1, PAIRS):
            for by, losses in lost.items():
                name = f"{by}{number}"
                answer = session.run(f"lost({name!r}, {by!r})", output="none")
                seconds, whole = answer.values[0]
                shutil.rmtree(folder / name)
                if number >= 0:
                    losses.append(seconds)
                    taken[by].append(whole)
    shutil.rmtree(folder)
    ranks = f"{nproc} rank{'s' * (nproc > 1)} on {os.cpu_count()} cores"
    return Row(
        name=f"training lost to a background save against torch's async_save, {ranks}",
        **paired_ratio(lost["nbdist"], lost["torch"]),
        unit="x",
        limit=1.0,
        detail=f"{middle(lost['nbdist']):.2f} / {middle(lost['torch']):.2f} s; saved in"
        f" {middle(taken['nbdist']):.1f} / {middle(taken['torch']):.1f} s",
    )
