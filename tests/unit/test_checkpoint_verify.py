"""A checkpoint that is not what was written is named, before any of it is used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import small_checkpoints

from nbdist import checkpoint
from nbdist.checkpoint import CheckpointReader, FolderStorage
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILE = "model-00000-0.safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return small_checkpoints.save(tmp_path / "root", "a")


def test_what_was_written_is_good(path: Path) -> None:
    values: list[int] = []
    manifest = checkpoint.verify_files(path, on_progress=values.append)
    assert manifest.step == 7
    assert values == sorted(values)
    assert values[-1] == sum(one.size_bytes for one in manifest.files)
    assert checkpoint.verify_files(path, files=[]) == checkpoint.verify_files(path, files=[FILE])


@pytest.mark.parametrize(
    "damage", small_checkpoints.DAMAGE.values(), ids=small_checkpoints.DAMAGE.keys()
)
@pytest.mark.fault("E6")
def test_damage_is_found_and_named(path: Path, damage: Callable[[bytes], bytes]) -> None:
    content = (path / FILE).read_bytes()
    (path / FILE).write_bytes(damage(content))
    with pytest.raises(CheckpointError, match=FILE):
        checkpoint.verify_files(path)


@pytest.mark.fault("E7")
def test_every_byte_counts(path: Path) -> None:
    content = (path / FILE).read_bytes()
    for at in range(0, len(content), 97):
        bad = bytearray(content)
        bad[at] ^= 1 << (at % 8)
        (path / FILE).write_bytes(bad)
        with pytest.raises(CheckpointError, match="Checksum mismatch"):
            checkpoint.verify_files(path)
        checkpoint.verify_files(path, files=[])


def test_ranks_share_the_work() -> None:
    files = tuple(
        checkpoint.CheckpointFile(name=f"f{n}", size_bytes=size, crc32=0)
        for n, size in enumerate([5, 100, 40, 30, 30, 1])
    )
    shares = [
        checkpoint.files_for_rank(small_checkpoints.manifest(files), rank, 3) for rank in range(3)
    ]
    assert sum(map(len, shares)) == 6
    assert set.union(*shares) == {file.name for file in files}
    assert checkpoint.files_for_rank(small_checkpoints.manifest(), 0, 2) == set()


@pytest.mark.parametrize("kind", ["missing", "link", "fifo", "folder"])
@pytest.mark.fault("E8")
def test_a_file_that_is_none_is_named(path: Path, kind: str) -> None:
    file = path / FILE
    file.rename(path.parent / "aside")
    if kind == "link":
        file.symlink_to(path.parent / "aside")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    with pytest.raises(CheckpointError, match=rf"Cannot open .*{FILE}"):
        checkpoint.verify_files(path)
    assert FolderStorage(path.parent).list_checkpoints() == []


@pytest.mark.fault("E8")
def test_a_file_too_many_is_named(path: Path) -> None:
    (path / "<img src=x>.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    with pytest.raises(
        CheckpointError, match=r"contains '<img src=x>\.pkl', which was not written"
    ):
        checkpoint.verify_files(path)
    assert [one.name for one in FolderStorage(path.parent).list_checkpoints()] == ["a"]


@pytest.mark.parametrize("kind", ["nothing", "file", "empty folder", "foreign folder"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("")
    elif kind != "nothing":
        path.mkdir()
        if kind == "foreign folder":
            (path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match="not a complete nbdist checkpoint"):
        checkpoint.verify_files(path)


def test_an_open_checkpoint_stays_the_same_one(tmp_path: Path) -> None:
    root = tmp_path / "root"
    small_checkpoints.save(root, "a", seed=1)
    with CheckpointReader.open_folder(root / "a") as opened:
        before = opened.manifest
        small_checkpoints.save(root, "a", seed=2, overwrite=True)
        fd = opened.open_file(before.files[0])  # of the old one, which lives on under no name
        fd.close()
        with FolderStorage(root).open_checkpoint("a") as (_, new):
            assert new.id != before.id
        assert len([path for path in root.iterdir() if path.name.startswith(".old")]) == 1
    small_checkpoints.save(root, "b")  # nobody reads it now
    assert not [path for path in root.iterdir() if path.name.startswith(".old")]
