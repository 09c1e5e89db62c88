"""The planner's closed form against torch's own FSDPMemTracker, on configurations drawn anew.

Llama-like and GPT-2-like models under FSDP2 in a fake process group; every run draws others,
from a seed that it prints. A seed given as an argument draws those again:

    python benchmarks/plan_fsdp.py SEED
"""

from __future__ import annotations

import random
import secrets
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import footprint
import results

from nbdist.planner import memory, model_spec
from nbdist.planner.memory.timeline import TrainingSetup, compute_mode
from nbdist.planner.models import analytic
from nbdist.planner.optimizers import OPTIMIZERS
from nbdist.strategies import Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.planner.memory.timeline import MemoryUsage

CASES = 32
OLDER = 10
"""Cases of FSDP1, whose tensors are real, so that its models are small."""
REPLICATED = 8
"""Cases of FSDP2 with replicas across nodes."""
PROCESSES = 2
GIB = 2**30
_OPTIMIZERS = {"adamw": "adamw", "fused": "adamw_fused", "loop": "adamw_loop"}


def measure() -> Iterator[results.Row]:
    """Median and largest error over the cases of one draw."""
    yield from measured(secrets.randbelow(10**6))


def measured(seed: int) -> Iterator[results.Row]:
    """Draw, measure, predict, and show every case."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    print(f"==> plan_fsdp: seed {seed}")
    newer = [draw(rng) for _ in range(CASES)]
    yield from _compared(newer, "FSDP2", "FSDPMemTracker", seed, bars=(0.5, 3))
    replicated = [_on_nodes(draw(rng), rng) for _ in range(REPLICATED)]
    yield from _compared(replicated, "HSDP", "FSDPMemTracker", seed, bars=(0.5, 3))
    older = [_small(draw(rng), rng) for _ in range(OLDER)]
    yield from _compared(older, "FSDP1", "tensors counted", seed, bars=(2, 5))


def _compared(
    cases: Sequence[footprint.Case], name: str, source: str, seed: int, *, bars: tuple[float, float]
) -> Iterator[results.Row]:
    """Median and largest error of the cases of one backend."""
    begin = time.monotonic()
    found = _together(cases)
    print(f"==> {name}: {len(cases)} cases, {time.monotonic() - begin:.0f} s")
    sizes = []
    for case, parts in zip(cases, found, strict=True):
        moment = predicted(case)
        error = 100 * (moment.device_bytes / parts["total"] - 1)
        sizes.append(abs(error))
        print(_line(case, parts["total"], moment, error))
    detail = f"{len(cases)} configurations, {source}, seed {seed}"
    for what, value, bar in zip(
        ("median", "largest"), (statistics.median(sizes), max(sizes)), bars, strict=True
    ):
        yield results.Row(
            name=f"planned peak, closed form, {name}: {what} error",
            value=value,
            unit="%",
            limit=bar,
            detail=detail,
        )


def draw(rng: random.Random) -> footprint.Case:
    """One training setup; sizes are free, since no memory is behind fake tensors."""
    family = rng.choice(["gpt2"] * 4 + ["llama", "mistral", "qwen2", "qwen3"])
    return footprint.Case(
        config=_gpt2(rng) if family == "gpt2" else _llama(rng, family),
        backend="fsdp2",
        world_size=rng.randint(2, 64),
        batch_size=rng.randint(1, 4),
        seq_len=rng.choice([64, 128, 256, 384, 512, 768, 1024]),
        precision=rng.choice(["bf16", "bf16", "bf16", "no"]),
        activation_checkpointing=rng.random() < 0.5,
        accumulate=rng.choice([1, 1, 1, 2, 3]),
        optimizer=rng.choice(["adamw", "adamw", "fused"]),
        attention=rng.choice(["sdpa", "sdpa", "sdpa", "eager"]),
        fsdp_config=rng.choice([None, {"reshard_after_forward": False}]),
    )


def _on_nodes(case: footprint.Case, rng: random.Random) -> footprint.Case:
    """The same with shards inside each of some nodes, and replicas across them."""
    nodes, ranks = rng.choice([2, 3, 4, 16]), rng.choice([2, 3, 4, 8])
    return replace(case, nodes=nodes, world_size=nodes * ranks)


def _small(case: footprint.Case, rng: random.Random) -> footprint.Case:
    """The same under FSDP1, no larger than this machine likes real tensors to be."""
    limits = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8_000, "n_embd": 192}
    config = {key: min(value, limits.get(key, value)) for key, value in case.config.items()}
    if "head_dim" in config:
        config |= {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    else:
        config |= {"n_head": config["n_embd"] // 32}
    kept = {"sharding_strategy": "SHARD_GRAD_OP"} if case.fsdp_config else None
    seq_len = rng.choice([32, 64, 128])
    return replace(case, config=config, backend="fsdp1", fsdp_config=kept, seq_len=seq_len)


def _llama(rng: random.Random, family: str) -> dict[str, Any]:
    head_dim, groups = rng.choice([32, 64, 128]), rng.choice([1, 2, 4])
    heads = groups * rng.randint(1, 6)
    hidden = head_dim * heads
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": 32 * round(hidden * rng.uniform(2, 4) / 32),
        "num_hidden_layers": rng.randint(2, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups,
        "head_dim": head_dim,
        "vocab_size": _vocab(rng),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _gpt2(rng: random.Random) -> dict[str, Any]:
    heads = rng.randint(2, 16)
    dropout = rng.choice([0.0, 0.1])
    return {
        "model_type": "gpt2",
        "n_embd": heads * rng.choice([32, 64]),
        "n_head": heads,
        "n_layer": rng.randint(2, 5),
        "n_positions": 1024,
        "vocab_size": _vocab(rng),
        "tie_word_embeddings": rng.random() < 0.5,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _vocab(rng: random.Random) -> int:
    """From 8k to 256k, small ones as often as large ones."""
    return round(8_000 * 32 ** rng.random())


def predicted(case: footprint.Case) -> MemoryUsage:
    """The planner's peak for a case."""
    model = analytic.spec_from_config(case.config | {"_attn_implementation": case.attention})
    options = Options(
        backend=case.backend,
        precision=case.precision,
        offload=case.offload,
        activation_checkpointing=case.activation_checkpointing,
        accumulate=case.accumulate,
        replicate_across="nodes" if case.nodes > 1 else "none",
        fsdp_config=case.fsdp_config,
    )
    setup = TrainingSetup(
        options=options,
        world_size=case.world_size,
        num_nodes=case.nodes,
        optimizer=OPTIMIZERS[_OPTIMIZERS[case.optimizer]],
        kind="cpu",
    )
    workload = model_spec.Workload(
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        compute=compute_mode(setup),
        activation_checkpointing=case.activation_checkpointing,
        kind="cpu",
    )
    return memory.peak_memory(model, workload, setup)


def _together(cases: Sequence[footprint.Case]) -> list[dict[str, int]]:
    """Measure cases in a few processes; results in the order of the cases."""
    shares = [cases[first::PROCESSES] for first in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = list(pool.map(footprint.measured_together, shares))
    return [parts[number % PROCESSES][number // PROCESSES] for number in range(len(cases))]


def _line(case: footprint.Case, total: int, moment: MemoryUsage, error: float) -> str:
    """One case as a line of the table."""
    config = case.config
    layers = config.get("num_hidden_layers") or config["n_layer"]
    hidden = config.get("hidden_size") or config["n_embd"]
    flags = [
        "tied" if config["tie_word_embeddings"] else "",
        "recompute" if case.activation_checkpointing else "",
        "kept" if case.fsdp_config else "",
        f"x{case.accumulate}" if case.accumulate > 1 else "",
        case.precision,
        case.attention,
        case.optimizer,
    ]
    return (
        f"{config['model_type']:8} L{layers} h{hidden:<5} V{config['vocab_size']:<7} "
        f"N{_ranks(case):<5} {case.batch_size}x{case.seq_len:<5} "
        f"{' '.join(filter(None, flags)):37} {total / GIB:8.4f} GiB {error:+7.3f} % "
        f"{moment.name}"
    )


def _ranks(case: footprint.Case) -> str:
    """Number of ranks: "8", or as nodes and ranks of each "2x4"."""
    each = case.world_size // case.nodes
    return f"{case.nodes}x{each}" if case.nodes > 1 else f"{each}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    given = int(sys.argv[1]) if len(sys.argv) > 1 else secrets.randbelow(10**6)
    print(results.table(measured(given)))
