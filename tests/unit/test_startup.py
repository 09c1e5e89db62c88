"""How long a start waits for signs of launcher and ranks."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from nbdist import StartError
from nbdist.session import startup


@pytest.mark.fault("A3")
@pytest.mark.parametrize(("warm", "said"), [(False, 9), (True, 3)])
def test_imports_may_take_longer_than_ranks(
    warm: bool,  # noqa: FBT001 - a parameter of the test
    said: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "PROGRESS_INTERVAL_S", 0.01)
    monkeypatch.setattr(startup, "START_TIMEOUT_S", 0.03)
    monkeypatch.setattr(startup, "IMPORT_TIMEOUT_S", 0.09)
    monkeypatch.setattr(startup.stacks, "startup_stacks", lambda _workers: "")
    workers = SimpleNamespace(
        startup_events=SimpleQueue(), rank_exits=[], is_warm=warm, log_excerpt=str
    )
    lines: list[str] = []
    waiting = startup.RankStartup(workers, 2, lines.append)  # type: ignore[arg-type]
    with pytest.raises(StartError, match="No message"):
        waiting._next_sign()
    assert len(lines) == pytest.approx(said, abs=1)
