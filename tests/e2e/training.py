"""A training that tests switch, save and load: the cells, and how results are compared."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from nbdist.strategies import STRATEGIES

if TYPE_CHECKING:
    from nbdist import Session

BACKENDS = list(STRATEGIES)
WRAPPED = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPGPT2LMHeadModel",
    "fsdp1": "FullyShardedDataParallel",
    "zero1": "DeepSpeedEngine",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}
"""Type that `prepare()` must return: Accelerate 1.15 falls back to DDP without a message."""

MODEL = textwrap.dedent(
    """
    import random
    import numpy as np
    from tests.models import gpt2, llama

    def groups(model):
        parameters = list(model.parameters())
        return [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]

    tokens = torch.randint(0, 211, (256, 24), generator=torch.Generator().manual_seed(5))

    def build(model=gpt2, make=torch.optim.AdamW, seed=0, **options):
        accelerator.step = 0
        torch.manual_seed(seed); random.seed(rank); np.random.seed(rank)
        bare = model()
        optimizer = make(groups(bare), **({"lr": 3e-3} | options))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 40))
        loader = torch.utils.data.DataLoader(tokens, batch_size=2, shuffle=True)
        prepared = accelerator.prepare(bare, optimizer, schedule, loader)
        torch.manual_seed(100 + rank)
        return bare, *prepared

    def train(steps):
        global batches
        losses = []
        while len(losses) < steps:
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    optimizer.step(); schedule.step(); optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
                if len(losses) == steps:
                    return losses
            batches = iter(loader)
        return losses
    """
)
START = "bare, model, optimizer, schedule, loader = build({}); batches = iter(loader); train(4)"


def value_of(session: Session, code: str) -> Any:
    """Run a cell and return its value on rank 0."""
    return session.run(code).values[0]


def train_without_switch(session: Session, build: str, steps: int, **options: Any) -> list[float]:
    """Return the losses of the same training without a switch."""
    session.switch("ddp", **{"precision": "no", "clip": None, "accumulate": 1, **options})
    session.run(START.format(build))
    return list(value_of(session, f"train({steps})"))


def max_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest difference between two loss curves."""
    assert len(found) == len(expected)
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
