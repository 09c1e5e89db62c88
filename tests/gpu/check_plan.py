"""The planner's memory on a real GPU: run by hand on a machine that has one.

    python tests/gpu/check_plan.py [--backends ddp,fsdp2] [--ranks 2,8] [--json build/plan_gpu.json]

Each case is a process of its own: rank 0 of a fake process group of N ranks with real CUDA
tensors, nbdist's own preparation and its own measurement of the third step (`rank.measure`).
What the fake group lacks is NCCL's memory, so no communicator is predicted here.

Bars, over all cases: tensors median 2 %, max 5 %; the device median 5 %, max 8 %; nothing that
the plan calls fitting with its margin of 5 % needs more. Exit status 1 when one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from footprint import Case, batch_of, fake_group, finished, model_of, optimizer_of

from nbdist import machine
from nbdist.plan import checked
from nbdist.plan.calibration import CUDA_CONTEXT_BYTES, Calibration
from nbdist.plan.choice import MARGIN
from nbdist.plan.models import closed
from nbdist.plan.words import gib
from nbdist.strategies import STRATEGIES, Hardware, Options

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = (2, 4, 8, 64)
STEPS = 4
LIMIT_S = 600
SHAPES = {
    "llama, wide vocabulary": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "llama, deep": {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50_257,
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
BARS = {"tensors": (0.02, 0.05), "device": (0.05, 0.08)}
"""Quantity -> largest median and largest single relative error."""


def main() -> int:
    """Run the cases asked for; print a line for each and the bars."""
    parser = argparse.ArgumentParser(description="hold the plan against a GPU")
    parser.add_argument("--backends", default=",".join(STRATEGIES))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        run_as_rank(Case(**json.loads(asked.case)))
    ranks = [int(one) for one in asked.ranks.split(",")]
    found = list(compared(cases(asked.backends.split(","), ranks)))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    return 0 if holds(found) else 1


def cases(backends: list[str], ranks: list[int]) -> Iterator[tuple[str, Case]]:
    """All shapes under all backends; activation checkpointing on and off in turns."""
    settings = itertools.product(SHAPES, backends, ranks)
    for number, (shape, backend, world_size) in enumerate(settings):
        yield (
            shape,
            Case(
                config=SHAPES[shape],
                backend=backend,
                world_size=world_size,
                batch_size=2,
                seq_len=1024,
                activation_checkpointing=number % 2 == 1,
            ),
        )


def compared(planned: Iterator[tuple[str, Case]]) -> Iterator[dict[str, Any]]:
    """Measure each case and put the prediction beside it."""
    for shape, case in planned:
        figures = measured(case)
        seen = checked.Measured.from_json(figures)
        options = options_of(case)
        spec = closed.from_config(case.config)
        moment = checked.predicted(spec, checked.setup_of(options, case.world_size, seen), seen)
        device = Calibration(context_bytes=CUDA_CONTEXT_BYTES).device_bytes(moment.total)
        row = {
            "shape": shape,
            "case": dataclasses.asdict(case),
            "moment": moment.name,
            "tensors": [moment.total, seen.allocated_bytes],
            "device": [device, seen.device_bytes or device],
            "figures": figures,
        }
        print(line(row), flush=True)
        yield row


def measured(case: Case) -> dict[str, Any]:
    """Run a case as rank 0 of a fake group; what the rank measured of itself."""
    text = json.dumps(dataclasses.asdict(case))
    with tempfile.TemporaryDirectory() as cache:  # what is learned here is of no real cluster
        done = subprocess.run(
            [sys.executable, __file__, "--case", text],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ | {"XDG_CACHE_HOME": cache, "TOKENIZERS_PARALLELISM": "false"},
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{text}\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_as_rank(case: Case) -> None:
    """Prepare and train as a cell does; print the figures and leave."""
    import torch

    with contextlib.redirect_stdout(sys.stderr):
        fake_group(case.world_size)
        from nbdist.rank import accelerator, measure

        late = accelerator.install(options_of(case), hardware_of(case))
        torch.manual_seed(0)
        model = model_of(case).train()
        batch = {name: one.to(late.device) for name, one in batch_of(case, model).items()}
        model, optimizer = late.prepare(model, optimizer_of(case, model))
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model.register_comm_hook(None, finished)
        for _ in range(STEPS):
            out = model(**batch)
            late.backward(out.loss)
            optimizer.step()
            optimizer.zero_grad()
        figures = measure.figures()
    print(json.dumps(figures), flush=True)
    os._exit(0)  # a fake group has nobody to say goodbye to


def options_of(case: Case) -> Options:
    """The session's options for a case."""
    options = Options(
        backend=case.backend,
        precision=case.precision,
        offload=case.offload,
        activation_checkpointing=case.activation_checkpointing,
        accumulate=case.accumulate,
    )
    return options.checked(hardware_of(case))


def hardware_of(case: Case) -> Hardware:
    """The GPU; without one the script can still be tried, for the tensors alone."""
    kind = "cuda" if machine.found().gpus else "cpu"
    return Hardware(kind=kind, bf16=True, world_size=case.world_size)


def line(row: dict[str, Any]) -> str:
    """One case in a line."""
    case, figures = row["case"], row["figures"]
    name = f"{row['shape']}, {case['backend']}, {case['world_size']} ranks"
    name += ", checkpointing" if case["activation_checkpointing"] else ""
    words = [
        f"{what} {gib(row[what][0])} / {gib(row[what][1])} ({error(row, what):+.1%})"
        for what in BARS
    ]
    return f"{name:<52} {', '.join(words)}, reserved {gib(figures.get('reserved_bytes', 0))} GiB"


def error(row: dict[str, Any], what: str) -> float:
    """Relative error of a prediction."""
    predicted, seen = row[what]
    return float((predicted - seen) / seen)


def holds(found: list[dict[str, Any]]) -> bool:
    """Print the bars; whether all hold."""
    good = True
    for what, (median_bar, worst_bar) in BARS.items():
        errors = [abs(error(row, what)) for row in found]
        median, worst = statistics.median(errors), max(errors)
        good &= median <= median_bar and worst <= worst_bar
        print(
            f"{what}: median {median:.2%} (bar {median_bar:.0%}), max {worst:.2%} (bar"
            f" {worst_bar:.0%}), {len(found)} cases"
        )
    false = [row for row in found if row["device"][1] > row["device"][0] * (1 + MARGIN)]
    print(f"false fits with the margin of {MARGIN:.0%}: {len(false)} (bar 0)")
    return good and not false


if __name__ == "__main__":
    sys.exit(main())
