"""What the ranks say to each other in the folder of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import saved

from nbdist import checkpoint
from nbdist.checkpoint import TensorMetadata
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    return checkpoint.create_draft(tmp_path / "root", "name")


def key(digest: int) -> TensorMetadata:
    return TensorMetadata(shape=(3, 4), dtype="float32", digest=digest)


def test_parts_of_a_tensor_add_up(tmp: Path) -> None:
    parts = [saved.write(tmp / f"model-0000{rank}-0.safetensors") for rank in range(2)]
    checkpoint.write_report(tmp, 0, parts[:1], keys={"model.w": key(2**64 - 1), "model.v": key(5)})
    checkpoint.write_report(tmp, 1, parts[1:], keys={"model.w": key(3)})
    told = [checkpoint.read_report(tmp, rank) for rank in range(2)]
    both = [one for one in told if one is not None]
    assert [one.files for one in both] == [(parts[0],), (parts[1],)]
    assert checkpoint.merge_tensors(both) == {"model.w": key(2), "model.v": key(5)}
    assert checkpoint.collect_files(tmp, 2) == tuple(parts)


def test_half_of_what_a_rank_says_is_nothing(tmp: Path) -> None:
    assert checkpoint.read_report(tmp, 0) is None
    checkpoint.write_report(tmp, 0, [], keys={"model.w": key(1)})
    path = tmp / "part-00000.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert checkpoint.read_report(tmp, 0) is None


def test_a_rank_says_why_it_failed(tmp: Path) -> None:
    checkpoint.write_failure(tmp, 1, "rank 1 cannot write:\n\0no room" + "x" * 5000)
    told = checkpoint.read_report(tmp, 1)
    assert told is not None
    assert told.error.startswith("rank 1 cannot write:  no room")
    with pytest.raises(CheckpointError, match="rank 0, 1"):
        checkpoint.collect_files(tmp, 2)


def test_where_there_is_no_room_for_words_a_name_says_it(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp), "write_text", full)
    checkpoint.write_failure(tmp, 1, "anything")
    told = checkpoint.read_report(tmp, 1)
    assert told is not None
    assert told.error == "rank 1 cannot write there (No space left on device, errno 28)"


def test_what_was_cut_short_is_tidied_once_its_process_is_gone(tmp: Path) -> None:
    checkpoint.remove_abandoned(tmp.parent)
    assert tmp.exists()  # this process lives
    (tmp / ".owner.json").unlink()
    checkpoint.remove_abandoned(tmp.parent)
    assert not tmp.exists()
