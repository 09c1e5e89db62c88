"""A training of a second for tests that break it again and again: a cell of the notebook."""

from __future__ import annotations

import textwrap

MODEL = textwrap.dedent(
    """
    from nbdist.worker.training import prepared_models as inside
    from nbdist.worker.training.training_state import ModelAndOptimizerState
    from nbdist.state import tensor_digest as digests

    def build():
        global model, optimizer, done
        torch.manual_seed(0)
        bare = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)
        )
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(bare, optimizer)
        torch.manual_seed(100 + rank)
        done = 0

    def step():
        global done
        sample = torch.Generator().manual_seed(1000 * done + rank)
        batch, target = torch.randn(8, 16, generator=sample), torch.randn(8, 4, generator=sample)
        loss = (model(batch) - target).square().mean()
        accelerator.backward(loss)
        optimizer.step(); optimizer.zero_grad()
        done += 1
        return accelerator.reduce(loss.detach().float(), "mean").item()

    def train(steps):
        return [step() for _ in range(steps)]

    def fingerprint():
        return digests.global_digests(ModelAndOptimizerState(inside.all_models()[0]).owned_shards())
    """
)
"""Defines build(), step(), train(steps) and fingerprint(); its losses depend on `done` alone."""

TRAPPED = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)

    def named_parameters(self, *args, **kwargs):
        if trap is not None:
            spring()
        return super().named_parameters(*args, **kwargs)

model = Net()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
"""
"""A model that calls spring() in the middle of a save, load or switch while `trap` is set."""
