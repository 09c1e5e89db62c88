"""How long a plan of all strategies takes beside Accelerate's estimate of one model's weights."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from results import Row, middle

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMES = 7
IMPORT = """
import time
begin = time.perf_counter()
import nbdist.planner
own = time.perf_counter()
import torch
print(own - begin, time.perf_counter() - own)
"""
PLAN = """
import time, nbdist
sizes = [1, 2, 4, 8, 16, 32]
for _ in range(2):
    begin = time.perf_counter()
    plan = nbdist.plan(%r, devices="8xA100-80GB,nvlink", batch_size=sizes, seq_len=2048)
    assert len(plan.rows) == 180
    print(time.perf_counter() - begin)
"""
ESTIMATE = """
import time
from accelerate import init_empty_weights
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(num_hidden_layers=%d, hidden_size=%d, intermediate_size=%d)
for _ in range(2):
    begin = time.perf_counter()
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    calculate_maximum_sizes(model)
    print(time.perf_counter() - begin)
"""
"""What `accelerate estimate-memory` computes: the sizes of the weights, for one strategy."""


def measure() -> Iterator[Row]:
    """Rows about the time of a plan; each figure is of fresh processes, the middle of seven."""
    lines = [output(IMPORT).split() for _ in range(TIMES)]
    own, torch_s = (middle([float(line[i]) for line in lines]) for i in range(2))
    yield Row(
        name="plan: import nbdist.planner, against import torch",
        value=own / torch_s,
        unit="x",
        limit=0.05,
        detail=f"{own * 1000:.0f} ms / {torch_s:.2f} s",
    )
    for size, shape in {"7b": (32, 4096, 11008), "350m": (24, 1024, 2816)}.items():
        pairs = [
            (output(PLAN % size).splitlines(), output(ESTIMATE % shape).splitlines())
            for _ in range(TIMES)
        ]
        again = middle([float(plan[1]) for plan, _ in pairs])
        estimate = middle([float(estimate[1]) for _, estimate in pairs])
        first = middle([float(plan[0]) for plan, _ in pairs])
        yield Row(
            name=f"plan: 180 rows, against Accelerate's estimate of the weights, {size}",
            value=again / estimate,
            unit="x",
            limit=0.75,
            detail=f"{again * 1000:.0f} / {estimate * 1000:.0f} ms; the first {first:.2f} s",
        )


def output(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout
