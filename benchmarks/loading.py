"""Host memory and time of loading a pretrained model on several ranks, against one process.

The checkpoint has 1.1 billion random parameters in bf16. Memory is the largest sum of the ranks'
proportional set sizes (Pss of /proc/PID/smaps_rollup, memory-mapped files included) less the sum
before. The peer of the time is one rank under the same backend, which loads the whole model; it is
compared with at most one rank per core, since ranks that share a core build the model in turns.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

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
SETUP = """
import os, time
from transformers import AutoModelForCausalLM, LlamaForCausalLM
# A small model of the class: imports and the first use of an engine take the same for any model.
model = accelerator.prepare(AutoModelForCausalLM.from_pretrained({small!r}))
"""
LOAD = """
accelerator.wait_for_everyone()
begin = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained({folder!r})
model = accelerator.prepare(model)
accelerator.wait_for_everyone()
time.perf_counter() - begin
"""


def measure(build: Path) -> Iterator[Row]:
    folder = build / "bench-loading"
    size = write_checkpoint(folder)
    write_checkpoint(folder / "small", hidden_size=128, num_hidden_layers=2)
    ranks = min(RANKS, os.cpu_count() or 1)
    for backend in ("fsdp2", "zero3"):
        _, peak = load(folder, backend)
        seconds, _ = load(folder, backend, nproc=ranks)
        alone, _ = load(folder, backend, nproc=1, sharded_load=False)
        yield Row(
            name=f"host memory of {RANKS} ranks loading a model under {backend}, over its bytes",
            value=peak / size,
            unit="x",
            limit=1.3,
            detail=f"{peak / 1e9:.2f} / {size / 1e9:.2f} GB",
        )
        yield Row(
            name=f"time of {ranks} ranks under {backend}, over one rank that loads it whole",
            value=seconds / alone,
            unit="x",
            limit=1.0,
            detail=f"{seconds:.2f} / {alone:.2f} s",
        )
    shutil.rmtree(folder)


def write_checkpoint(folder: Path, **sizes: int) -> int:
    """Write a model with random weights; return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**CONFIG | sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).named_parameters()}
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.nbytes for weight in weights.values())


def load(folder: Path, backend: str, **options: Any) -> tuple[float, int]:
    """Return the seconds in which ranks load the model, and the growth of their memory."""
    seconds, peaks = [], []
    for _ in range(ROUNDS):
        arguments = {"nproc": RANKS, "precision": "no"} | options
        with nbdist.Session(backend=backend, **arguments) as session:
            session.run(SETUP.format(small=str(folder / "small")))
            pids = list(session.run("os.getpid()").values.values())
            with Memory(pids) as memory:
                answer = session.run(LOAD.format(folder=str(folder)))
            seconds.append(max(answer.values.values()))
            peaks.append(memory.growth)
    return middle(seconds), max(peaks)


class Memory:
    """Measures the growth of the memory of processes, from outside."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._over = pids, threading.Event()
        self._before = self._peak = pss_bytes(pids)
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self._peak = max(self._peak, pss_bytes(self._pids))


def pss_bytes(pids: Sequence[int]) -> int:
    """Sum of the proportional set sizes, in which shared pages count once."""
    pattern = re.compile(r"^Pss: +(\d+) kB", re.MULTILINE)
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(1024 * int(pattern.findall(text)[0]) for text in texts)
