"""kill -9 of a rank at twenty random moments of saves; `make nightly`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist import Session
from tests.e2e import saves_killed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

KILLS = 20


def test_the_last_whole_checkpoint_is_always_there(tmp_path: Path) -> None:
    with Session(nproc=2) as session:
        listed = saves_killed.kill(session, tmp_path / "root", kills=KILLS, seed=0)
    assert len(listed) == KILLS
    assert any(len(names) > 1 for names in listed)
