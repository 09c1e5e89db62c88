"""Training steps a second in a cell, against the same code under accelerate launch.

A plain loop with `report()` in each step, transformers' Trainer, and TRL's SFTTrainer with LoRA.

Both pairs of ranks live at the same time and train in turns, some seconds each, so that a
slow moment of the machine meets both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, NamedTuple

from kernels import Kernel
from results import Row, middle, paired_ratio
from starts import launch_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROUNDS = 9
STEPS = 40

TIMED = """
torch.distributed.barrier()
begin = time.perf_counter()
{train}
torch.distributed.barrier()
seconds = time.perf_counter() - begin
"""
SCRIPT = """
import sys
{script}
{setup}

go, done = sys.argv[1:]
steps = compile({timed!r}, "steps", "exec")
is_main = torch.distributed.get_rank() == 0
while True:
    box = [Path(go).read_text() if is_main else None]
    torch.distributed.broadcast_object_list(box)
    if box[0] != "go":
        break
    exec(steps)
    if is_main:
        Path(done).write_text(str(seconds))
"""


class Workload(NamedTuple):
    """One way to train."""

    name: str
    setup: str
    train: str
    """Trains ``STEPS`` steps."""
    script: str = ""
    """What a script needs before, because it has no session."""

    @property
    def timed(self) -> str:
        """The cell that trains and measures its seconds."""
        return TIMED.format(train=self.train)

    def as_script(self) -> str:
        """The same as a script that obeys orders from a pipe."""
        return SCRIPT.format(script=self.script, setup=self.setup, timed=self.timed)


DATA = """
import itertools, sysconfig, tempfile, time, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
corpus = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)
windows = corpus[: len(corpus) // 128 * 128].view(-1, 128)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=256))
"""
ARGUMENTS = f"""
    tempfile.mkdtemp(), max_steps={STEPS}, per_device_train_batch_size=8, learning_rate=1e-3,
    logging_steps=5, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
"""
LOOP = Workload(
    "training with report() every step",
    DATA
    + """
from torch.utils.data import DataLoader

def collate(rows):
    ids = torch.stack(rows).long()
    return {"input_ids": ids, "labels": ids}

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(windows, batch_size=8, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = itertools.chain.from_iterable(itertools.repeat(loader))
model.train()
""",
    f"""
for batch in itertools.islice(batches, {STEPS}):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=loss)
""",
    """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)

def report(**scalars):
    pass
""",
)
TRAINER = Workload(
    "transformers' Trainer",
    DATA
    + f"""
from transformers import Trainer, TrainingArguments

rows = [{{"input_ids": ids, "labels": ids}} for ids in windows[:4000].long()]
trainer = Trainer(model, TrainingArguments({ARGUMENTS}), train_dataset=rows)
""",
    "trainer.train()",
)
SFT = Workload(
    "TRL's SFTTrainer with LoRA",
    DATA
    + f"""
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

names = Tokenizer(models.WordLevel({{str(number): number for number in range(256)}}, "0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=names, eos_token="0", pad_token="0")
rows = Dataset.from_dict({{"input_ids": windows[:4000].tolist()}})
lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(
    model, SFTConfig({ARGUMENTS}), train_dataset=rows, processing_class=tokenizer, peft_config=lora
)
""",
    "trainer.train()",
)


def measure(build: Path) -> Iterator[Row]:
    for workload in (LOOP, TRAINER, SFT):
        yield compared(workload, build)
    yield tracked(LOOP, build)


def tracked(workload: Workload, build: Path) -> Row:
    """The row of a tracker: CPU time that it adds; steps/s vary by more than that."""
    folder = build / "bench-tracker" / str(time.time_ns())
    with Kernel(sys.executable) as tracked_kernel, Kernel(sys.executable) as plain_kernel:
        for kernel in (tracked_kernel, plain_kernel):
            kernel.run("%load_ext nbdist")
            track = f"tensorboard:{folder}" if kernel is tracked_kernel else None
            kernel.run(f"%config NbDist.track = {track!r}")
            kernel.run(f"%%distribute -n 2 --precision no\n{workload.setup}")
        while not any(folder.glob("*/events*")):  # the tracker's process imports torch
            time.sleep(0.1)
        before = cpu_seconds(tracked_kernel), cpu_seconds(plain_kernel)
        for _ in range(ROUNDS):
            our_seconds(tracked_kernel, workload)
            our_seconds(plain_kernel, workload)
        after = cpu_seconds(tracked_kernel), cpu_seconds(plain_kernel)
    beside, without = (after[i]["other"] - before[i]["other"] for i in range(2))
    ranks = after[0]["ranks"] - before[0]["ranks"]
    return Row(
        name=f"CPU time that a TensorBoard run adds to {workload.name}",
        value=(beside - without) / (without + ranks),
        unit="x",
        limit=0.01,
        detail=f"{without:.2f} -> {beside:.2f} CPU seconds beside {ranks:.0f} of the ranks",
    )


def cpu_seconds(kernel: Kernel) -> dict[str, float]:
    """CPU seconds of a kernel's ranks with their launcher, and of its other processes."""
    used: dict[str, float] = defaultdict(float)
    for process in kernel.tree():
        times = process.cpu_times()
        is_rank = "nbdist.launcher" in process.cmdline()
        used["ranks" if is_rank else "other"] += times.user + times.system
    return used


def compared(workload: Workload, build: Path) -> Row:
    with Kernel(sys.executable) as kernel, launched(workload, build) as script:
        kernel.run("%load_ext nbdist")
        kernel.run(f"%%distribute -n 2 --precision no\n{workload.setup}")
        return speed_row(
            f"{workload.name}, against accelerate launch",
            lambda: our_seconds(kernel, workload),
            script.seconds,
            limit=0.98,
        )


def speed_row(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    limit: float,
    detail: str = "",
) -> Row:
    """The row of two ways to train, which take turns; each returns the seconds of a round."""
    laps = [(ours(), theirs()) for _ in range(ROUNDS + 1)][1:]  # the first round warms up
    fast, slow = zip(*laps, strict=True)
    return Row(
        name=name,
        **paired_ratio(slow, fast),
        unit="x",
        limit=limit,
        sense=">=",
        detail=f"{STEPS / middle(fast):.1f} / {STEPS / middle(slow):.1f} steps/s{detail}",
    )


def our_seconds(kernel: Kernel, workload: Workload) -> float:
    """Seconds of one round on nbdist's ranks, by rank 0's own clock."""
    kernel.run(f"%%distribute --pull seconds\n{workload.timed}")
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
        self._tell("end")

    def _tell(self, order: str) -> None:
        self._go.write_text(order)


@contextmanager
def launched(workload: Workload, build: Path) -> Iterator[Script]:
    """The script, started; ended when the block is left."""
    folder = build / "bench-script"
    go, done = pipes(folder)
    file = folder / "train.py"
    file.write_text(workload.as_script())
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
