"""Whether `--auto` chooses well: each backend's measured step beside the planned ones.

A case is a drawn model and micro-batch. Steps are planned by the catalog, and after
`Session.calibrate`. All backends train it in one session, in turns, so that the load of the
machine affects them alike.

    python benchmarks/plan_choice.py [CASES [SEED]]   # prints a line of JSON for each case
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import statistics
import sys
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from results import Row, middle

import nbdist
from nbdist.planner.prediction_errors import comparison_uncertainty

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CASES = 30
BACKENDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
BLOCK = 6
"""Cases that are measured in turns; a switch of the backend takes seconds."""
CLOSE = 0.05
"""Fraction by which a choice may be slower than the fastest."""
BUILD = """
import time
import torch.distributed
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

def build(shape, batch_size, length):
    torch.manual_seed(0)
    shape = dict(shape)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    bare = AutoModelForCausalLM.from_config(config).train()
    data = list(torch.randint(0, config.vocab_size, (64 * batch_size, length)))
    loader = DataLoader(data, batch_size=batch_size)
    return accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-4), loader)

def step_s(count):
    ends = []
    for ids in loader:
        torch.distributed.barrier()
        begin = time.perf_counter()
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter() - begin)
        if len(ends) == count + 2:
            return sorted(ends[2:])[count // 2]
"""


class Prediction(NamedTuple):
    """A step time as the plan shows it."""

    seconds: float
    uncertainty: float
    low: float
    high: float


class Case(NamedTuple):
    """A drawn model, its micro-batch, and each backend's predicted and measured step."""

    shape: dict[str, Any]
    batch_size: int
    length: int
    chosen: str
    catalog: dict[str, Prediction]
    calibrated: dict[str, Prediction]
    measured: dict[str, float]

    @property
    def is_good(self) -> bool:
        """True if the choice is nearly the fastest, or simpler within the uncertainty."""
        fastest = min(self.measured, key=lambda name: self.measured[name])
        slower = self.measured[self.chosen] / self.measured[fastest] - 1
        simpler = BACKENDS.index(self.chosen) < BACKENDS.index(fastest)
        return slower <= CLOSE or (simpler and slower <= comparison_uncertainty("cpu"))


def measure() -> Iterator[Row]:
    """Rows about the choices and the step times of drawn cases."""
    found = list(cases(CASES, random.randrange(10**6)))  # noqa: S311 - a draw
    yield Row(
        name="choices within 5 % of the fastest, or simpler within the doubt",
        value=sum(case.is_good for case in found),
        unit=f"of {CASES}",
        limit=CASES,
        sense=">=",
        detail=f"a comparison is uncertain by {comparison_uncertainty('cpu'):.0%}",
    )
    off = {}
    for source in ("catalog", "calibrated"):
        pairs = [
            (one, case.measured[name])
            for case in found
            for name, one in getattr(case, source).items()
        ]
        off[source] = statistics.mean(
            abs(math.log(one.seconds / seconds)) for one, seconds in pairs
        )
        width = middle([one.high / one.low for one, _ in pairs])
        yield Row(
            name=f"step times inside the range that was shown, {source}",
            value=sum(one.low <= seconds <= one.high for one, seconds in pairs) / len(pairs),
            unit=f"of {len(pairs)}",
            limit=0.8,
            sense=">=",
            detail=f"high over low is {width:.1f} (median)",
        )
    yield Row(
        name="planned step time, calibrated: error to the catalog's",
        value=off["calibrated"] / off["catalog"],
        unit="x",
        limit=1,
        detail=", ".join(f"{name} off by {math.exp(error):.2f}" for name, error in off.items()),
    )


def drawn(dice: random.Random) -> tuple[dict[str, Any], int, int]:
    """A model, samples per micro-batch and tokens per sample."""
    hidden, layers = dice.choice([64, 128, 192, 256, 384, 512]), dice.randint(2, 6)
    vocab = dice.choice([256, 1024, 4096])
    batch_size, length = dice.choice([1, 2, 4, 8]), dice.choice([16, 32, 64, 128])
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": vocab,
    }
    llama = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": vocab,
        "tie_word_embeddings": dice.random() < 0.5,
    }
    return dice.choice([gpt2, llama]), batch_size, length


def cases(count: int, seed: int) -> Iterator[Case]:
    """Draw and measure cases, `BLOCK` at a time under each backend, ddp first and last."""
    dice = random.Random(seed)  # noqa: S311 - a draw
    with nbdist.Session(nproc=2, precision="no", backend="ddp") as session:
        session.run(BUILD, output="none")
        for begin in range(0, count, BLOCK):
            block = [drawn(dice) for _ in range(min(BLOCK, count - begin))]
            with (
                tempfile.TemporaryDirectory() as cache,  # without earlier measurements
                mock.patch.dict(os.environ, XDG_CACHE_HOME=cache),
            ):
                by_catalog = [planned(*case) for case in block]
                turns = [(name, timed(session, name, block)) for name in (*BACKENDS, "ddp")]
                with contextlib.redirect_stdout(io.StringIO()):
                    session.calibrate()
                by_calibration = [planned(*case) for case in block]
            plans = zip(block, by_catalog, by_calibration, strict=True)
            for number, (case, (chosen, catalog), (_, calibrated)) in enumerate(plans):
                measured = {
                    name: middle([times[number] for turn, times in turns if turn == name])
                    for name in BACKENDS
                }
                yield Case(*case, chosen, catalog, calibrated, measured)


def planned(
    shape: dict[str, Any], batch_size: int, length: int
) -> tuple[str, dict[str, Prediction]]:
    """The choice, and the step of each backend."""
    plan = nbdist.plan(shape, batch_size=batch_size, seq_len=length, world_size=2, precision="no")
    costs = {name: plan.row(name).cost for name in BACKENDS}
    assert plan.best is not None  # small models fit
    return plan.best.backend, {
        name: Prediction(cost.step_time_s, cost.uncertainty, *cost.range_s)
        for name, cost in costs.items()
        if cost is not None
    }


def timed(
    session: nbdist.Session, name: str, block: Sequence[tuple[dict[str, Any], int, int]]
) -> list[float]:
    """Seconds of a step of each case under one backend, on the slower rank."""
    session.run("model = optimizer = loader = None", output="none")
    with contextlib.redirect_stdout(io.StringIO()):
        session.switch(name)
    code = "model, optimizer, loader = build({!r}, {}, {})\nstep_s(6)"
    ran = [session.run(code.format(*case), output="none") for case in block]
    return [float(max(one.values.values())) for one in ran]


def main() -> None:
    """Print each case."""
    count, seed = (int(word) for word in [*sys.argv[1:], *("30", "1")[len(sys.argv) - 1 :]])
    for case in cases(count, seed):
        print(json.dumps(case._asdict()), flush=True)


if __name__ == "__main__":
    main()
