"""kill -9 and a full disk: the last good checkpoint is always there, and half of one never is."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import small_checkpoints

from nbdist import checkpoint
from nbdist.checkpoint import FolderStorage
from nbdist.checkpoint.durable_io import DurableFile
from nbdist.checkpoint.safetensors_writer import SafetensorsWriter, StoredTensor
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

KILLS = 20


@contextmanager
def files_at_most(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond; like a full disk, for one rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.fault("E1")
@pytest.mark.fault("E2")
def test_kill_at_any_moment(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_savers.py")
    command = [sys.executable, str(script), str(tmp_path / "root"), str(KILLS)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert not shown.returncode, shown.stderr
    found = json.loads(shown.stdout)
    assert len(found["seen"]) == KILLS
    assert found["leftovers"] > KILLS / 4  # kills did hit savers at work
    assert found["hidden"] == []  # and what they left is gone


@pytest.mark.parametrize("limit", [0, 100, 1 << 20, (4 << 20) - 1])
@pytest.mark.fault("E4")
def test_a_full_disk_leaves_no_stump(tmp_path: Path, limit: int) -> None:
    stored = [StoredTensor(name="w", dtype="uint8", shape=(4 << 20,), offsets=(0,))]
    with (
        pytest.raises(OSError, match="File too large") as caught,
        files_at_most(limit),
        SafetensorsWriter("a", stored, DurableFile(tmp_path / "a")) as writer,
    ):
        writer.write(memoryview(bytes(4 << 20)))
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("E4")
def test_a_manifest_without_room_means_no_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "root"
    small_checkpoints.save(root, "a", seed=1)
    draft = FolderStorage(root).begin("a", overwrite=True)
    part = small_checkpoints.write(draft.location / "model-00000-0.safetensors", seed=2)
    with (
        pytest.raises(CheckpointError, match=r"Cannot write .* \(File too large\)"),
        files_at_most(50),
    ):
        draft.commit("a", small_checkpoints.manifest((part,)), overwrite=True)
    draft.abort()
    assert [one.name for one in FolderStorage(root).list_checkpoints()] == ["a"]
    assert checkpoint.verify_files(root / "a").files[0].crc32 != part.crc32
