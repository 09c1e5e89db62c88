"""Where private folders lie, and what is refused as one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster import run_dir
from nbdist.errors import StartError
from nbdist.hardware import process_identity

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.fault("S14")


def made_in(*folders: Path) -> Path:
    """A private folder in the best of these."""
    return run_dir.make_private(list(folders), "sockets")


def test_it_is_private_signed_and_has_an_unpredictable_name(tmp_path: Path) -> None:
    one, other = made_in(tmp_path), made_in(tmp_path)
    assert one != other
    assert one.stat().st_mode & 0o777 == 0o700
    assert process_identity.read_owner(one) == process_identity.ProcessIdentity.current_process()
    assert not process_identity.is_abandoned(one)


@pytest.mark.fault("A9")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(StartError, match=r"missing: No such file or directory. Set TMPDIR"):
        made_in(missing)
    assert made_in(missing, tmp_path).parent == tmp_path


@pytest.mark.fault("A9")
def test_a_folder_where_others_may_rename_is_the_last_choice(tmp_path: Path) -> None:
    shared, safe = tmp_path / "shared", tmp_path / "safe"
    shared.mkdir()
    safe.mkdir()
    shared.chmod(0o777)
    assert "sticky bit" in run_dir.unsafe_folder_reason(shared)
    assert made_in(shared, safe).parent == safe
    assert made_in(shared).parent == shared
    shared.chmod(0o1777)
    assert made_in(shared, safe).parent == shared


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_the_last_choice(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 4242, 4242)
    assert run_dir.unsafe_folder_reason(theirs) == "it belongs to another user (uid 4242)"
    assert made_in(theirs, tmp_path).parent == tmp_path


def test_a_file_system_that_keeps_no_modes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_to_all(prefix: str, dir: Path) -> str:  # noqa: A002 - as mkdtemp names it
        made = dir / f"{prefix}x"
        made.mkdir()
        made.chmod(0o777)
        return str(made)

    monkeypatch.setattr("tempfile.mkdtemp", open_to_all)
    with pytest.raises(StartError, match="does not keep folders private"):
        made_in(tmp_path)
    assert not list(tmp_path.iterdir())
