"""Whether `--auto` chooses well: each backend's measured step beside the one that the plan prefers.

A case is a drawn model and micro-batch. All backends train it in one session, in turns, so that
the load of the machine affects them alike.

    python benchmarks/plan_choice.py [CASES [SEED]]   # prints a line of JSON for each case
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Case(NamedTuple):
    """A drawn model, its micro-batch, and each backend's predicted and measured step."""

    shape: dict[str, Any]
    batch_size: int
    length: int
    chosen: str
    predicted: dict[str, float]
    ranges: dict[str, tuple[float, float]]
    measured: dict[str, float]

    @property
    def is_good(self) -> bool:
        """True if the choice is nearly the fastest, or simpler within the uncertainty."""
        fastest = min(self.measured, key=lambda name: self.measured[name])
        slower = self.measured[self.chosen] / self.measured[fastest] - 1
        simpler = BACKENDS.index(self.chosen) < BACKENDS.index(fastest)
        return slower <= CLOSE or (simpler and slower <= comparison_uncertainty("cpu"))

    @property
    def inside(self) -> int:
        """Number of step times in the range that the plan shows."""
        bounds = ((*self.ranges[name], self.measured[name]) for name in BACKENDS)
        return sum(low <= seconds <= high for low, high, seconds in bounds)


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
    widths = [high / low for case in found for low, high in case.ranges.values()]
    yield Row(
        name="step times inside the range that was shown",
        value=sum(case.inside for case in found) / len(widths),
        unit=f"of {len(widths)}",
        limit=0.8,
        sense=">=",
        detail=f"high over low is {middle(widths):.1f} (median)",
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
            turns = [(name, timed(session, name, block)) for name in (*BACKENDS, "ddp")]
            for number, (shape, batch_size, length) in enumerate(block):
                plan = nbdist.plan(
                    shape, batch_size=batch_size, seq_len=length, world_size=2, precision="no"
                )
                best = plan.best
                assert best is not None  # small models fit
                costs = {name: plan.row(name).cost for name in BACKENDS}
                yield Case(
                    shape,
                    batch_size,
                    length,
                    best.backend,
                    {name: plan.row(name).step_time_s for name in BACKENDS},
                    {name: cost.range_s for name, cost in costs.items() if cost is not None},
                    {
                        name: middle([times[number] for turn, times in turns if turn == name])
                        for name in BACKENDS
                    },
                )


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
