"""Shared by all tests: nothing may be left behind."""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist import paths
from tests.faults import fault_table
from tests.processes import runs
from tests.reused_launcher import environment, reusing_provider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEFT_BEHIND_S = 15.0
"""That nothing stays is meant here; how soon it goes is what tests/faults shows."""
POLL_S = 0.02
SHARED = Path("/dev/shm")  # noqa: S108 - where torch shares tensors


def pytest_configure(config: pytest.Config) -> None:
    """`make faults` ends with the table of faults."""
    if config.option.markexpr.startswith("fault"):
        config.pluginmanager.register(fault_table.Table())


@pytest.fixture(scope="session", autouse=True)
def nothing_learned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plan with the catalogue, and let no profile of a test teach the user's own planner.

    A test with `own_cache`, or that sets one of the variables, has its own folder.
    """
    usual, own = paths.cache_dir, tmp_path_factory.mktemp("cache")
    variables = {"NBDIST_CACHE_DIR", "XDG_CACHE_HOME"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "cache_dir", lambda: usual() if variables & os.environ.keys() else own)
        yield


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plan with the defaults, whatever other tests have measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="session", autouse=True)
def no_launcher_kept() -> Iterator[None]:
    """At the end, what modules have handed on ends too."""
    yield
    reusing_provider.close()


def eventually(happened: Callable[[], object], *, within_s: float) -> None:
    """Poll until `happened()` is true; fail when the time is up."""
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {within_s} s: {happened}"
        threading.Event().wait(POLL_S)


def remains() -> set[str]:
    """What a test could leave: processes, sockets, threads, folders, shared memory, variables."""
    own, kept = psutil.Process(), reusing_provider.belongings
    children = [one for one in own.children(recursive=True) if one.pid not in kept]
    processes = {f"process {p.pid} {_name(p)}" for p in children if runs(p.pid)}
    zombies = {f"zombie {p.pid}" for p in own.children() if not runs(p.pid)}
    listening = {
        f"listener {connection.laddr}"
        for connection in own.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    alive = [one for one in threading.enumerate() if one not in kept]
    threads = {f"thread {one.name}" for one in alive if one.name.startswith("nbdist")}
    folders = {
        f"folder {path}"
        for root in ("/tmp", "/dev/shm")  # noqa: S108 - where sessions make private folders
        for path in Path(root).glob("nbdist-*")
        if path not in kept and _ours(path)
    }
    shared = {f"file {path}" for path in SHARED.glob("torch_*") if _of_the_dead(path)}
    # with more variables, later sessions could not take over a launcher
    variables = {f"variable {name}={value}" for name, value in environment().items()}
    return processes | zombies | listening | threads | folders | shared | variables


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return "(ended)"


def _of_the_dead(path: Path) -> bool:
    """Whether the process that shared these tensors is gone: nobody else will remove them."""
    made_by = re.match(r"torch_(\d+)_", path.name)
    return made_by is not None and not psutil.pid_exists(int(made_by[1]))


def _ours(path: Path) -> bool:
    """Whether this process made it, or one that is gone; not another test run's."""
    made_by = re.fullmatch(r"nbdist-(\d+)-.*", path.name)
    pid = int(made_by[1]) if made_by else 0
    return pid == os.getpid() or (pid > 0 and not psutil.pid_exists(pid))


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Each module leaves the machine as it found it."""
    before = remains()
    yield
    left: set[str] = set()

    def clean() -> bool:
        left.clear()
        left.update(remains() - before)
        return not left

    with suppress(AssertionError):  # what is left says more than that time is up
        eventually(clean, within_s=LEFT_BEHIND_S)
    assert not left
