"""kill -9 of a rank at twenty random moments of saves; `make nightly`."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from nbdist import RankDied, Session, checkpoint
from nbdist.checkpoint import FolderStorage
from tests.e2e.training import MODEL, START

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

KILLS = 20


def test_the_last_whole_checkpoint_is_always_there(tmp_path: Path) -> None:
    """What is listed is whole, "best" is always among it, and nothing else is left in the end."""
    root = tmp_path / "root"
    dice, listed = random.Random(0), []  # noqa: S311 - any moments
    with Session(nproc=2) as session:
        for _ in range(KILLS):
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
                    "    killed = os.getpid(), signal.SIGKILL\n"
                    f"    threading.Timer({moment}, os.kill, killed).start()\n"
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
    assert any(len(names) > 1 for names in listed)
