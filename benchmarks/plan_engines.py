"""The planner against real DDP and DeepSpeed steps, on configurations drawn anew in each run.

Every case goes through nbdist's own preparation and three training steps, whose tensors are
counted: as ranks of a fake process group of 2 to 16, and as two processes that talk over
gloo. Ranks differ under ZeRO-1 and 2; the planner answers for the fullest, so those that may
be it are measured and the most counts. CPU ranks hold in one memory what a GPU's rank holds
on its device and on the host: their sum is compared.

    python benchmarks/plan_engines.py [SEED]
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import footprint
import results

from nbdist.planner import memory, model_spec, optimizers
from nbdist.planner.memory import zero_partitioning
from nbdist.planner.memory.timeline import TrainingSetup, compute_mode
from nbdist.planner.models import analytic
from nbdist.strategies import Hardware, Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from footprint import Case

CASES = 14
REAL = 6
PROCESSES = 2
MIB = 2**20
LIMIT_S = 300
_NAMES = {"adamw": "adamw", "fused": "adamw_fused", "loop": "adamw_loop", "sgd": "sgd"}
_ZERO = ("zero1", "zero2", "zero3")


def measure() -> Iterator[results.Row]:
    """Median and largest error over one draw."""
    yield from measured(secrets.randbelow(10**6))


def measured(seed: int) -> Iterator[results.Row]:
    """Draw, measure, predict, and show every case."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    backends = ("ddp", *_ZERO)
    fake = [draw(rng, backends[number % 4]) for number in range(CASES)]
    real = [draw(rng, backends[number % 4], real=True) for number in range(REAL - 1)]
    real.append(_offloaded(draw(rng, rng.choice(_ZERO), real=True)))
    begin = time.monotonic()
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(_fullest, fake))
    found += [_both(case) for case in real]
    print(f"==> plan_engines: seed {seed}, {time.monotonic() - begin:.0f} s")
    errors = [_shown(case, total) for case, total in zip(fake + real, found, strict=True)]
    detail = f"{len(fake)} of fake groups, {len(real)} of 2 gloo ranks, seed {seed}"
    name = "planned peak, DDP and ZeRO-1/2/3:"
    middle = statistics.median(errors)
    yield results.Row(name=f"{name} median error", value=middle, unit="%", limit=2, detail=detail)
    yield results.Row(
        name=f"{name} largest error", value=max(errors), unit="%", limit=5, detail=detail
    )


def draw(rng: random.Random, backend: str, *, real: bool = False) -> Case:
    """One training setup, small enough for real tensors."""
    config = _llama(rng) if rng.random() < 0.7 else _gpt2(rng)
    case = footprint.Case(
        config=config,
        backend=backend,
        world_size=2 if real else rng.choice([2, 3, 4, 8, 16]),
        batch_size=rng.randint(1, 3),
        seq_len=rng.choice([16, 32, 64, 128, 192]),
        precision=rng.choice(["bf16", "bf16", "bf16", "no"]),
        activation_checkpointing=rng.random() < 0.4,
        accumulate=rng.choice([1, 1, 4]),
        optimizer=rng.choice(["adamw", "adamw", "fused", "loop", "sgd"]),
        real=real,
    )
    if backend not in _ZERO:
        return case
    return dataclasses.replace(case, deepspeed_config={"zero_optimization": _zero(rng, case)})


def _llama(rng: random.Random) -> dict[str, Any]:
    head_dim, groups = rng.choice([32, 64]), rng.choice([1, 2])
    heads = groups * rng.randint(1, 4 // groups * 2)
    hidden = head_dim * heads
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 16 * round(hidden * rng.uniform(2, 4) / 16),
        "num_hidden_layers": rng.randint(2, 8),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups,
        "vocab_size": round(1000 * 12 ** rng.random()),
        "tie_word_embeddings": rng.random() < 0.4,
    }


def _gpt2(rng: random.Random) -> dict[str, Any]:
    heads = rng.randint(2, 8)
    dropout = rng.choice([0.0, 0.1])
    return {
        "model_type": "gpt2",
        "n_embd": heads * 32,
        "n_head": heads,
        "n_layer": rng.randint(2, 8),
        "n_positions": 256,
        "vocab_size": round(1000 * 12 ** rng.random()),
        "tie_word_embeddings": rng.random() < 0.7,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _zero(rng: random.Random, case: Case) -> dict[str, Any]:
    """Sizes as a user sets them, of the model's own order of magnitude; some stay default."""
    params = model_spec.num_params(analytic.spec_from_config(case.config))

    def size(low: float, high: float) -> int:
        return round(params * low * (high / low) ** rng.random())

    # DeepSpeed's default is 1 GB of bucket, beside which a small model would not be seen.
    zero: dict[str, Any] = {"reduce_bucket_size": size(0.01, 1.5)}
    if case.backend != "zero3":
        return zero | {"overlap_comm": rng.random() < 0.3}
    return zero | {
        "stage3_param_persistence_threshold": rng.choice([0, 1000, 100_000]),
        "stage3_max_live_parameters": rng.choice([size(0.1, 1), 1_000_000_000]),
        "stage3_max_reuse_distance": rng.choice([size(0.1, 1), 1_000_000_000]),
        "stage3_prefetch_bucket_size": rng.choice([size(0.02, 0.5), 50_000_000]),
    }


def _offloaded(case: Case) -> Case:
    """The same with optimizer state in host memory, which DeepSpeed's own Adam updates."""
    return dataclasses.replace(case, offload="cpu", optimizer="adamw")


def _setup(case: Case) -> TrainingSetup:
    """What the case is to the planner."""
    options = Options(
        backend=case.backend,
        precision=case.precision,
        offload=case.offload,
        activation_checkpointing=case.activation_checkpointing,
        accumulate=case.accumulate,
        deepspeed_config=case.deepspeed_config,
    ).validate(Hardware(kind="cpu", bf16=True, world_size=case.world_size))
    return TrainingSetup(
        options=options,
        world_size=case.world_size,
        optimizer=optimizers.find_optimizer(_NAMES[case.optimizer]),
        kind="cpu",
    )


def predicted(case: Case) -> tuple[int, str]:
    """The planner's peak of device and host together, and when it is."""
    model, setup = analytic.spec_from_config(case.config), _setup(case)
    workload = model_spec.Workload(
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        compute=compute_mode(setup),
        activation_checkpointing=case.activation_checkpointing,
        kind="cpu",
    )
    return max(
        (moment.device_bytes + sum(moment.host_parts.values()), moment.name)
        for moment in memory.step_memory_usage(model, workload, setup)
    )


def _fullest(case: Case) -> int:
    """Measured bytes of the fullest rank of a fake group."""
    ranks = {0}
    if case.backend in {"zero1", "zero2"}:
        model = analytic.spec_from_config(case.config)
        shares = zero_partitioning.partition_contents(
            model.groups, tied=model.tied, world_size=case.world_size
        )
        touched = [share.num_touched for share in shares]
        last = case.world_size - 1
        # A reduction may be the peak of those whose gradients come first, or last.
        ranks |= {1, touched.index(max(touched)), last - 1, last}
    return max(
        footprint.measured(dataclasses.replace(case, rank=rank), timeout_s=LIMIT_S)["total"]
        for rank in ranks
    )


def _both(case: Case) -> int:
    """Measured bytes of the fuller of two processes that talk over gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, footprint.__file__, json.dumps(dataclasses.asdict(case))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{case}\n{said[0][1][-2000:]}\n{said[1][1][-2000:]}")
    return max(json.loads(out.splitlines()[-1])["total"] for out, _ in said)


def _shown(case: Case, total: int) -> float:
    """Print one case; return its error in percent."""
    plan, when = predicted(case)
    error = 100 * (plan / total - 1)
    config = case.config
    zero = (case.deepspeed_config or {}).get("zero_optimization", {})
    words = [
        f"gloo {case.backend}" if case.real else case.backend,
        f"x{case.world_size}",
        f"L{config.get('num_hidden_layers') or config['n_layer']}",
        f"h{config.get('hidden_size') or config['n_embd']}",
        f"V{config['vocab_size']}",
        f"T{case.batch_size}x{case.seq_len}",
        case.precision,
        case.optimizer,
        "tied" if config["tie_word_embeddings"] else "",
        "recompute" if case.activation_checkpointing else "",
        f"accumulate {case.accumulate}" if case.accumulate > 1 else "",
        f"offload {case.offload}" if case.offload != "none" else "",
        " ".join(f"{key.removeprefix('stage3_')[:12]}={value}" for key, value in zero.items()),
    ]
    text = " ".join(filter(None, words))
    print(f"{total / MIB:8.2f} MiB {error:+7.2f} %  {text}  [{when}]")
    return abs(error)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    given = int(sys.argv[1]) if len(sys.argv) > 1 else secrets.randbelow(10**6)
    print(results.table(measured(given)))
