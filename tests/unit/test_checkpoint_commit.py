"""Saving in two steps: what is found by name is whole, at every moment, also after a crash."""

from __future__ import annotations

import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import small_checkpoints

from nbdist import checkpoint
from nbdist.checkpoint import FolderStorage, PendingFolderCheckpoint, durable_io
from nbdist.errors import CheckpointError
from nbdist.hardware import process_identity

if TYPE_CHECKING:
    from collections.abc import Callable

DEAD = {"pid": 2**22 + 1, "started": 5, "boot": "", "space": ""}


class Crash(BaseException):
    """The process dies here: nothing after this runs."""


def names(root: Path) -> list[str]:
    """What `entries` shows, oldest first."""
    return [one.name for one in FolderStorage(root).list_checkpoints()]


def hidden(root: Path) -> list[str]:
    """Folders that are being written or removed."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] == ".")


def as_of_dead(folder: Path) -> None:
    """Let a folder's owner be a process that is gone."""
    me = process_identity.ProcessIdentity.current_process()
    (folder / ".owner.json").write_text(
        json.dumps(DEAD | {"uid": os.getuid(), "boot": me.boot, "space": me.space})
    )


def digest_of(root: Path, name: str) -> int:
    """Which save it is, after all bytes were verified."""
    return checkpoint.verify_files(FolderStorage(root).find(name)).files[0].crc32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "check points é"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of everything that touches the disk's promises."""
    made: list[str] = []

    def recorded(name: str, spell: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*given: Any, **options: Any) -> Any:
            made.append(f"{name} {spell(*given)}")
            return real(*given, **options)

        monkeypatch.setattr(os, name, call)

    recorded("fsync", lambda fd: short(Path(f"/proc/self/fd/{fd}").readlink()))
    recorded("rename", lambda source, target: f"{short(source)} -> {short(target)}")
    recorded("unlink", lambda path, **_: short(path))
    return made


def short(path: str | Path) -> str:
    """The last name, without its random part."""
    name = Path(path).name
    return f"{name[:4]}{name[37:]}" if name.startswith((".tmp", ".old")) else name


@pytest.mark.fault("E5")
def test_the_order_of_replacing(root: Path, calls: list[str]) -> None:
    small_checkpoints.save(root, "a", seed=1)
    assert calls[0] == f"fsync {root.parent.name}"  # the root itself was made
    calls.clear()
    small_checkpoints.save(root, "a", seed=2, overwrite=True)
    order = [
        "fsync model-00000-0.safetensors",
        "fsync manifest.json",
        "fsync .tmp",
        "rename a -> .old-a",
        "rename .tmp -> a",
        f"fsync {root.name}",
        "rename .old-a -> .tmp",
        "unlink manifest.json",
        "unlink model-00000-0.safetensors",
    ]
    assert [call for call in calls if call in order] == order
    assert hidden(root) == []


def test_a_save_is_listed_once_it_is_whole(root: Path) -> None:
    draft = FolderStorage(root).begin("a", size_bytes=1)
    assert stat.S_IMODE(draft.location.stat().st_mode) == 0o700
    part = small_checkpoints.write(draft.location / "model-00000-0.safetensors")
    assert names(root) == []
    assert FolderStorage(root).list_checkpoints() == []
    draft.write_report(0, [part], {})
    made = small_checkpoints.manifest(small_checkpoints.files_of(draft, 1))
    path = draft.commit("a", made)
    assert path == root / "a"
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", part.name]
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(root.stat().st_mode)
    (entry,) = FolderStorage(root).list_checkpoints()
    assert (entry.name, entry.step, entry.backend) == ("a", 7, "zero3")
    assert (entry.size_bytes, entry.created, entry.path) == (part.size_bytes, made.created, path)
    assert FolderStorage(root).list_checkpoints()[-1] == entry
    draft.abort()  # nothing to do any more
    assert names(root) == ["a"]


def test_abort_removes_drafts_alone(root: Path) -> None:
    path = small_checkpoints.save(root, "a")
    PendingFolderCheckpoint(path).abort()
    PendingFolderCheckpoint(root).abort()
    assert names(root) == ["a"]


@pytest.mark.parametrize("how", ["missing", "short", "unnamed"])
def test_what_ranks_wrote_is_there_at_the_commit(root: Path, how: str) -> None:
    draft = FolderStorage(root).begin("a")
    part = small_checkpoints.write(draft.location / "model-00000-0.safetensors")
    if how == "missing":
        (draft.location / part.name).unlink()
    elif how == "short":
        os.truncate(draft.location / part.name, 100)
    else:
        (draft.location / "stray").write_text("")
    with pytest.raises(CheckpointError, match="differs from what its rank reported"):
        draft.commit("a", small_checkpoints.manifest((part,)))
    draft.abort()
    assert names(root) == hidden(root) == []


def test_a_name_that_was_taken_meanwhile_is_refused(root: Path) -> None:
    draft = FolderStorage(root).begin("a")
    part = small_checkpoints.write(draft.location / "model-00000-0.safetensors")
    small_checkpoints.save(root, "a", seed=1)
    with pytest.raises(CheckpointError, match="exists"):
        draft.commit("a", small_checkpoints.manifest((part,)))
    draft.abort()
    assert names(root) == ["a"]


@pytest.mark.parametrize("kind", ["file", "foreign", "damaged", "with a note"])
@pytest.mark.fault("E18")
def test_only_checkpoints_are_replaced(root: Path, kind: str) -> None:
    root.mkdir()
    path = root / "a"
    if kind == "file":
        path.write_text("mine")
    elif kind == "foreign":
        path.mkdir()
        (path / "thesis.tex").write_text("mine")
    else:
        small_checkpoints.save(root, "a")
        name = "manifest.json" if kind == "damaged" else "notes.txt"
        (path / name).write_text("mine")
    before = sorted(root.rglob("*"))
    with pytest.raises(CheckpointError, match=r"not a complete nbdist|contains 'notes.txt'"):
        FolderStorage(root).begin("a", overwrite=True)
    assert [one for one in sorted(root.rglob("*")) if one.name != ".lock"] == [
        one for one in before if one.name != ".lock"
    ]


@pytest.mark.fault("E17")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(CheckpointError, match="Cannot write checkpoints to"):
            FolderStorage(root).begin("a")
    with pytest.raises(CheckpointError, match="needs 1048576 MiB, but"):
        FolderStorage(tmp_path / "root").begin("a", size_bytes=1 << 40)


@pytest.mark.fault("E17")
def test_a_read_only_folder_is_said_and_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_checkpoints.save(root, "a")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # tests may run as root
    with pytest.raises(CheckpointError, match="Permission denied"):
        FolderStorage(root).begin("b")
    assert names(root) == ["a"]


# Crashes


def crash_at(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Die at the call number `at` that changes names or syncs."""
    made: list[str] = []

    def deadly(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) > at:
                raise Crash
            return real(*given, **options)

        return call

    for name in ("fsync", "rename", "unlink", "mkdir", "chmod"):
        monkeypatch.setattr(os, name, deadly(name, getattr(os, name)))
    return made


@pytest.mark.parametrize("taken", [False, True], ids=["new name", "existing name"])
@pytest.mark.fault("E5")
def test_a_crash_at_every_step(root: Path, monkeypatch: pytest.MonkeyPatch, *, taken: bool) -> None:
    before = small_checkpoints.save(root, "first", seed=1)
    old = digest_of(root, "first")
    name = "first" if taken else "second"
    new = (
        checkpoint.verify_files(small_checkpoints.save(root.with_name("other"), "x", seed=2))
        .files[0]
        .crc32
    )
    outcomes = set()
    for at in range(40):
        with monkeypatch.context() as patch:
            calls = crash_at(patch, at)
            try:
                small_checkpoints.save(root, name, seed=2, overwrite=taken)
                ended = True
            except Crash:
                ended = False
        listed = names(root)
        assert "first" in listed  # never a moment without a good one
        for one in listed:
            found = digest_of(root, one)
            assert found == new if one == "second" else found in {old, new}
        outcomes.add((name in listed) and digest_of(root, name) == new)
        for folder in hidden(root):
            if (root / folder / ".owner.json").exists():
                as_of_dead(root / folder)
        draft = FolderStorage(root).begin("next")  # tidies up
        assert hidden(root) == [draft.location.name]
        assert names(root) == listed
        draft.abort()
        if ended:
            break
        for one in root.iterdir():
            if one.is_dir():
                durable_io.remove_folder(one)
        small_checkpoints.save(root, "first", seed=1)
    assert ended
    assert len(calls) > 6
    assert outcomes == {False, True}
    assert before == root / "first"


def test_a_crash_between_the_two_renames(root: Path) -> None:
    path = small_checkpoints.save(root, "a", seed=1)
    old = digest_of(root, "a")
    aside = root / f".old-{'0' * 32}-a"
    path.rename(aside)
    assert names(root) == ["a"]
    assert FolderStorage(root).find("a") == aside
    with FolderStorage(root).open_checkpoint("a") as (_, manifest):
        assert manifest.files[0].crc32 == old
    with pytest.raises(CheckpointError, match="exists"):
        FolderStorage(root).begin("a")
    assert path.is_dir()
    assert hidden(root) == []
    assert digest_of(root, "a") == old


def test_the_newest_of_several_is_put_back(root: Path) -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    made = [
        small_checkpoints.save(root, f"x{number}", created=begin + timedelta(days=number % 2))
        for number in range(3)
    ]
    for number, path in enumerate(made):
        path.rename(root / f".old-{number:032x}-a")
    (entry,) = FolderStorage(root).list_checkpoints()
    assert entry.path.name.endswith("1-a")
    FolderStorage(root).begin("b").abort()
    assert [one.path.name for one in FolderStorage(root).list_checkpoints()] == ["a"]
    assert FolderStorage(root).list_checkpoints()[0].created == begin + timedelta(days=1)
    assert hidden(root) == []


# What is left of dead processes


def test_what_dead_processes_left_is_removed(root: Path) -> None:
    draft = FolderStorage(root).begin("a")
    small_checkpoints.write(draft.location / "model-00000-0.safetensors")
    FolderStorage(root).begin("b").abort()
    assert draft.location.is_dir()  # this process lives
    as_of_dead(draft.location)
    FolderStorage(root).begin("b").abort()
    assert not draft.location.exists()


@pytest.mark.parametrize("field", ["boot", "space"])
def test_a_process_elsewhere_is_given_a_day(root: Path, field: str) -> None:
    draft = FolderStorage(root).begin("a")
    content = json.loads((draft.location / ".owner.json").read_text())
    (draft.location / ".owner.json").write_text(json.dumps(content | {field: "another"}))
    FolderStorage(root).begin("b").abort()
    assert draft.location.exists()
    os.utime(draft.location, (0, 0))
    FolderStorage(root).begin("b").abort()
    assert not draft.location.exists()


FOREIGN: dict[str, Any] = {
    "of another user": {"uid": os.getuid() + 1},
    "unreadable": "{",
    "hostile": {"pid": "1; rm -rf /"},
    "nested": "[" * 10_000,
    "absent": None,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_not_certainly_ours_stays(root: Path, content: Any) -> None:
    folder = root / f".tmp-{'0' * 32}"
    folder.mkdir(parents=True)
    (folder / "data").write_text("")
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(DEAD | {"uid": 0} | content)
        (folder / ".owner.json").write_text(text)
    FolderStorage(root).begin("a").abort()
    assert (folder / "data").exists()


def test_names_like_ours_are_not_enough(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    as_of_dead(elsewhere)
    root.mkdir()
    (root / f".tmp-{'0' * 32}").symlink_to(elsewhere)
    for name in (".tmp-mine", f".tmp-{'0' * 31}", f".old-{'0' * 32}-", f".old-{'0' * 32}-b"):
        (root / name).mkdir()
        (root / name / "data").write_text("")
    small_checkpoints.save(root, "b")
    assert len(hidden(root)) == 5
    assert (elsewhere / ".owner.json").exists()


# Keeping the newest


def aged(root: Path, name: str, day: int, **given: Any) -> None:
    small_checkpoints.save(root, name, created=datetime(2026, 1, day, tzinfo=UTC), **given)


def test_the_oldest_are_removed(root: Path) -> None:
    for day, name in enumerate(["c", "a", "d", "b"], 1):
        aged(root, name, day)
    assert FolderStorage(root).remove_oldest(2) == ["c", "a"]
    assert names(root) == ["d", "b"]
    assert hidden(root) == []
    assert FolderStorage(root).remove_oldest(2) == []
    assert FolderStorage(root).remove_oldest(9) == []


def test_what_was_just_written_stays_whatever_the_clock_says(root: Path) -> None:
    aged(root, "future", 28)
    aged(root, "now", 2)
    assert FolderStorage(root).remove_oldest(1, written="now") == ["future"]
    assert names(root) == ["now"]


@pytest.mark.fault("E18")
def test_what_is_foreign_or_damaged_stays_and_does_not_count(root: Path) -> None:
    for day, name in enumerate(["damaged", "noted", "old", "new"], 1):
        aged(root, name, day)
    os.truncate(root / "damaged" / "model-00000-0.safetensors", 10)
    (root / "noted" / "notes.txt").write_text("mine")
    (root / "foreign").mkdir()
    (root / "foreign" / "pytorch_model.bin").write_text("mine")
    (root / "file").write_text("mine")
    (root / "link").symlink_to(root / "old")
    assert FolderStorage(root).remove_oldest(1) == ["old"]
    assert sorted(path.name for path in root.iterdir() if path.name != ".lock") == [
        "damaged",
        "file",
        "foreign",
        "link",
        "new",
        "noted",
    ]


@pytest.mark.fault("E18")
def test_what_is_in_use_stays(root: Path) -> None:
    for day, name in enumerate(["a", "b", "c"], 1):
        aged(root, name, day)
    with FolderStorage(root).open_checkpoint("a"):
        assert FolderStorage(root).remove_oldest(1) == ["b"]
    assert FolderStorage(root).remove_oldest(1) == ["a"]


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True, None])
def test_at_least_one_is_kept(root: Path, count: Any) -> None:
    small_checkpoints.save(root, "a")
    with pytest.raises(CheckpointError, match="keep must be an integer >= 1"):
        FolderStorage(root).remove_oldest(count)
    assert names(root) == ["a"]


# Several processes


def test_one_process_at_a_time_changes_names(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_checkpoints.save(root, "a")
    with durable_io.exclusive_lock(root):
        assert names(root) == ["a"]  # looking needs no lock
        with (
            pytest.raises(CheckpointError, match="another process is writing"),
            durable_io.exclusive_lock(root, within_s=0.05),
        ):
            pass
    with durable_io.exclusive_lock(root):
        pass
    # Lustre without flock.
    monkeypatch.setattr(
        durable_io.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(38, "no"))
    )
    small_checkpoints.save(root, "b")
    assert names(root) == ["a", "b"]


def test_savers_and_a_reader_at_once(root: Path) -> None:
    small_checkpoints.save(root, "a")
    good = [small_checkpoints.save(root, f"seed{n}", seed=n) for n in range(3)]
    allowed = {checkpoint.verify_files(path).files[0].crc32 for path in good}
    done, seen, errors = threading.Event(), [], []

    def read() -> None:
        try:
            while not done.is_set():
                with FolderStorage(root).open_checkpoint("a") as (_, manifest):
                    seen.append(manifest.files[0].crc32)
                assert "a" in names(root)
        except BaseException as error:
            errors.append(error)
            raise

    def write(seed: int) -> None:
        try:
            saves = 0
            while saves < 10 or (len(seen) < 4 and not errors):  # the reader may get no turn before
                small_checkpoints.save(root, "a", seed=seed, overwrite=True)
                saves += 1
        except BaseException as error:
            errors.append(error)
            raise

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not errors
    assert set(seen) <= allowed
    FolderStorage(root).begin("z").abort()
    assert hidden(root) == []
    assert FolderStorage(root).remove_oldest(1, written="a") != []
