"""Checkpoints at a URL: what is listed, replaced and removed, and what is brought from there."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nbdist import CheckpointError, checkpoint
from nbdist.checkpoint import CheckpointDownload, Url, UrlStorage
from nbdist.checkpoint.safetensors_writer import StoredTensor
from nbdist.hardware.process_identity import OWNER_FILE, ProcessIdentity
from tests.unit import small_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.checkpoint.url_storage import PendingUrlCheckpoint

FILE = "model-00000-0.safetensors"
NOW = datetime.now(UTC)


@pytest.fixture
def there(tmp_path: Path) -> UrlStorage:
    """A URL whose files this test can look at."""
    return UrlStorage(Url(f"file://{tmp_path}/run"))


def begun(
    there: UrlStorage, name: str, *, overwrite: bool = False
) -> tuple[PendingUrlCheckpoint, Any]:
    """A save of one rank that has written everything, and its manifest."""
    draft = there.begin(name, overwrite=overwrite, size_bytes=0)
    stored = StoredTensor(name="model.w", dtype="float32", shape=(small_checkpoints.NUMEL,))
    with draft.create_file(FILE, [stored]) as file:
        file.write(memoryview(bytes(range(250)) * (4 * small_checkpoints.NUMEL // 250)))
    draft.write_report(0, [file.result], {})
    return draft, small_checkpoints.manifest(draft.read_reports([0])[0].files)


def save(there: UrlStorage, name: str, *, age_s: float = 0, overwrite: bool = False) -> Path:
    draft, manifest = begun(there, name, overwrite=overwrite)
    manifest = replace(manifest, created=NOW - timedelta(seconds=age_s))
    return here(draft.commit(name, manifest, overwrite=overwrite))


def here(url: Url) -> Path:
    return Path(url.unredacted.removeprefix("file://"))


def names(there: UrlStorage) -> list[str]:
    return [one.name for one in UrlStorage(there.root).list_checkpoints()]


def test_a_save_is_listed_once_its_manifest_is_whole(there: UrlStorage) -> None:
    assert names(there) == []
    draft, manifest = begun(there, "best")
    assert names(there) == []
    folder = here(there.root / "best" / draft.id)
    (folder / "manifest.json").write_bytes(manifest.to_json()[:-20])  # half of it is there
    assert names(there) == []
    (folder / "manifest.json").unlink()
    draft.commit("best", manifest, overwrite=False)
    (one,) = there.list_checkpoints()
    assert (one.name, one.step, one.backend) == ("best", 7, "zero3")
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", FILE]
    (folder / FILE).write_bytes(b"short")
    assert names(there) == []


def test_the_url_of_the_files_opens_too(there: UrlStorage) -> None:
    save(there, "best")
    (listed,) = there.list_checkpoints()
    assert isinstance(listed.path, Url)
    with UrlStorage(listed.path.parent).open_checkpoint(listed.path.name) as (url, _):
        assert url == listed.path
    other = UrlStorage(listed.path.parent).open_checkpoint("0" * 32)  # replaced by a later save
    with pytest.raises(CheckpointError, match="No checkpoint 0000"), other:
        pass


def test_a_file_that_differs_from_its_ranks_report_makes_the_checkpoint_invalid(
    there: UrlStorage,
) -> None:
    draft, manifest = begun(there, "best")
    (here(there.root / "best" / draft.id) / FILE).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"differs from what its rank reported\. Save again"):
        draft.commit("best", manifest, overwrite=False)
    assert names(there) == []


def test_a_taken_name(there: UrlStorage) -> None:
    first = save(there, "best", age_s=60)
    with pytest.raises(CheckpointError, match=r"best exists\. .*--overwrite"):
        there.begin("best", overwrite=False, size_bytes=0)
    second = save(there, "best", overwrite=True)
    assert not first.exists()
    assert [here(one.path) for one in there.list_checkpoints()] == [second]


@pytest.mark.fault("E2")
def test_a_crash_before_the_old_one_is_removed(
    there: UrlStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(there, "best", age_s=60)
    monkeypatch.setattr(UrlStorage, "remove_older", lambda *_: None)
    second = save(there, "best", overwrite=True)
    assert first.exists()
    assert [here(one.path) for one in there.list_checkpoints()] == [second]
    assert names(there) == ["best"]


def test_the_oldest_go_and_what_is_foreign_stays(there: UrlStorage) -> None:
    folders = [save(there, f"step-{number}", age_s=60 - number) for number in range(4)]
    (folders[0] / "notes.txt").write_text("mine")
    assert there.remove_oldest(2, written="step-3") == ["step-0", "step-1"]
    assert names(there) == ["step-2", "step-3"]
    assert [path.name for path in folders[0].iterdir()] == ["notes.txt"]
    assert not folders[1].parent.exists()


@pytest.mark.parametrize(
    ("owner", "goes"),
    [
        (ProcessIdentity.current_process, False),
        (lambda: replace(ProcessIdentity.current_process(), started=1), True),
        (lambda: replace(ProcessIdentity.current_process(), boot="of another machine"), False),
    ],
    ids=["living", "dead", "elsewhere"],
)
def test_what_a_process_left_goes_once_it_is_dead(
    there: UrlStorage,
    owner: Callable[[], ProcessIdentity],
    goes: bool,  # noqa: FBT001 - of the table above
) -> None:
    draft, _ = begun(there, "left")
    folder = here(there.root / "left" / draft.id)
    (folder / OWNER_FILE).write_text(json.dumps(asdict(owner())))
    save(there, "next")
    assert folder.exists() != goes


def test_uploads_of_unknown_owners_are_removed_after_a_day(there: UrlStorage) -> None:
    draft, _ = begun(there, "left")
    folder = here(there.root / "left" / draft.id)
    elsewhere = replace(ProcessIdentity.current_process(), boot="of another machine")
    (folder / OWNER_FILE).write_text(elsewhere.to_json())
    long_ago = (NOW - timedelta(hours=25)).timestamp()
    save(there, "one")
    assert folder.exists()
    for file in folder.iterdir():
        os.utime(file, (long_ago, long_ago))
    save(there, "two")
    assert not folder.exists()


def test_what_is_left_of_a_removal_goes(there: UrlStorage) -> None:
    folder = save(there, "old")
    (folder / "manifest.json").unlink()
    save(there, "new")
    assert not folder.parent.exists()


def test_giving_up_leaves_nothing_and_harms_nothing_whole(there: UrlStorage) -> None:
    draft, manifest = begun(there, "best")
    draft.abort()
    assert not here(there.root / "best").exists()
    draft, manifest = begun(there, "best")
    draft.commit("best", manifest, overwrite=False)
    draft.abort()
    assert names(there) == ["best"]


def test_a_rank_that_failed_says_why(there: UrlStorage) -> None:
    draft, _ = begun(there, "best")
    draft.write_failure(1, "the disk is full")
    assert draft.read_reports([1, 2])[1].error == "the disk is full"
    assert draft.read_reports([2]) == {}


# -- brought here


def test_heads_come_first_and_files_when_they_are_wanted(there: UrlStorage, tmp_path: Path) -> None:
    source = save(there, "best")
    with there.open_checkpoint("best") as (url, _):
        brought = CheckpointDownload(url, tmp_path / "brought")
    hole, whole = brought.folder / FILE, (source / FILE).read_bytes()
    assert hole.stat().st_size == len(whole)
    length = int.from_bytes(whole[:8], "little") + 8
    assert hole.read_bytes()[:length] == whole[:length]
    heard: list[int] = []
    brought.fetch([FILE], heard.append)
    assert hole.read_bytes() == whole
    checkpoint.verify_files(brought.folder)
    brought.remove()
    assert not brought.folder.exists()


@pytest.mark.fault("E7")
def test_other_bytes_than_were_written_are_not_taken(there: UrlStorage, tmp_path: Path) -> None:
    file = save(there, "best") / FILE
    file.write_bytes(small_checkpoints.DAMAGE["one bit of data"](file.read_bytes()))
    with there.open_checkpoint("best") as (url, _):
        brought = CheckpointDownload(url, tmp_path / "brought")
    with pytest.raises(CheckpointError, match="Checksum mismatch"):
        brought.fetch([FILE])


def test_ranks_of_one_machine_bring_a_file_once(
    there: UrlStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(there, "best")
    fetched: list[str] = []
    fetch = CheckpointDownload.download_file

    def counted(self: CheckpointDownload, file: Any, *given: Any) -> None:
        fetched.append(file.name)
        fetch(self, file, *given)

    monkeypatch.setattr(CheckpointDownload, "download_file", counted)
    with there.open_checkpoint("best") as (url, _):
        ranks = [
            threading.Thread(
                target=lambda: CheckpointDownload(url, tmp_path / "brought").fetch([FILE])
            )
            for _ in range(4)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert fetched == [FILE]
    checkpoint.verify_files(tmp_path / "brought")


def test_too_little_room_is_said_before(
    there: UrlStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(there, "best")
    with there.open_checkpoint("best") as (url, _):
        brought = CheckpointDownload(url, tmp_path / "brought")
    full = os.statvfs_result((0,) * 10)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(CheckpointError, match=r"only 0 MiB are free\. .* set TMPDIR"):
        brought.fetch([FILE])


# -- what is refused


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nope://x/y", r"does not support the URL nope://x/y .* Use a URL such as s3://"),
        ("gs://bucket/run", r"needs a package that is not installed: .*gcsfs"),
        ("memory://run", r"the memory of a single process"),
        ("file:///proc/nothing", r"Cannot write checkpoints to file:///proc/nothing \(.*Error"),
    ],
)
def test_a_url_that_cannot_be_used(url: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        UrlStorage(Url(url)).check_writable()


@pytest.mark.fault("S5")
def test_no_password_is_shown() -> None:
    url = Url("ftp://me:pass-word@127.0.0.1:9/run")
    with pytest.raises(CheckpointError, match=r"Cannot reach .* \(ConnectionRefused") as excinfo:
        UrlStorage(url).check_writable()
    for shown in (str(excinfo.value), str(url), repr(url), repr(url / "best"), f"{[url]}"):
        assert "pass-word" not in shown
        assert "me:<redacted>@127.0.0.1:9/run" in shown
    assert url.unredacted == "ftp://me:pass-word@127.0.0.1:9/run"


def test_urls_and_folders_are_distinguished(tmp_path: Path) -> None:
    for text in ("s3://bucket/run", "file:///data", "simplecache::s3://bucket/run"):
        assert checkpoint.parse_location(text, tmp_path) == Url(text)
    for text in ("runs", "/data/runs", "a:b"):
        assert checkpoint.parse_location(text, tmp_path) == tmp_path / text
    assert checkpoint.parse_location("~/x", tmp_path) == Path.home() / "x"
    assert (Url("s3://b/run/") / "best").parent == Url("s3://b/run")
