"""The saves of a long session, as the notebook's kernel hears of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.session import checkpoints

if TYPE_CHECKING:
    from pathlib import Path

MANY = 3 * checkpoints.MAX_FINISHED_SAVES


def saved(root: Path, number: int, **given: Any) -> Any:
    base = {"id": f"{number:08x}", "root": str(root), "name": f"step-{number}"}
    return base | {"seconds": 0.1, "pause_s": 0.0, "size_bytes": 8} | given


def test_a_session_does_not_grow_with_its_saves(tmp_path: Path) -> None:
    saves = checkpoints.BackgroundSaves(tmp_path)
    first = saved(tmp_path, 0, state="running")
    saves.update_status(first)
    for number in range(1, MANY):
        saves.update_status(saved(tmp_path, number, state="running"))
        saves.update_status(saved(tmp_path, number, state="failed", error="the disk is full"))
    assert len(saves.checkpoints.failed_saves) == checkpoints.MAX_FINISHED_SAVES
    assert len(saves._saves) == checkpoints.MAX_FINISHED_SAVES + 1
    assert [save.name for save in saves.running_saves()] == ["step-0"]
    saves.update_status(first | {"state": "failed", "error": "the session was stopped"})
    assert saves.checkpoints.failed_saves[-1].name == "step-0"
    assert not saves.running_saves()
