"""Host memory and time of loading a pretrained model on four ranks, against one process.

The checkpoint has 1.1 billion random parameters in bf16. Memory is the largest sum of the ranks'
proportional set sizes (Pss of /proc/PID/smaps_rollup, memory-mapped files included) less the sum
before. The peer is one process with the same number of threads as all ranks together, until the
weights are in its own memory: `from_pretrained` returns views of the memory-mapped file.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from results import Row, middle
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RANKS, ROUNDS = 4, 3
CONFIG = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
IMPORTS = "import time, torch; from transformers import AutoModelForCausalLM, LlamaForCausalLM"
ALONE = """
begin = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained({folder!r}{arguments})
for parameter in model.parameters():
    parameter.data = parameter.data.clone()
print("seconds", time.perf_counter() - begin)
"""
SHARDED = """
accelerator.wait_for_everyone()
begin = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained({folder!r}{arguments})
model = accelerator.prepare(model)
accelerator.wait_for_everyone()
time.perf_counter() - begin
"""


def measure(build: Path) -> Iterator[Row]:
    """Rows for FSDP and ZeRO-3."""
    folder = build / "bench-loading"
    size = write_checkpoint(folder)
    alone = middle([load_alone(folder) for _ in range(ROUNDS)])
    for backend in ("fsdp2", "zero3"):
        seconds, peak = load_sharded(folder, backend)
        yield Row(
            name=f"host memory of {RANKS} ranks loading a model under {backend}, over its bytes",
            value=peak / size,
            unit="x",
            limit=1.3,
            detail=f"{peak / 1e9:.2f} / {size / 1e9:.2f} GB",
        )
        yield Row(
            name=f"time of that under {backend}, against one process",
            value=seconds / alone,
            unit="x",
            limit=1.0,
            detail=f"{seconds:.2f} / {alone:.2f} s",
        )
    shutil.rmtree(folder)


def write_checkpoint(folder: Path) -> int:
    """Write a model with random weights; return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**CONFIG, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).named_parameters()}
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.nbytes for weight in weights.values())


def load_alone(folder: Path, arguments: str = "") -> float:
    """Return the seconds in which one process loads the model."""
    code = IMPORTS + ALONE.format(folder=str(folder), arguments=arguments)
    output = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return float(output.split()[-1])


def load_sharded(folder: Path, backend: str, arguments: str = "", **options: str) -> tuple[float, int]:
    """Return the seconds in which the ranks load the model, and the growth of their memory."""
    seconds, peaks = [], []
    for _ in range(ROUNDS):
        with nbdist.Session(nproc=RANKS, backend=backend, **{"precision": "no"} | options) as session:
            session.run(IMPORTS)
            session.run("accelerator.state")  # builds the engine
            pids = list(session.run("import os; os.getpid()").values.values())
            with Memory(pids) as memory:
                answer = session.run(SHARDED.format(folder=str(folder), arguments=arguments))
            seconds.append(max(answer.values.values()))
            peaks.append(memory.growth)
    return middle(seconds), max(peaks)


class Memory:
    """Measures the growth of the memory of processes, from outside."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._over = pids, threading.Event()
        self._before = self._peak = pss_bytes(pids)
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        """Largest growth in bytes."""
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self._peak = max(self._peak, pss_bytes(self._pids))


def pss_bytes(pids: Sequence[int]) -> int:
    """Sum of the proportional set sizes, in which shared pages count once."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(1024 * int(re.search(r"^Pss: +(\d+) kB", text, re.M)[1]) for text in texts)  # type: ignore[index]
