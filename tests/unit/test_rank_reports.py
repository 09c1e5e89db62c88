"""What the ranks say to each other in the folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_checkpoints

from nbdist.checkpoint import (
    FolderStorage,
    PendingFolderCheckpoint,
    TensorMetadata,
    merge_tensors,
)


@pytest.fixture
def draft(tmp_path: Path) -> PendingFolderCheckpoint:
    return FolderStorage(tmp_path / "root").begin("name")


def key(digest: int) -> TensorMetadata:
    return TensorMetadata(shape=(3, 4), dtype="float32", digest=digest)


def test_parts_of_a_tensor_add_up(draft: PendingFolderCheckpoint) -> None:
    parts = [
        small_checkpoints.write(draft.location / f"model-0000{rank}-0.safetensors")
        for rank in range(2)
    ]
    draft.write_report(0, parts[:1], {"model.w": key(2**64 - 1), "model.v": key(5)})
    draft.write_report(1, parts[1:], {"model.w": key(3)})
    reports = draft.read_reports(range(2))
    assert [reports[rank].files for rank in range(2)] == [(parts[0],), (parts[1],)]
    assert merge_tensors(reports.values()) == {"model.w": key(2), "model.v": key(5)}


def test_half_of_what_a_rank_says_is_nothing(draft: PendingFolderCheckpoint) -> None:
    assert draft.read_reports([0]) == {}
    draft.write_report(0, [], {"model.w": key(1)})
    path = draft.location / "part-00000.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert draft.read_reports([0]) == {}


def test_a_rank_says_why_it_failed(draft: PendingFolderCheckpoint) -> None:
    draft.write_failure(1, "rank 1 cannot write:\n\0no room" + "x" * 5000)
    reports = draft.read_reports(range(2))
    assert reports.keys() == {1}
    assert reports[1].error.startswith("rank 1 cannot write:  no room")


def test_without_space_for_a_description_the_name_says_it(
    draft: PendingFolderCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    draft.write_failure(1, "anything")
    reason = "rank 1 cannot write there (No space left on device, errno 28)"
    assert draft.read_reports([1])[1].error == reason
