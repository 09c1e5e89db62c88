"""What is ours is known by more than a name or a number."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster import run_dir
from nbdist.hardware import process_identity
from nbdist.hardware.process_identity import ProcessIdentity
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.fault("B13"), pytest.mark.fault("S13")]

ENDED = dataclasses.replace(ProcessIdentity.current_process(), started=1)
"""A process that is gone, and whose number another has: this test's."""
DECOY = [sys.executable, "-c", "input()", "-m", "nbdist.launcher", "python worker nbdist"]


@pytest.fixture
def decoy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of ours and looks like one."""
    with subprocess.Popen(DECOY, stdin=subprocess.PIPE) as process:
        yield process
        assert process.poll() is None
        process.communicate(b"\n")


def private(folder: Path, name: str, signed: ProcessIdentity | None = ENDED) -> Path:
    """A folder as a session leaves it."""
    made = folder / name
    made.mkdir(mode=0o700)
    (made / "launcher.log").write_text("")
    if signed is not None:
        signed.write_owner_file(made)
    return made


def test_an_owner_is_read_as_it_was_written() -> None:
    assert (
        ProcessIdentity.from_json(ProcessIdentity.current_process().to_json())
        == ProcessIdentity.current_process()
    )
    assert not ProcessIdentity.current_process().has_ended
    assert ENDED.has_ended


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, "1" * 5000, '{"pid": "1; rm -rf /"}', b"\xff"]
)
def test_an_invalid_owner_file_gives_no_owner(text: str) -> None:
    assert ProcessIdentity.from_json(text) is None


@pytest.mark.parametrize("field", ["boot", "space", "uid"])
def test_who_cannot_be_asked_has_not_ended(field: str, tmp_path: Path) -> None:
    strange = dataclasses.replace(ENDED, **{field: 4242 if field == "uid" else "another"})
    folder = private(tmp_path, "nbdist-1-a", strange)
    os.utime(folder, (0, 0))
    assert not process_identity.is_abandoned(
        folder
    )  # a session in another container may run for weeks


def test_only_a_signed_private_folder_of_an_ended_process_is_removed(tmp_path: Path) -> None:
    left = private(tmp_path, "nbdist-1-left")
    empty = tmp_path / "nbdist-99999999-empty"  # killed before it could sign
    fresh = tmp_path / "nbdist-99999999-fresh"
    old = tmp_path / f"nbdist-{os.getpid()}-old"  # a session's of an nbdist that signs nothing
    for folder in (empty, fresh, old):
        folder.mkdir(mode=0o700)
    os.utime(empty, (0, 0))
    os.utime(old, (0, 0))
    kept = [
        fresh,
        private(tmp_path, f"nbdist-{os.getpid()}-living", ProcessIdentity.current_process()),
        private(tmp_path, "nbdist-1-unsigned", None),
        private(tmp_path, "another-name"),
        private(tmp_path, "nbdist-1-open"),
        tmp_path / "nbdist-1-link",
        tmp_path / "nbdist-1-file",
        old,
    ]
    kept[4].chmod(0o755)
    kept[5].symlink_to(kept[3])
    kept[6].write_text("")
    assert set(run_dir.find_orphans([tmp_path]).folders) == {left, empty}
    run_dir.remove_orphans([tmp_path], grace_s=0)
    assert set(tmp_path.iterdir()) == set(kept)
    assert (kept[3] / "launcher.log").exists()


def test_a_removal_that_is_cut_short_leaves_what_the_next_start_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = private(tmp_path, "nbdist-1-left")
    (left / "1").mkdir()

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            process_identity.remove_folder(left)
    assert run_dir.find_orphans([tmp_path]).folders == (left,)
    process_identity.remove_folder(left)
    assert not left.exists()


def test_an_offloads_folder_goes_with_the_one_that_names_it(tmp_path: Path) -> None:
    """No start need ever offload to that place, or have that temp folder, again."""
    shm, tmp, disk = (tmp_path / name for name in ("shm", "tmp", "disk"))
    for root in (shm, tmp, disk):
        root.mkdir()
    bulk, run = private(shm, "nbdist-1-bulk"), private(tmp, "nbdist-1-run")
    swapped, living = (
        private(disk, "nbdist-host-1-a"),
        private(disk, "nbdist-host-2-b", ProcessIdentity.current_process()),
    )
    process_identity.record_linked_folder(bulk, run)
    process_identity.record_linked_folder(run, swapped)
    for hostile in (living, bulk, tmp_path, Path("/"), Path(".."), Path("\0")):
        process_identity.record_linked_folder(run, hostile)
    run_dir.remove_orphans([shm], grace_s=0)
    assert [*shm.iterdir(), *tmp.iterdir(), *disk.iterdir()] == [living]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_stays(tmp_path: Path) -> None:
    theirs = private(tmp_path, "nbdist-1-theirs")
    os.chown(theirs, 4242, 4242)
    run_dir.remove_orphans([tmp_path], grace_s=0)
    assert theirs.exists()


def test_a_planted_number_harms_no_other_process(
    decoy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    born = process_identity.process_start_ticks(decoy.pid)
    there = dataclasses.replace(ProcessIdentity.current_process(), pid=decoy.pid, started=born)
    before = dataclasses.replace(there, started=born - 1)
    mine, reused = private(tmp_path, "nbdist-1-a", there), private(tmp_path, "nbdist-1-b", before)
    for folder in (mine, reused):
        (folder / "family").write_text(f"{decoy.pid}\n1\n-1\n0\n")
    run_dir.remove_orphans([tmp_path], grace_s=0)
    run_dir.kill_processes(run_dir.launcher_process_filter(mine))
    assert mine.exists()
    assert not reused.exists()


def test_a_process_is_ours_by_the_kernel_in_its_environment(
    decoy: subprocess.Popen[bytes],
    tmp_path: Path,
) -> None:
    def sleeping(**environ: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/sleep", "300"], env={**os.environ, **environ})

    of_living = sleeping(NBDIST_KERNEL=ProcessIdentity.current_process().to_json())
    garbled = sleeping(NBDIST_KERNEL=f"{decoy.pid}")
    of_ended = sleeping(NBDIST_KERNEL=ENDED.to_json())
    try:
        found: set[int] = set()

        def seen() -> bool:
            found.update(stray.pid for stray in run_dir.find_orphans([tmp_path]).processes)
            # a session that starts elsewhere on this machine may have been quicker
            return of_ended.pid in found or of_ended.poll() == -signal.SIGKILL

        eventually(seen, within_s=5)  # a new process has no environment for a moment
        assert not found & {of_living.pid, garbled.pid, decoy.pid}
        run_dir.remove_orphans([tmp_path], grace_s=0)
        eventually(lambda: of_ended.poll() == -9, within_s=5)
        assert of_living.poll() is garbled.poll() is None
    finally:
        for process in (of_living, garbled, of_ended):
            process.kill()
            process.wait()


@pytest.mark.fault("F5")
def test_shared_memory_is_removed_when_a_session_created_it_and_no_process_uses_it(
    tmp_path: Path,
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    names = [
        "torch_99999999_1_0",
        "torch_99999998_1_0",
        f"torch_{os.getpid()}_1_0",
        "nccl-99999999",
    ]
    for name in [*names, "torch_99999997_1_0"]:
        (shm / name).write_text("")
    (tmp_path / "family").write_text(f"99999999\n{os.getpid()}\n99999997\n")
    with (shm / "torch_99999997_1_0").open():
        assert process_identity.find_orphaned_files(tmp_path, folder=shm) == [shm / names[0]]
