"""A rank is killed at random moments of saves; used by tests here and in tests/faults."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from nbdist import RankDied, checkpoint
from nbdist.checkpoint import FolderStorage
from tests.e2e.training import MODEL, START

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist import Session


def kill(session: Session, root: Path, *, kills: int, seed: int) -> list[list[str]]:
    """Kill one rank again and again while all save; returns what was listed after each.

    What is listed is whole, "best" is always among it, and nothing else is left in the end.
    """
    dice, listed = random.Random(seed), []  # noqa: S311 - any moments
    for _ in range(kills):
        session.restart(nproc=2, backend="ddp")
        session.run(MODEL)
        session.run(START.format(""))
        begin = time.monotonic()
        session.save("best", overwrite=True, wait=True, folder=root)
        within_s = 3 * (time.monotonic() - begin)
        moment, victim = dice.uniform(0, within_s), dice.randrange(2)
        with pytest.raises(RankDied):
            session.run(
                "import os, signal, threading\n"
                f"if rank == {victim}:\n"
                f"    threading.Timer({moment}, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
                "for number in range(100_000):\n"
                f"    save('best', overwrite=True, folder={str(root)!r})\n"
                f"    save(f'step-{{number}}', overwrite=True, keep=3, folder={str(root)!r})"
            )
        found = FolderStorage(root).list_checkpoints()
        for one in found:
            checkpoint.verify_files(one.path)
        listed.append([one.name for one in found])
        assert "best" in listed[-1]
    session.restart(nproc=2)
    FolderStorage(root).remove_abandoned()
    assert not [path for path in root.iterdir() if path.name.startswith((".tmp", ".old"))]
    return listed
