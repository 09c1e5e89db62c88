"""The planner's peak against torch's allocator, for every backend, on cases drawn in each run.

Llama, GPT-2, Qwen, an encoder, an encoder-decoder, a vision model and a plain module; adapters,
quantized weights, tied heads, checkpointing, accumulation, clipping, offload; outputs kept or
dropped. `footprint` measures; where ranks differ, all of them, and the fullest counts.

    python benchmarks/plan_memory.py [--seed N] [--cases 40] [--backend fsdp2] [--kind cuda]
        [--write]

`--write` stores the distribution of the errors in the table from which nbdist takes its margin.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import footprint
import results
from footprint import Case

import nbdist
from nbdist.errors import PlanError
from nbdist.launcher import offload_setup
from nbdist.strategies import Hardware, Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.planner.model_spec import ModelSpec
    from nbdist.planner.plan_types import PlanRow

CASES = 8
"""Of each backend in `make bench`."""
PROCESSES = max(2, (os.cpu_count() or 1) // 2)
MIB = 2**20
BACKENDS = ("ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")
UNEVEN = ("fsdp1", "zero1", "zero2")
"""Backends whose ranks hold different amounts."""
CONVOLUTIONS = ("vit", footprint.PLAIN)
TRACED_BATCHES = (2, 1, 3, 4)
"""Batch sizes that one trace covers; it is made for the first."""


@dataclass(frozen=True)
class Result:
    """A case, what was measured, and what was planned."""

    case: Case
    peak: footprint.Peak
    row: PlanRow

    @property
    def planned(self) -> int:
        """Planned bytes; a CPU rank has device and host in one memory."""
        return self.row.allocated_bytes + self.row.host_bytes

    @property
    def error(self) -> float:
        """Relative error of the plan in percent; above 0 is too high."""
        return 100 * (self.planned / self.peak.num_bytes - 1)

    @property
    def moment(self) -> str:
        """Planned moment of the peak without its block: "backward of block"."""
        return self.row.peak_moment.rstrip("0123456789 ")


def measure() -> Iterator[results.Row]:
    """Errors of a few cases of each backend."""
    yield from rows(compare(secrets.randbelow(10**6), CASES, BACKENDS))


def compare(seed: int, count: int, backends: Sequence[str], kind: str = "cpu") -> list[Result]:
    """Draw, measure, plan, and show every case."""
    begin, found = time.monotonic(), []
    print(f"==> plan_memory: seed {seed}, {count} cases of each of {', '.join(backends)}")
    build_ops(kind)
    for backend in backends:
        rng = random.Random(f"{seed} {backend}")  # noqa: S311 - reproducible, not secret
        cases = [draw(rng, seed, backend, number, kind) for number in range(count)]
        with ThreadPoolExecutor(PROCESSES) as pool:
            for case, peak in zip(cases, pool.map(fullest, cases), strict=True):
                found.append(Result(case, peak, planned(case)))
                print(_line(found[-1]), flush=True)
    print(f"==> plan_memory: {time.monotonic() - begin:.0f} s\n{summary(found)}")
    return found


def build_ops(kind: str) -> None:
    """Compile DeepSpeed's ops for an offload, so that no case waits for minutes."""
    hardware = Hardware(kind=kind, bf16=True, world_size=2)
    options = Options(backend="zero2", offload="cpu").validate(hardware)
    ops = options.strategy.required_ops(options)
    offload_setup.build_missing_ops(ops, progress=lambda text: print(text, file=sys.stderr))


def rows(found: Sequence[Result]) -> Iterator[results.Row]:
    """Median, 95th percentile, largest error and the lowest plan of each backend."""
    for backend, errors in _grouped(found, "backend").items():
        sizes = sorted(map(abs, errors))
        for what, value, bar in (
            ("median", statistics.median(sizes), 0.5),
            ("95th percentile", _quantile(sizes, 0.95), 2),
            ("largest", sizes[-1], 5),
            ("too low by", max(0.0, -min(errors)), 2),
        ):
            yield results.Row(
                name=f"planned peak, {backend}: {what}",
                value=value,
                unit="%",
                limit=bar,
                detail=f"{len(sizes)} cases against the allocator",
            )


def summary(found: Sequence[Result]) -> str:
    """Errors by backend and by moment, as the table of docs/planner.md."""
    lines = ["| | cases | median | 95 % below | lowest | highest |", "|---|---|---|---|---|---|"]
    for key in ("backend", "moment", "model"):
        for name, errors in sorted(_grouped(found, key).items()):
            sizes = sorted(map(abs, errors))
            lines.append(
                f"| {name} | {len(sizes)} | {statistics.median(sizes):.2f} % |"
                f" {_quantile(sizes, 0.95):.2f} % | {min(errors):+.2f} % | {max(errors):+.2f} % |"
            )
    return "\n".join(lines)


def write_shortfalls(found: Sequence[Result]) -> None:
    """Write how far peaks exceeded the plan into nbdist, for the margin of later plans.

    Convolutions are left out: their workspace on a CPU is oneDNN's, not a GPU's.
    """
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in [one for one in found if one.case.config["model_type"] not in CONVOLUTIONS]:
        depth = _spec(one.case).depth
        # Few cases are traced, so those of all backends count together.
        backend = one.case.backend if depth == "closed form" else ""
        errors[backend, depth].append(one.peak.num_bytes / one.planned - 1)
    shortfalls: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (backend, depth), shares in sorted(errors.items()):
        share = max(0.0, _quantile(sorted(shares), 0.95))
        shortfalls[backend][depth] = [len(shares), round(share, 4)]
    results.write_prediction_errors("memory", shortfalls)


def _grouped(found: Sequence[Result], key: str) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = defaultdict(list)
    for one in found:
        names = {"backend": f"`{one.case.backend}`", "moment": one.moment}
        names["model"] = one.case.config["model_type"]
        errors[names[key]].append(one.error)
    return errors


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def fullest(case: Case) -> footprint.Peak:
    """Measure the fullest rank."""
    ranks = range(case.world_size) if case.backend in UNEVEN else [0]
    return max(footprint.measured(replace(case, rank=rank)) for rank in ranks)


# -- drawing ---------------------------------------------------------------------------------


def draw(rng: random.Random, seed: int, backend: str, number: int, kind: str) -> Case:
    """Return one training setup: half of them decoders, then other models, then adapters."""
    case = Case(
        config={},
        backend=backend,
        world_size=rng.choice([2, 2, 3, 4] if backend in UNEVEN else [2, 3, 4, 8, 16, 64]),
        batch_size=rng.choice(TRACED_BATCHES),
        seq_len=rng.choice([64, 128, 256]),
        precision=rng.choice(["bf16", "bf16", "bf16", "no"]),
        activation_checkpointing=rng.random() < 0.35,
        accumulate=rng.choice([1, 1, 1, 2, 4]),
        clip=rng.choice([None, 1.0]),
        optimizer=rng.choice(["adamw", "adamw", "adamw", "adamw_fused", "sgd"]),
        keep_outputs=rng.random() < 0.6,
        fsdp_config=_fsdp_config(rng, backend),
        kind=kind,
    )
    if number % 4 == 1:
        case = _traced(rng, case, _traced_models(seed))
    elif number % 8 == 3:
        case = _adapted(rng, case, number // 8)
    else:
        case = replace(case, config=rng.choice([_llama, _llama, _gpt2])(rng))
    if not backend.startswith("zero"):
        return case
    zero = _zero_config(rng, backend, num_params(case))
    offload = "cpu" if rng.random() < 0.15 and case.optimizer == "adamw" else "none"
    return replace(case, deepspeed_config={"zero_optimization": zero}, offload=offload)


def _fsdp_config(rng: random.Random, backend: str) -> dict[str, Any] | None:
    if rng.random() < 0.75 or not backend.startswith("fsdp"):
        return None
    kept = {"reshard_after_forward": False}
    return kept if backend == "fsdp2" else {"sharding_strategy": "SHARD_GRAD_OP"}


def _zero_config(rng: random.Random, backend: str, params: int) -> dict[str, Any]:
    """Sizes of the model's own order of magnitude; some stay default."""

    def size(low: float, high: float) -> int:
        return round(params * low * (high / low) ** rng.random())

    # DeepSpeed's default is 1 GB of bucket, beside which a small model would not be seen.
    zero: dict[str, Any] = {"reduce_bucket_size": size(0.01, 1)}
    if backend != "zero3":
        return zero | {"overlap_comm": rng.random() < 0.3}
    return zero | {
        "stage3_param_persistence_threshold": rng.choice([0, 1000, 100_000]),
        "stage3_max_live_parameters": rng.choice([size(0.1, 1), 1_000_000_000]),
        "stage3_max_reuse_distance": rng.choice([size(0.1, 1), 1_000_000_000]),
        "stage3_prefetch_bucket_size": rng.choice([size(0.02, 0.5), 50_000_000]),
    }


def _vocab(rng: random.Random) -> int:
    """From 500 to 16,000; small ones as often as large ones."""
    return round(500 * 32 ** rng.random())


def _llama(rng: random.Random) -> dict[str, Any]:
    head_dim, groups = rng.choice([32, 64]), rng.choice([1, 2])
    heads = groups * rng.randint(4 // groups, 8 // groups)
    hidden = head_dim * heads
    return {
        "model_type": rng.choice(["llama", "mistral", "qwen2", "qwen3"]),
        "hidden_size": hidden,
        "intermediate_size": 16 * round(hidden * rng.uniform(2, 4) / 16),
        "num_hidden_layers": rng.randint(2, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups,
        "head_dim": head_dim,
        "vocab_size": _vocab(rng),
        "tie_word_embeddings": rng.random() < 0.4,
    }


def _gpt2(rng: random.Random) -> dict[str, Any]:
    heads, dropout = rng.randint(4, 12), rng.choice([0.0, 0.1])
    return {
        "model_type": "gpt2",
        "n_embd": heads * 32,
        "n_head": heads,
        "n_layer": rng.randint(2, 5),
        "n_positions": 256,
        "vocab_size": _vocab(rng),
        "tie_word_embeddings": rng.random() < 0.7,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@cache
def _traced_models(seed: int) -> list[dict[str, Any]]:
    """Models of which a run has one each, since a trace takes seconds."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    hidden = 64 * rng.randint(2, 5)
    wide, layers = {"hidden_size": hidden, "intermediate_size": 4 * hidden}, rng.randint(3, 5)
    heads = {"num_hidden_layers": layers, "num_attention_heads": hidden // 32}
    return [
        {
            "model_type": "bert",
            "architectures": [
                rng.choice(["BertForMaskedLM", "BertForSequenceClassification"]),
            ],
            "vocab_size": _vocab(rng),
            **wide,
            **heads,
        },
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": hidden,
            "d_ff": 4 * hidden,
            "d_kv": 32,
            "num_heads": hidden // 32,
            "num_layers": layers,
            "vocab_size": _vocab(rng),
            "tie_word_embeddings": rng.random() < 0.5,
            "decoder_start_token_id": 0,
        },
        {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "num_labels": rng.choice([10, 1000]),
            "image_size": rng.choice([64, 128]),
            **wide,
            **heads,
        },
        {
            "model_type": footprint.PLAIN,
            "widths": [32 * rng.randint(1, 4), 128, 256],
            "picture": rng.choice([32, 64]),
            "classes": 1000,
            "hidden": 256 * rng.randint(1, 4),
        },
    ]


def _traced(rng: random.Random, case: Case, models: Sequence[dict[str, Any]]) -> Case:
    """A model that is traced, with one sequence length."""
    return replace(case, config=rng.choice(models), seq_len=64)


def _adapted(rng: random.Random, case: Case, number: int) -> Case:
    """LoRA on a Llama-like model, quantized in every way that the backend supports in turn."""
    methods = {
        "fsdp1": [None],
        "fsdp2": ["nf4", "nf4-bf16", None],
        "zero3": ["nf4", None],
    }.get(case.backend, ["nf4", "int8", None])
    config = _llama(rng) | {"tie_word_embeddings": False, "head_dim": 64}
    heads = config["num_attention_heads"]
    config |= {"hidden_size": 64 * heads, "intermediate_size": 64 * rng.randint(heads, 4 * heads)}
    return replace(
        case,
        config=config,
        precision="bf16",
        dtype="float32" if case.backend == "fsdp1" else "bfloat16",
        accumulate=1,
        lora=rng.choice([4, 8, 16]),
        target_modules=rng.choice([None, "all-linear", ["q_proj", "k_proj", "down_proj"]]),
        quantize=methods[number % len(methods)],
        fused_loss=rng.random() < 0.25 and case.backend != "zero3",
        fsdp_config=None,
    )


# -- planning --------------------------------------------------------------------------------


def planned(case: Case) -> PlanRow:
    """Return the row of nbdist.plan for a case.

    Raises:
        PlanError: the planner refuses it.
    """
    fixed: dict[str, Any] = {"backend": case.backend, "accumulate": case.accumulate}
    given = ("clip", "fsdp_config", "deepspeed_config", "offload")
    fixed |= {name: value for name in given if (value := getattr(case, name)) is not None}
    plan = nbdist.plan(
        _spec(case),
        devices=f"{case.world_size}x{'cpu' if case.kind == 'cpu' else '80GB'}",
        batch_size=case.batch_size,
        seq_len=None if case.config["model_type"] in CONVOLUTIONS else case.seq_len,
        precision=case.precision,
        optimizer=case.optimizer,
        keep_outputs=case.keep_outputs,
        **fixed,
    )
    (row,) = [
        row
        for row in plan.rows
        if row.options.activation_checkpointing == case.activation_checkpointing
        and row.options.fsdp_config == case.fsdp_config
        and not row.options.offload_params
    ]
    if row.cost is None:
        raise PlanError(row.why)
    return row


def num_params(case: Case) -> int:
    """Return the parameters of a case's model."""
    from nbdist.planner.model_spec import num_params

    return num_params(_spec(case))


_specs: dict[str, ModelSpec] = {}


def _spec(case: Case) -> ModelSpec:
    """Return what the planner knows of a case's model; one trace serves all cases of a model."""
    keys = ("config", "precision", "dtype", "lora", "target_modules", "quantize", "fused_loss")
    key = json.dumps([getattr(case, name) for name in keys])
    if key not in _specs:
        given: dict[str, Any] = {}
        model: Any = case.config | {"dtype": case.dtype}
        if case.fused_loss:  # recognized in the module
            model = footprint.model_of(case)
        elif case.config["model_type"] == footprint.PLAIN:
            model = footprint.model_of(case)
            given = {
                "inputs": footprint.batch_of(replace(case, batch_size=TRACED_BATCHES[0]), model)
            }
        elif case.lora:
            given = {"lora": case.lora, "target_modules": case.target_modules}
            given["quantize"] = case.quantize
        plan = nbdist.plan(
            model,
            devices=f"2x{'cpu' if case.kind == 'cpu' else '80GB'}",
            batch_size=TRACED_BATCHES[0],
            seq_len=None if "inputs" in given else case.seq_len,
            precision=case.precision,
            **given,
        )
        _specs[key] = plan.question.model
    return _specs[key]


def _line(one: Result) -> str:
    case, config = one.case, one.case.config
    shape = {
        "h": config.get("hidden_size") or config.get("n_embd") or config.get("d_model"),
        "L": config.get("num_hidden_layers") or config.get("n_layer") or config.get("num_layers"),
        "V": config.get("vocab_size"),
    }
    zero = (case.deepspeed_config or {}).get("zero_optimization", {})
    flags = [
        case.quantize,
        f"lora {case.lora}" if case.lora else "",
        "fused loss" if case.fused_loss else "",
        "tied" if config.get("tie_word_embeddings", False) else "",
        "recompute" if case.activation_checkpointing else "",
        f"accumulate {case.accumulate}" if case.accumulate > 1 else "",
        "clip" if case.clip else "",
        "kept" if case.keep_outputs else "dropped",
        "offload" if case.offload != "none" else "",
        case.precision,
        case.optimizer,
        "no reshard" if case.fsdp_config else "",
        *(f"{name.removeprefix('stage3_')[:10]}={value}" for name, value in zero.items()),
    ]
    sizes = " ".join(f"{name}{value}" for name, value in shape.items() if value)
    return (
        f"{one.error:+7.2f} % {one.peak.num_bytes / MIB:8.2f} MiB {case.backend:5}"
        f" x{case.world_size:<2} {config['model_type']:9} {sizes:16}"
        f" {case.batch_size}x{case.seq_len:<3} {' '.join(filter(None, flags))}"
        f" [{one.row.peak_moment}; {one.peak.phase}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="planned peaks against torch's allocator")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--cases", type=int, default=CASES, help="of each backend")
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--write", action="store_true", help="store the errors in nbdist")
    asked = parser.parse_args()
    found = compare(asked.seed, asked.cases, asked.backend or BACKENDS, asked.kind)
    print(results.table(rows(found)))
    if asked.write:
        write_shortfalls(found)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
