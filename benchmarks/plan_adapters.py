"""The planner against torch's allocator for LoRA, quantized models and fused losses.

Configurations are drawn anew in every run. Each case is a real training with PEFT, bitsandbytes and
TRL's loss on CPU tensors, prepared by nbdist as one rank of a fake process group; the peak of its
third step is that of torch's CPU allocator (kineto's memory events), so nothing of nbdist measures.

    python benchmarks/plan_adapters.py [SEED]
"""

from __future__ import annotations

import dataclasses
import random
import secrets
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import footprint
import results

import nbdist
from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.plan_table import PlanRow

CASES = 18
PROCESSES = 2
MIB = 2**20
_BACKENDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "fsdp1")
_NAMES = {"loop": "adamw_loop", "fused": "adamw_fused"}


def measure() -> Iterator[results.Row]:
    """Median and largest error over one draw."""
    yield from measured(secrets.randbelow(10**6))


def measured(seed: int) -> Iterator[results.Row]:
    """Draw, measure, predict, and show every case."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    cases = [draw(rng, number) for number in range(CASES)]
    begin = time.monotonic()
    print(f"==> plan_adapters: seed {seed}")
    errors = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        for case, parts in zip(cases, pool.map(fullest, cases), strict=True):
            row = predicted(case)
            error = 100 * (row.allocated_bytes / parts["total"] - 1)
            errors.append(abs(error))
            print(_line(case, parts["total"], row, error), flush=True)
    print(f"==> plan_adapters: {time.monotonic() - begin:.0f} s")
    detail = f"{len(cases)} configurations, torch's CPU allocator, seed {seed}"
    name = "planned peak, LoRA and quantized:"
    for what, value, bar in (
        ("median", statistics.median(errors), 1),
        ("largest", max(errors), 5),
    ):
        yield results.Row(
            name=f"{name} {what} error", value=value, unit="%", limit=bar, detail=detail
        )


def fullest(case: footprint.Case) -> dict[str, int]:
    """Peak of the fullest rank: under FSDP1 adapters are not spread evenly over the ranks."""
    ranks = range(case.world_size) if case.backend == "fsdp1" else [0]
    found = [footprint.measured(dataclasses.replace(case, rank=rank)) for rank in ranks]
    return max(found, key=lambda parts: parts["total"])


def draw(rng: random.Random, number: int) -> footprint.Case:
    """One training setup; every backend, and every quantization that it supports, in turn."""
    backend = _BACKENDS[number % len(_BACKENDS)]
    shards_int8 = backend in {"ddp", "zero1", "zero2"}
    methods = {"fsdp1": [None], "ddp": [None, "nf4", "int8"]}.get(
        backend, [None, "nf4", "int8"] if shards_int8 else [None, "nf4"]
    )
    quantize = methods[number // len(_BACKENDS) % len(methods)]
    heads = rng.choice([4, 8])
    case = footprint.Case(
        config={
            "model_type": rng.choice(["llama", "mistral", "qwen2", "qwen3"]),
            "hidden_size": 64 * heads,
            "intermediate_size": 64 * rng.randint(2 * heads, 4 * heads),
            "num_hidden_layers": rng.randint(3, 6),
            "num_attention_heads": heads,
            "num_key_value_heads": heads // rng.choice([1, 2]),
            "head_dim": 64,
            "vocab_size": rng.choice([2_000, 8_000, 32_000]),
            "tie_word_embeddings": False,
        },
        backend=backend,
        world_size=2 if backend == "fsdp1" else rng.choice([2, 4, 8]),
        batch_size=rng.randint(1, 3),
        seq_len=rng.choice([64, 128, 256]),
        precision="bf16",
        activation_checkpointing=rng.random() < 0.3,
        optimizer=rng.choice(
            ["loop", "loop", "fused", "adafactor" if backend == "ddp" else "loop"]
        ),
        dtype="float32" if backend == "fsdp1" else "bfloat16",
        lora=rng.choice([4, 8, 16]),
        target_modules=rng.choice([None, "all-linear", ["q_proj", "k_proj", "down_proj"]]),
        quantize=quantize,
        fused_loss=rng.random() < 0.25 and backend != "zero3",
        allocator=True,
    )
    if not backend.startswith("zero"):
        return case
    # DeepSpeed's default is 1 GB of bucket, beside which a small model would not be seen.
    zero = {"zero_optimization": {"reduce_bucket_size": rng.choice([50_000, 500_000])}}
    return dataclasses.replace(case, deepspeed_config=zero)


def predicted(case: footprint.Case) -> PlanRow:
    """The planner's row for a case; with TRL's loss for the module, which is recognized."""
    model: Any = case.config | {"dtype": case.dtype}
    given: dict[str, Any] = {"lora": case.lora, "target_modules": case.target_modules}
    given |= {"quantize": case.quantize}
    if case.fused_loss:
        model, given = footprint.model_of(case), {}
    plan = nbdist.plan(
        model,
        devices=f"{case.world_size}xcpu",
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        precision=case.precision,
        optimizer=_NAMES.get(case.optimizer, case.optimizer),
        backend=case.backend,
        **given,
        **({"deepspeed_config": case.deepspeed_config} if case.deepspeed_config else {}),
    )
    row = plan.row(case.backend, activation_checkpointing=case.activation_checkpointing)
    if row.cost is None:
        raise PlanError(row.why)
    return row


def _line(case: footprint.Case, total: int, row: PlanRow, error: float) -> str:
    """One case as a line of the table."""
    config = case.config
    flags = [
        case.quantize or case.dtype,
        f"r{case.lora}",
        "fused loss" if case.fused_loss else "",
        "recompute" if case.activation_checkpointing else "",
        case.optimizer,
        str(case.target_modules or ""),
    ]
    return (
        f"{config['model_type']:8} L{config['num_hidden_layers']} h{config['hidden_size']:<4}"
        f" V{config['vocab_size']:<6} {case.backend:6} N{case.world_size}"
        f" {case.batch_size}x{case.seq_len:<4} {' '.join(filter(None, flags)):60}"
        f" {total / MIB:8.2f} MiB {error:+7.3f} % {row.peak_moment}"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    given = int(sys.argv[1]) if len(sys.argv) > 1 else secrets.randbelow(10**6)
    print(results.table(measured(given)))
