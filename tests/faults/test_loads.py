"""A checkpoint of other ranks and another backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist import Session
from tests.faults import training

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.fault("E11")
@pytest.mark.timeout(120)
def test_another_number_of_ranks_and_another_backend_load_every_bit(tmp_path: Path) -> None:
    with Session(nproc=2, backend="fsdp2") as session:
        session.run(training.MODEL)
        session.run("build(); losses = train(5)")
        expected = session.run("fingerprint()").values[0]
        session.save("two", wait=True, folder=tmp_path)
        session.restart(nproc=1, backend="ddp")
        session.run(training.MODEL)
        session.run("build()")
        assert session.run("fingerprint()").values[0] != expected
        session.load("two", folder=tmp_path)
        assert session.run("fingerprint()").values[0] == expected
        session.run("losses = train(2)")
