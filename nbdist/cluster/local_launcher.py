"""Launchers on this machine; runs in the kernel.

A launcher is executed, not forked from the kernel, in a session of its own (setsid), because
Jupyter's interrupt signals the kernel's process group. It ends with the kernel, which alone holds
the other end of its link.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import rank_python
from nbdist._version import __version__
from nbdist.cluster import launcher_process
from nbdist.cluster.launcher_process import (
    CrashArtifacts,
    ProcessLogTail,
    ProcessStatus,
    check_descriptors,
    remove_launch_variables,
)
from nbdist.cluster.rank_channels import LocalRankChannels, write_connections
from nbdist.cluster.run_dir import (
    RunDir,
    kill_processes,
    launcher_process_filter,
    make_private,
    payload_roots,
    remove_orphans_async,
)
from nbdist.errors import StartError
from nbdist.hardware import process_identity
from nbdist.protocol import messages
from nbdist.redaction import redact_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.cluster.allocation import DeviceType
    from nbdist.cluster.launcher_process import RankProcess, TransferCallback
    from nbdist.cluster.rank_channels import MessageListener, RankChannels
    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import NodeUsage
    from nbdist.rank_python import RankPython

CLOSE_S = 5.0
"""Time for a launcher to end its ranks before it is killed with them."""
KILL_TIMEOUT_S = 2.0
"""Time for killed processes to exit."""
LOG_TAIL_BYTES = 4000
LAUNCHER_GONE = -1
"""Generation of the message that reports the launcher's own end."""
LAUNCHER_NAME = "the launcher"
"""Key of the launcher, in place of a rank, in that message's exit codes."""


def ignore_message(_message: messages.LauncherMessage) -> None:
    """Ignore messages before a session has taken the launcher, and while it is closed."""


class Launcher:
    """A launcher process and the kernel's end of its link.

    `NodeGroup` has the same methods for launchers on several nodes.

    Starting takes milliseconds: imports run in the background. `listener` is called with every
    message of the launcher on the link's thread. The launcher's own end is a last message.
    """

    module = "nbdist.launcher"
    is_warm = False
    """True if its imports are done."""

    def __init__(self, kind: DeviceType, python: RankPython = rank_python.KERNEL_PYTHON) -> None:
        self.kind, self.python = kind, python
        self.run_dir = RunDir.create()
        self._package_folder = python.link_package(self.run_dir.path)
        self.listener: Callable[[messages.LauncherMessage], None] = ignore_message
        self.log = ProcessLogTail()
        self._link, theirs = socket.socketpair()
        fd = theirs.fileno()
        kernel = process_identity.ProcessIdentity.current_process()
        inherited = python.environment(os.environ, self._package_folder)
        env = remove_launch_variables(inherited) | {
            "NBDIST_BULK_DIR": str(self.run_dir.payload_dir),
            # these two identify all descendants as processes of this session
            process_identity.KERNEL_VARIABLE: kernel.to_json(),
            process_identity.RUN_DIR_VARIABLE: str(self.run_dir.path),
            "DS_ACCELERATOR": kind,  # read only when DeepSpeed is imported
        }
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [python.executable, "-m", self.module, str(fd), str(self.run_dir.path)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.log.write_fd,
                stderr=self.log.write_fd,
                pass_fds=[fd],
                start_new_session=True,
            )
        except OSError as error:
            self.log.close()
            self.run_dir.remove()
            raise StartError(f"Cannot start the launcher: {error}.") from error
        finally:
            os.close(self.log.write_fd)
            theirs.close()
        self._closing = False
        self._refusal = ""
        """Why the launcher's protocol cannot be used."""
        self._folder = self.run_dir.path
        """Folder of the last start of the ranks."""
        self._reader = threading.Thread(target=self._read, name="nbdist-link", daemon=True)
        self._reader.start()
        atexit.register(self.close)
        remove_orphans_async()

    def send(self, message: messages.LauncherMessage) -> None:
        """Send one message.

        Raises:
            StartError: the launcher has ended.
        """
        try:
            self._link.sendall(messages.encode_line(message))
        except OSError as error:
            code = self._wait_for_exit_code(within_s=KILL_TIMEOUT_S)
            if self._refusal:  # the reader has closed the link
                raise StartError(f"Cannot start ranks: {self._refusal}.") from None
            problem = "has closed its link"
            if code is not None:
                problem = f"ended with {launcher_process.describe_exit_code(code)}"
            log = redact_secrets(self.log_tail())
            raise StartError(
                f"Cannot start ranks: {LAUNCHER_NAME} {problem}. Its log: {log}"
            ) from error

    @property
    def is_alive(self) -> bool:
        """True if the process runs and is not a zombie."""
        return self.process.poll() is None

    def can_start(self, kind: DeviceType, world_size: int) -> bool:  # noqa: ARG002 - no limit
        """Return True if it can start this many ranks of this kind."""
        return self.is_alive and self.kind == kind

    def launch(
        self, launch: messages.LaunchRanksRequest, key: str, reader: MessageListener
    ) -> RankChannels:
        """Start ranks and open the channels to them.

        Args:
            launch: the launch message, without folders.
            key: key that signs messages.
            reader: receives the ranks' messages.

        Raises:
            StartError: too few file descriptors, or the launcher has ended.
        """
        check_descriptors(launch.world_size)
        folder = self.make_start_folder(launch.generation)
        connections = write_connections(folder, world_size=launch.world_size, key=key.encode())
        channels = LocalRankChannels(connections, reader)
        try:
            run_dir, bulk = str(folder), str(self.run_dir.payload_dir)
            env = self.python.environment(launch.env, self._package_folder)
            path = self.python.import_path(launch.path, self._package_folder)
            self.send(replace(launch, run_dir=run_dir, bulk_dir=bulk, env=env, path=path))
        except BaseException:
            channels.close()
            raise
        return channels

    def make_start_folder(self, generation: int) -> Path:
        """Create the folder of a new start of the ranks, and remove that of the last one."""
        self._folder = self.run_dir.make_start_folder(generation)
        return self._folder

    def describe(self) -> list[dict[str, Any]]:
        """Return the launcher as JSON values."""
        pid = self.process.pid
        return [{"pid": pid, "alive": self.is_alive, "name": LAUNCHER_NAME, "node": ""}]

    def node_of(self, rank: int) -> str:  # noqa: ARG002 - one machine
        """Return the name of a rank's node, here ""."""
        return ""

    def nodes_for(self, world_size: int) -> list[SessionNode]:  # noqa: ARG002 - one machine
        """Return no nodes: the ranks are on this machine."""
        return []

    def node_usage(self, within_s: float) -> dict[str, NodeUsage]:  # noqa: ARG002 - one machine
        """Return no nodes: the ranks are on this machine."""
        return {}

    def process_statuses(self, members: Mapping[int, RankProcess]) -> dict[str, ProcessStatus]:
        """Return the status of ranks and launcher, by name: "rank 1", "the launcher"."""
        pid = self.process.pid
        found = {
            f"rank {rank}": ProcessStatus(
                member.pid, launcher_process.process_status(member.pid, member.start_ticks)
            )
            for rank, member in members.items()
        }
        return found | {LAUNCHER_NAME: ProcessStatus(pid, launcher_process.process_status(pid))}

    def dump_stacks(self, pids: Mapping[int, int], *, launchers: bool) -> dict[str, str]:
        """Dump Python stacks by signal: of ranks ("rank1") and optionally of "launcher".

        Args:
            pids: process ids by rank.
            launchers: True to include the launcher.
        """
        own = self.process.pid
        stacks = {}
        if launchers:
            stacks = launcher_process.dump_stacks(
                self.run_dir.path, {"launcher": own}, launcher=own
            )
        ranks = {f"rank{rank}": pid for rank, pid in sorted(pids.items())}
        return stacks | launcher_process.dump_stacks(self._folder, ranks, launcher=own)

    def crash_artifacts(self) -> CrashArtifacts:
        """Return the crash artifacts of the last ranks."""
        crashes = {
            int(file.stem.removeprefix("rank")): file.read_text(errors="replace")
            for file in self._folder.glob("rank*.crash")
        }
        notes = sorted(self._folder.glob("*.died"), key=lambda note: note.stat().st_mtime)
        tracebacks = [(int(note.stem.removeprefix("rank")), note.read_text()) for note in notes]
        return CrashArtifacts(crashes, tracebacks)

    def payload_folders(self, rank: int) -> list[str]:  # noqa: ARG002 - those of the kernel
        """Return the folders for a rank's payload files, preferred first."""
        return [str(folder) for folder in self.run_dir.folders]

    @contextlib.contextmanager
    def ship_file(
        self,
        file: Path,
        ranks: Sequence[int],
        on_progress: TransferCallback,  # noqa: ARG002 - no transfer
    ) -> Iterator[dict[int, str]]:
        """Yield the file's own path for all ranks; remove the file at the end."""
        try:
            yield dict.fromkeys(ranks, str(file))
        finally:
            file.unlink(missing_ok=True)

    def fetch_file(self, rank: int, path: str, on_progress: TransferCallback) -> Path:  # noqa: ARG002 - no transfer
        """Return the path of a payload file; raises PayloadError outside the session's folders."""
        launcher_process.check_payload_path(path, self.payload_folders(rank))
        return Path(path)

    def check_shared_folder(self, folder: Path) -> None:
        """Do nothing: all ranks are on this machine."""

    def check_shared_folder_async(self, folder: Path, on_warning: Callable[[str], object]) -> None:
        """Do nothing: all ranks are on this machine."""

    def make_private_folders(self) -> list[Path]:
        """Create empty folders for files between ranks."""
        return [make_private([folder], "payload files") for folder in payload_roots()]

    def log_tail(self) -> str:
        """Return the end of the output of launcher and ranks outside of cells."""
        return self.log.tail(LOG_TAIL_BYTES).strip()

    def resume_stopped(self) -> None:
        """Resume the launcher if it is stopped, so that it can end its ranks."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the launcher with everything it started; leave nothing behind.

        Takes at most nine seconds; a warning names processes that cannot be killed.
        """
        self.listener, self._closing = ignore_message, True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self.resume_stopped()
        if self._wait_for_exit_code(within_s=CLOSE_S) is None:
            self.process.kill()
        stuck = kill_processes(launcher_process_filter(self.run_dir.path))
        if self._wait_for_exit_code(within_s=KILL_TIMEOUT_S) is None:
            stuck.add(self.process.pid)
        if stuck:
            listed = ", ".join(str(pid) for pid in sorted(stuck))
            msg = (
                f"These processes of the session cannot be killed: {listed}. They are blocked in a"
                " system call (state D, a disk or driver that does not respond) and may hold device"
                " memory until the call returns or the machine is restarted."
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=2)
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_S)
        self._link.close()
        self.log.close()
        self.run_dir.remove()
        atexit.unregister(self.close)

    def _wait_for_exit_code(self, *, within_s: float) -> int | None:
        """Return its exit code, negative for a signal; None if it does not end in time."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def _read(self) -> None:
        # A launcher that is killed with unread data resets the link instead of closing it.
        with contextlib.suppress(ConnectionResetError), self._link.makefile("rb") as lines:
            for line in lines:
                message = messages.decode_line(line)
                if (
                    isinstance(message, messages.LauncherHello)
                    and message.protocol != messages.PROTOCOL
                ):
                    self._refusal = (
                        f"the launcher uses protocol {message.protocol} (nbdist {message.version})"
                        f" and this notebook protocol {messages.PROTOCOL} (nbdist {__version__}):"
                        " nbdist was replaced while the notebook ran. Restart the notebook's kernel"
                    )
                    self._link.shutdown(socket.SHUT_RDWR)  # ends the launcher
                    break
                self.is_warm = self.is_warm or isinstance(message, messages.LauncherReady)
                self.listener(message)
        if self._closing:
            return
        code = self._wait_for_exit_code(within_s=KILL_TIMEOUT_S)
        codes = {} if code is None or self._refusal else {LAUNCHER_NAME: code}
        self.listener(messages.AllRanksExited(LAUNCHER_GONE, codes, error=self._refusal))
        # the launcher was killed, so its descendants must be ended here
        kill_processes(launcher_process_filter(self.run_dir.path))


class LocalLauncherProvider:
    """Provides launchers on this machine and keeps one ready in advance."""

    def __init__(self) -> None:
        self._warm: Launcher | None = None

    def warm_up(self, kind: DeviceType, python: RankPython = rank_python.KERNEL_PYTHON) -> None:
        """Start a launcher of this kind in the background, unless one is ready."""
        with contextlib.suppress(StartError):  # the first cell raises it
            self._warm = self.acquire_launchers(kind, python=python)

    def acquire_launchers(
        self,
        kind: DeviceType,
        world_size: int = 0,  # noqa: ARG002 - no limit
        progress: Callable[[str], None] | None = None,  # noqa: ARG002 - no long step
        python: RankPython = rank_python.KERNEL_PYTHON,
    ) -> Launcher:
        """Return the ready launcher, or a new one; the caller closes it.

        Raises:
            StartError: packages that ranks need are missing or too old.
        """
        warm, self._warm = self._warm, None
        if warm is not None and warm.is_alive and (warm.kind, warm.python) == (kind, python):
            return warm
        if warm is not None:
            warm.close()
        python.check()
        return Launcher(kind, python)

    def close(self) -> None:
        """End an unused launcher."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None
