"""The Python of the ranks: what can be given, what is said, which paths go there."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from nbdist import rank_python
from nbdist.errors import OptionError, StartError
from nbdist.rank_python import RankPython
from tests.environments import environment


def test_without_an_option_ranks_run_this_python(tmp_path: Path) -> None:
    assert rank_python.find(None) is rank_python.KERNEL_PYTHON
    assert rank_python.find(sys.executable) is rank_python.KERNEL_PYTHON
    assert rank_python.KERNEL_PYTHON.import_path(["a"], tmp_path) == ["a"]
    assert rank_python.KERNEL_PYTHON.environment({"A": "b"}, tmp_path) == {"A": "b"}


def test_an_environment_is_asked_what_it_has(tmp_path: Path) -> None:
    executable = environment(tmp_path / "env", without=("deepspeed",))
    found = rank_python.find(tmp_path / "env")
    assert found.executable == str(executable)
    assert found.version_of("torch") == rank_python.KERNEL_PYTHON.version_of("torch")
    assert found.has("torch")
    assert not found.has("deepspeed")
    assert not found.describe_difference()
    found.check()


def test_a_package_installed_later_is_seen(tmp_path: Path) -> None:
    python = environment(tmp_path, without=("deepspeed",))
    assert not rank_python.find(python).has("deepspeed")
    packages = next(tmp_path.glob("lib/python*/site-packages"))
    for installed in Path(sysconfig.get_path("purelib")).glob("deepspeed*"):
        (packages / installed.name).symlink_to(installed)
    assert rank_python.find(python).has("deepspeed")


def test_a_python_without_torch_starts_no_ranks(tmp_path: Path) -> None:
    python = environment(tmp_path, without=("torch",))
    with pytest.raises(StartError, match=r"need torch.*not installed.*nbdist\.setup"):
        rank_python.find(python).check()


def test_an_empty_environment_names_some_packages_and_counts_the_others(tmp_path: Path) -> None:
    venv.create(tmp_path)
    with pytest.raises(StartError, match=r"torch<3,>=2\.\d+ \(not installed\).* and \d+ more pack"):
        rank_python.find(tmp_path).check()


def test_a_deleted_environment_is_named(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", without=("torch",))
    rank_python.find(python)
    shutil.rmtree(tmp_path / "env")
    with pytest.raises(OptionError, match=r"env/bin/python: No such file"):
        rank_python.find(python)


def test_a_path_that_cannot_be_looked_up_says_why() -> None:
    with pytest.raises(OptionError, match=r"cannot be used: .*: File name too long[.]"):
        rank_python.find("/" + 300 * "x")


@pytest.mark.parametrize(
    ("script", "mode", "says"),
    [
        ("#!/bin/sh\n", 0o600, "Permission denied"),
        ("#!/bin/sh\necho no >&2; exit 3\n", 0o700, "cannot be used: no[.]"),
        ("#!/bin/sh\necho no 3.13 >&2; echo ' Note: ...' >&2\n", 0o700, "be used: no 3.13[.]"),
        ("#!/bin/sh\n", 0o700, "not a Python interpreter"),
        ('#!/bin/sh\necho \'{"version": "3.9.1", "minor": [3, 9]}\'\n', 0o700, "3.11 or newer"),
    ],
)
def test_unusable_interpreters(tmp_path: Path, script: str, mode: int, says: str) -> None:
    file = tmp_path / "python"
    file.write_text(script)
    file.chmod(stat.S_IFREG | mode)
    with pytest.raises(OptionError, match=says):
        rank_python.find(file)


def test_the_users_folders_go_along_and_the_notebooks_packages_stay(tmp_path: Path) -> None:
    other = RankPython("/env/bin/python", "3.13.0", {}, ("/env/lib/site-packages",))
    folder = other.link_package(tmp_path)
    assert (folder / "nbdist" / "rank_python.py").exists()
    own = sysconfig.get_path("purelib")
    given = ["/home/me/project", sysconfig.get_path("stdlib"), own, "/usr/lib/python313.zip"]
    path = other.import_path(given, folder)
    assert path == [str(folder), "/home/me/project", "/env/lib/site-packages"]
    variables = {"PATH": "/bin", "PYTHONPATH": f"/home/me{os.pathsep}{own}", "PYTHONHOME": "/x"}
    changed = other.environment(variables, folder)
    assert changed == {"PATH": "/env/bin:/bin", "PYTHONPATH": f"{folder}{os.pathsep}/home/me"}


def test_another_version_of_python_says_which_syntax_works() -> None:
    other = RankPython("/env/bin/python", "3.8.2", {})
    assert "cells can only use the syntax of 3.8" in other.describe_difference()
