"""An offload to NVMe comes and goes in the middle of training; here the disk is any folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from nbdist import Session
from nbdist.errors import NbdistError
from tests.e2e.training import max_difference, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)

# DeepSpeed offloads what has at least 1 MiB on a rank: 4.6 MiB here.
MODEL = """
def begin():
    torch.manual_seed(0)
    layers = torch.nn.Linear(900, 800), torch.nn.ReLU(), torch.nn.Linear(800, 600)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator.prepare(model, optimizer)

draw = torch.Generator().manual_seed(rank)
x, y = torch.randn(8, 900, generator=draw), torch.randn(8, 600, generator=draw)

def train(steps):
    found = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found

def on_disk():
    zero = model.optimizer
    return [not master.numel() for master in zero.fp32_partitioned_groups_flat]
"""


@pytest.fixture
def trained() -> Iterator[Session]:
    with Session(nproc=2, backend="fsdp2", precision="no") as session:
        session.run(MODEL)
        yield session


def test_state_on_disk_is_carried_saved_and_pulled(trained: Session, tmp_path: Path) -> None:
    trained.run("model, optimizer = begin()")
    straight = value_of(trained, "train(9)")
    trained.run("model, optimizer = begin()")
    found = value_of(trained, "train(2)")
    try:
        there = trained.switch("zero3", offload=f"nvme:{tmp_path / 'disk'}")
    except NbdistError as error:
        if "libaio.h is missing" in str(error):
            pytest.skip(str(error))
        raise
    assert there.verified == 12
    found += value_of(trained, "train(2)")
    assert value_of(trained, "on_disk()") == [True]
    trained.save("middle", folder=tmp_path).wait(60)
    pulled = trained.pull("model")
    found += value_of(trained, "train(1)")
    trained.load("middle", folder=tmp_path)
    again = trained.pull("model")
    assert all(torch.equal(pulled[name], again[name]) for name in pulled)
    found[-1:] = value_of(trained, "train(2)")
    back = trained.switch("fsdp2", offload="none")
    assert back.verified == 12
    found += value_of(trained, "train(3)")
    assert max_difference(found, straight) < 1e-5  # another AdamW: DeepSpeed's, on the CPU
