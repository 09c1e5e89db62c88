"""Builds of DeepSpeed's ops: where they are kept and what is said when they cannot be made."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path

import pytest

from nbdist.errors import StartError
from nbdist.hardware import deepspeed_requirements
from nbdist.hardware.process_identity import ProcessIdentity
from nbdist.launcher import offload_setup
from nbdist.strategies import Options


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBDIST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    return tmp_path / "cache"


def test_no_op_touches_no_file(cache: Path) -> None:
    offload_setup.build_missing_ops((), progress=pytest.fail)
    assert not cache.exists()


def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StartError, match=r"no-such-compiler is not on PATH\. Install g"):
        offload_setup.build_missing_ops(("cpu_adam",), progress=pytest.fail)
    assert not cache.exists()


def test_a_folder_that_cannot_be_made_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file")
    monkeypatch.setattr(deepspeed_requirements, "missing_requirements", lambda *_: "")
    with pytest.raises(StartError, match="NBDIST_CACHE_DIR"):
        offload_setup.build_missing_ops(("cpu_adam",), progress=pytest.fail)


def test_a_second_session_waits_for_the_first_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_setup, "TICK_S", 0.0)
    first = os.open(tmp_path / "nbdist-lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(first, fcntl.LOCK_EX)
    lines: list[str] = []

    def finish_the_first(line: str) -> None:
        lines.append(line)
        fcntl.flock(first, fcntl.LOCK_UN)

    with offload_setup.build_lock(tmp_path, progress=finish_the_first, limit_s=60):
        pass
    assert lines == ["waiting for another session that builds DeepSpeed's ops: 0 s"]
    fcntl.flock(first, fcntl.LOCK_EX)
    waiting = offload_setup.build_lock(tmp_path, progress=pytest.fail, limit_s=-1)
    with pytest.raises(StartError, match="another session that builds"), waiting:
        pass
    os.close(first)


def test_a_swap_folder_is_the_sessions_own_and_goes_with_it(tmp_path: Path) -> None:
    user = Options(backend="zero3", offload=f"nvme:{tmp_path}")
    with offload_setup.create_nvme_folder(user) as options:
        assert options.offload_path is not None
        own = tmp_path / options.offload_path.rpartition("/")[2]
        (own / "x.swp").write_text("")
    assert list(tmp_path.iterdir()) == []
    with offload_setup.create_nvme_folder(Options()) as same:
        assert same == Options()


def test_a_killed_sessions_swap_folder_is_removed(tmp_path: Path) -> None:
    wanted = Options(backend="zero3", offload=f"nvme:{tmp_path}")
    with offload_setup.create_nvme_folder(wanted) as options:
        name = str(options.offload_path).rpartition("/")[2]
        host = name.rsplit("-", 2)[0]
        dead, another = tmp_path / f"{host}-99999999-aaaaaaaa", tmp_path / f"{host}-99999999-b"
    for folder in (dead, another):
        folder.mkdir(mode=0o700)
        (folder / "x.swp").write_text("")
    # the first launcher is gone, though its number was given again; of the other nothing is known
    dataclasses.replace(ProcessIdentity.current_process(), started=1).write_owner_file(dead)
    with offload_setup.create_nvme_folder(wanted):
        assert not dead.exists()
    assert list(tmp_path.iterdir()) == [another]


@pytest.mark.fault("A9")
@pytest.mark.fault("S14")
def test_a_swap_folder_is_private_and_a_planted_link_is_left_alone(tmp_path: Path) -> None:
    wanted = Options(backend="zero3", offload=f"nvme:{tmp_path / 'shared'}")
    with offload_setup.create_nvme_folder(wanted) as options:
        own = Path(str(options.offload_path))
        assert own.stat().st_mode & 0o777 == 0o700
        planted = own.parent / own.name.replace(f"-{os.getpid()}-", "-99999999-")
    (tmp_path / "precious").mkdir()
    planted.symlink_to(tmp_path / "precious")
    with offload_setup.create_nvme_folder(wanted):
        assert planted.is_symlink()
        assert (tmp_path / "precious").is_dir()


@pytest.mark.fault("S14")
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_cache_that_others_can_write_to_is_not_used(cache: Path, mode: int) -> None:
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(StartError, match="can be written to by others, and code built there"):
        offload_setup.build_missing_ops(("cpu_adam",), progress=pytest.fail)
    assert list(cache.iterdir()) == []


def test_a_swap_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = Options(backend="zero3", offload=f"nvme:{tmp_path}/file/x")
    with (
        pytest.raises(StartError, match="Cannot write to"),
        offload_setup.create_nvme_folder(wanted),
    ):
        pass
