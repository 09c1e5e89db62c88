"""Training steps a second with `report()` in each, against the same code under accelerate launch.

Both pairs of ranks live at the same time and train in turns, some seconds each, so that a
slow moment of the machine meets both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from kernels import Kernel
from results import Row, middle, paired_ratio
from starts import launch_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROUNDS = 9
STEPS = 40

SETUP = """
import itertools, sysconfig, time
from pathlib import Path
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
corpus = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)
windows = corpus[: len(corpus) // 128 * 128].view(-1, 128)

def collate(rows):
    ids = torch.stack(rows).long()
    return {"input_ids": ids, "labels": ids}

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(windows, batch_size=8, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = itertools.chain.from_iterable(itertools.repeat(loader))
model.train()
"""
STEPS_CELL = f"""
accelerator.wait_for_everyone()
begin = time.perf_counter()
for batch in itertools.islice(batches, {STEPS}):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=loss)
accelerator.wait_for_everyone()
seconds = time.perf_counter() - begin
"""
SCRIPT = f"""
import sys, torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
{SETUP}

def report(**scalars):
    pass

go, done = sys.argv[1:]
steps = compile({STEPS_CELL!r}, "steps", "exec")
while True:
    if accelerator.is_main_process:
        with open(go) as orders:
            order = orders.read()
    else:
        order = None
    box = [order]
    torch.distributed.broadcast_object_list(box)
    if box[0] != "go":
        break
    exec(steps)
    if accelerator.is_main_process:
        with open(done, "w") as answers:
            answers.write(str(seconds))
"""


def measure(build: Path) -> Iterator[Row]:
    """The row about training speed."""
    ours: list[float] = []
    theirs: list[float] = []
    with Kernel(sys.executable) as kernel, launched(build) as script:
        kernel.run("%load_ext nbdist")
        kernel.run(f"%%distribute -n 2 --precision no\n{SETUP}")
        for number in range(-1, ROUNDS):
            lap = our_seconds(kernel), script.seconds()
            if number >= 0:  # the first round warms up
                ours.append(lap[0])
                theirs.append(lap[1])
    yield Row(
        name="training with report() every step, against accelerate launch",
        **paired_ratio(theirs, ours),
        unit="x",
        limit=0.98,
        sense=">=",
        detail=f"{STEPS / middle(ours):.1f} / {STEPS / middle(theirs):.1f} steps/s",
    )


def our_seconds(kernel: Kernel) -> float:
    """Seconds of one round on nbdist's ranks, by rank 0's own clock."""
    kernel.run(f"%%distribute --pull seconds\n{STEPS_CELL}")
    return float(kernel.value("seconds"))


class Script:
    """The script under accelerate launch; it trains a round when it is told to."""

    def __init__(self, go: Path, done: Path) -> None:
        """Talk to it through two named pipes."""
        self._go, self._done = go, done

    def seconds(self) -> float:
        """Let it train one round; seconds by its rank 0's own clock."""
        self._tell("go")
        return float(self._done.read_text())

    def end(self) -> None:
        """Let it leave its loop."""
        self._tell("end")

    def _tell(self, order: str) -> None:
        self._go.write_text(order)


@contextmanager
def launched(build: Path) -> Iterator[Script]:
    """The script, started; ended when the block is left."""
    folder = build / "bench-script"
    go, done = pipes(folder)
    file = folder / "train.py"
    file.write_text(SCRIPT)
    log: IO[str]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(launch_command(file, str(go), str(done)), stdout=log, stderr=log)
        script = Script(go, done)
        try:
            yield script
            script.end()
            process.wait(60)
        finally:
            process.terminate()  # elastic's agent ends its ranks
            process.wait(60)


def pipes(folder: Path) -> tuple[Path, Path]:
    """Two named pipes in a folder that is made for them: orders, and answers."""
    folder.mkdir(parents=True, exist_ok=True)
    go, done = folder / "go", folder / "done"
    for pipe in (go, done):
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
    return go, done
