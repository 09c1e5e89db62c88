"""The traced depth against measurements, on modules that no closed form knows.

A ViT, a mixture of experts and a plain CNN of sizes drawn anew in each run, under FSDP2, DDP
and ZeRO-2 with and without activation checkpointing, each measured by `footprint`.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import footprint
import plan_modules
import results

import nbdist
from nbdist.planner import memory, optimizers
from nbdist.planner.memory.timeline import TrainingSetup, compute_mode
from nbdist.planner.model_spec import Workload
from nbdist.planner.models import traced
from nbdist.strategies import Hardware, Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.model_spec import ModelSpec

WORLD_SIZE = 8
LARGE = {
    "model_type": "olmo2",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "vocab_size": 100352,
}
"""1.48B parameters, of a family without a closed form."""


def measure() -> Iterator[results.Row]:
    """Errors over all cases, and the seconds that a large model takes."""
    seed = random.SystemRandom().randrange(10**6)
    errors: dict[str, float] = {}
    draw = random.Random(seed)  # noqa: S311 - for shapes
    for name, config in drawn(draw).items():
        for case, got in measured(config):
            error = abs(predicted(case) / got - 1)
            label = f"{name} {case.backend}{' checkpointing' * case.activation_checkpointing}"
            errors[label] = 100 * error
            print(f"    {label:32} {got / 2**20:9.1f} MiB, off by {100 * error:.2f} %", flush=True)
    worst = max(errors, key=lambda label: errors[label])
    detail = f"{len(errors)} cases, seed {seed}"
    yield results.Row(
        name="plan: traced, median error",
        value=results.middle(list(errors.values())),
        unit="%",
        limit=3,
        detail=detail,
    )
    yield results.Row(
        name="plan: traced, largest error", value=errors[worst], unit="%", limit=8, detail=worst
    )
    yield seconds()


def seconds() -> results.Row:
    """How long the plan of a large model takes that has to be traced, with all imports."""
    begin = time.monotonic()
    plan = nbdist.plan(LARGE, devices="8xA100-80GB,nvlink", seq_len=2048)
    return results.Row(
        name="plan: of a 1.5B model that is traced",
        value=time.monotonic() - begin,
        unit="s",
        limit=15,
        detail=plan.question.model.name,
    )


def drawn(draw: random.Random) -> dict[str, dict[str, Any]]:
    """A config of each kind."""
    hidden = 64 * draw.randrange(3, 7)
    return {
        "ViT": {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": draw.randrange(5, 13),
            "num_attention_heads": hidden // 64,
            "num_labels": draw.choice([10, 1000]),
            "image_size": 224,
        },
        "mixture of experts": {
            "model_type": draw.choice(["mixtral", "qwen2_moe"]),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": hidden,
            "shared_expert_intermediate_size": 2 * hidden,
            "num_hidden_layers": draw.randrange(4, 9),
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 64,
            "num_local_experts": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 1000 * draw.randrange(4, 33),
            "tie_word_embeddings": False,
        },
        "plain CNN": {
            "model_type": "plain_cnn",
            "widths": [32 * draw.randrange(1, 5), 128, 256, 256],
            "image_size": draw.choice([96, 128, 160]),
            "num_labels": 1000,
            "hidden_size": 256 * draw.randrange(1, 5),
        },
    }


def measured(config: dict[str, Any]) -> Iterator[tuple[footprint.Case, int]]:
    """Run a model under the engines; cases with their peaks in bytes."""
    made = [
        footprint.Case(
            config=config,
            backend=backend,
            world_size=WORLD_SIZE,
            batch_size=4,
            seq_len=256,
            activation_checkpointing=checkpointing,
        )
        for backend in ("fsdp2", "ddp", "zero2")
        for checkpointing in (False, True)
    ]
    fake = [case for case in made if case.backend == "fsdp2"]
    for case, parts in zip(fake, footprint.measured_together(fake), strict=True):
        yield case, parts["total"]
    for case in made:
        if case not in fake:
            yield case, footprint.measured(case)["total"]


def predicted(case: footprint.Case) -> int:
    """What the planner says to a case, in bytes."""
    options = Options(
        backend=case.backend,
        precision=case.precision,
        activation_checkpointing=case.activation_checkpointing,
    ).validate(Hardware(kind="cpu", bf16=True, world_size=case.world_size))
    setup = TrainingSetup(
        options=options,
        world_size=case.world_size,
        optimizer=optimizers.OPTIMIZERS[case.optimizer],
        kind="cpu",
    )
    workload = Workload(
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        compute=compute_mode(setup),
        activation_checkpointing=case.activation_checkpointing,
        kind="cpu",
    )
    return memory.peak_memory(spec_of(case), workload, setup).device_bytes


_specs: dict[str, ModelSpec] = {}


def spec_of(case: footprint.Case) -> ModelSpec:
    """Trace a case's model; once for all its cases."""
    key = str(case.config)
    if key not in _specs:
        own = plan_modules.own(case.config)
        asked: Any = {"batch_size": case.batch_size, "seq_len": case.seq_len, "kinds": ["cpu"]}
        if own is None:
            _specs[key] = traced.trace_config(case.config, progress=lambda _: None, **asked)
        else:
            inputs = plan_modules.batch_for(case.config, own, case.batch_size, case.seq_len)
            _specs[key] = traced.spec_from_module(
                own, inputs=inputs, progress=lambda _: None, **asked
            )
    return _specs[key]


if __name__ == "__main__":
    print(results.table(list(measure())))
