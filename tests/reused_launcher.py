"""Warm launchers for most sessions of a pytest process: their imports take longer than a test."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from nbdist import rank_python
from nbdist.cluster.launcher_process import remove_launch_variables
from nbdist.cluster.local_launcher import Launcher, LocalLauncherProvider
from nbdist.protocol import messages
from nbdist.session import session as session_module
from tests.processes import wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.cluster.allocation import DeviceType
    from nbdist.rank_python import RankPython

    Listener = Callable[[messages.LauncherMessage], None]

ENDED_S = 15.0
MAX_KEPT = 2
"""A test may start a session beside the one of its module."""


SET_BY_LIBRARIES = {
    "PYDEVD_USE_FRAME_EVAL",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Of the pytest process, by debugpy, accelerate and torch while they run."""


def environment() -> dict[str, str]:
    """What a launcher's process has been started with, but for pytest's and libraries' own."""
    return {
        name: value
        for name, value in remove_launch_variables(os.environ).items()
        if not name.startswith("PYTEST_") and name not in SET_BY_LIBRARIES
    }


class ReusedLauncher(Launcher):
    """A launcher that the next session takes over when a session has closed it."""

    def __init__(
        self, kind: DeviceType, python: RankPython, reusing_provider: ReusingLauncherProvider
    ) -> None:
        self._keeper = reusing_provider
        self._nobody_runs = threading.Event()
        self._nobody_runs.set()
        self._is_ending = False
        self._has_imported_all = False
        self._tell: Listener | None = None
        self.made_under = environment()
        super().__init__(kind, python)

    @property
    def listener(self) -> Listener:
        """Hears the launcher, and notes when its ranks have ended."""
        return self._hear

    @listener.setter
    def listener(self, tell: Listener) -> None:
        self._tell = tell

    def _hear(self, message: messages.LauncherMessage) -> None:
        if isinstance(message, messages.AllRanksExited):
            self._nobody_runs.set()
        self._is_ending |= isinstance(message, messages.TerminationNotice)
        if self._tell is not None:
            self._tell(message)

    def send(self, message: messages.LauncherMessage) -> None:
        if isinstance(message, messages.LaunchRanksRequest):
            self._nobody_runs.clear()
        super().send(message)

    def close(self) -> None:
        """Wait for the next session; one that does not end its ranks is ended itself."""
        if not self._keeper.keep(self):
            super().close()

    def emptied(self) -> bool:
        """End the ranks and remove what the session left in the folders; False: it cannot."""
        self.listener = lambda _message: None
        if self._is_ending or not self.is_alive:
            return False
        if not self._nobody_runs.is_set():
            self.resume_stopped()
            super().send(messages.StopRanksRequest())
        if not self._nobody_runs.wait(ENDED_S) or not self.is_alive:
            return False
        for path in (*self.run_dir.payload_dir.iterdir(), *self.run_dir.path.iterdir()):
            if path.is_dir():
                shutil.rmtree(path)
            elif not path.name.startswith("."):  # whose the folder is
                path.unlink()
        return True

    def import_all(self) -> None:
        """Wait for the imports of an idle launcher; the ranks of later sessions need none."""
        if not self._has_imported_all:
            wait_until_idle(self.process.pid)
            self._has_imported_all = True

    @property
    def belongings(self) -> set[object]:
        """Its process, folders and threads: no session has left them behind."""
        folders = {self.run_dir.path, self.run_dir.payload_dir}
        return {self.process.pid, *folders, self._reader, self.log.thread}


class ReusingLauncherProvider(LocalLauncherProvider):
    """Gives a launcher that an earlier session has used, where nothing has changed since."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[ReusedLauncher] = []
        self._usual = environment()
        self._ending = False

    @property
    def belongings(self) -> set[object]:
        """Processes, folders and threads of the launchers that are kept."""
        return {belonging for kept in self._kept for belonging in kept.belongings}

    def acquire_launchers(
        self,
        kind: DeviceType,
        world_size: int = 0,  # noqa: ARG002 - no limit
        progress: Callable[[str], None] | None = None,  # noqa: ARG002 - no long step
        python: RankPython = rank_python.KERNEL_PYTHON,
    ) -> Launcher:
        """Hand over a kept launcher of this kind, or a new one."""
        wanted = (kind, python, environment())
        for kept in self._kept:
            if (kept.kind, kept.python, kept.made_under) == wanted:
                self._kept.remove(kept)
                return kept
        python.check()
        return ReusedLauncher(kind, python, self)

    def keep(self, launcher: ReusedLauncher) -> bool:
        """Keep a launcher that no session needs.

        Returns False where enough are kept already, and for one that few tests could use.
        """
        if launcher.python != rank_python.KERNEL_PYTHON or launcher.made_under != self._usual:
            return False
        if not self._ending and len(self._kept) < MAX_KEPT and launcher.emptied():
            launcher.import_all()
            self._kept.append(launcher)
        return launcher in self._kept

    def end(self) -> None:
        while self._kept:
            Launcher.close(self._kept.pop())

    def close(self) -> None:
        self._ending = True
        self.end()


reusing_provider = ReusingLauncherProvider()
"""Of this pytest process."""


@contextmanager
def reusing_launchers() -> Iterator[None]:
    """Let sessions take over the launcher of those before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module, "LocalLauncherProvider", lambda: reusing_provider)
        yield
