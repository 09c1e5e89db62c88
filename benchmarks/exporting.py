"""Export of 110M parameters from ranks, against `save_pretrained` from one process.

One process has the whole model, as after gathering it there, and saves it in turns with the
export of the ranks. Both wait until the disk has the files and their names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from results import Row, middle, paired_ratio
from switching import GPT2, PEAK, RESET, values

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKENDS = ("fsdp2", "zero3")
ROUNDS = 5
MEMORY_RANKS = 4
TRAINED = f"""
{GPT2}
tokens = torch.randint(0, 32000, (1, 32))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
loss = model(input_ids=tokens, labels=tokens).loss
accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
"""
ALONE = f"""
import os, re, shutil, sys, time
from pathlib import Path
import psutil
from transformers.utils.logging import disable_progress_bar

answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
disable_progress_bar()

def saved(model, folder):
    model.save_pretrained(folder)
    for path in (*Path(folder).iterdir(), Path(folder), Path(folder).parent):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

{GPT2.replace("12", "1").replace("768", "12")}
saved(model, sys.argv[1])  # imports what saving needs
shutil.rmtree(sys.argv[1])
del model
Path("/proc/self/clear_refs").write_text("5")
before = psutil.Process().memory_info().rss
{GPT2}
for line in sys.stdin:
    begin = time.perf_counter()
    saved(model, line.strip())
    taken = time.perf_counter() - begin
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    print(taken, peak - before, file=answers, flush=True)
"""
"""Saves where a line of its input says; answers with seconds and bytes: the model, whole, and
what saving it takes on top."""


def measure(build: Path) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=build) as made, alone(Path(made)) as other:
        for backend in BACKENDS:
            yield from rows(backend, Path(made), other)


def rows(backend: str, folder: Path, other: subprocess.Popen[str]) -> Iterator[Row]:
    """Both rows of one backend."""
    ours: list[float] = []
    theirs: list[float] = []
    with nbdist.Session(nproc=2, backend=backend, precision="no") as session:
        session.run(TRAINED, output="none")
        for number in range(-1, ROUNDS):
            taken, gathered = save_pretrained(other, folder / "plain")
            os.sync()
            begin = time.perf_counter()
            report = session.export(folder / "ours")
            spent = time.perf_counter() - begin
            shutil.rmtree(folder / "ours")
            if number >= 0:  # the first round imports
                ours.append(spent)
                theirs.append(taken)
    yield Row(
        name=f"export under {backend}, against save_pretrained from one process",
        **paired_ratio(theirs, ours),
        unit="x",
        limit=0.8,
        sense=">=",
        detail=f"{middle(theirs):.2f} / {middle(ours):.2f} s, on the disk,"
        f" {report.size_bytes / 2**20:.0f} MiB from 2 ranks, on load {os.getloadavg()[0]:.1f}",
    )
    extra = memory(backend, folder / "ours")
    yield Row(
        name=f"memory of it on one of {MEMORY_RANKS} {backend} ranks, against the same",
        value=extra / gathered,
        unit="x",
        limit=1 / 4,
        detail=f"{extra / 2**20:.1f} MiB over training, the fullest rank, imports too /"
        f" {gathered / 2**20:.0f} MiB, the gathered model and what saving it adds",
    )


def memory(backend: str, folder: Path) -> int:
    """Bytes that the fullest rank takes at most during an export, over what it has in training."""
    with nbdist.Session(nproc=MEMORY_RANKS, backend=backend, precision="no") as session:
        session.run(TRAINED, output="none")
        session.run(RESET, output="none")
        before = values(session, PEAK)  # what it has now, since the peak was reset
        session.export(folder)
        peak = values(session, PEAK)
        shutil.rmtree(folder)
    return max(peak[rank] - before[rank] for rank in peak)


def save_pretrained(other: subprocess.Popen[str], folder: Path) -> tuple[float, int]:
    """Seconds and bytes of one save there."""
    assert other.stdin is not None
    assert other.stdout is not None
    os.sync()
    other.stdin.write(f"{folder}\n")
    other.stdin.flush()
    seconds, size_bytes = other.stdout.readline().split()
    shutil.rmtree(folder)
    return float(seconds), int(size_bytes)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that has the whole model."""
    command = [sys.executable, "-c", ALONE, str(folder / "first")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
