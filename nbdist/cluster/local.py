"""Launchers on this machine; runs in the kernel, called by `session.session`.

A launcher is executed, never forked from the kernel, in a session of its own: Jupyter's
interrupt signals the kernel's whole process group. It dies with the kernel because only
the kernel holds the other end of its link.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.cluster import orphan_cleanup, process_inspection
from nbdist.cluster.file_limits import check_descriptors
from nbdist.cluster.interfaces import Process
from nbdist.cluster.process_log import Log
from nbdist.cluster.rank_channels import Sockets, write_connections
from nbdist.cluster.rank_environment import scrubbed
from nbdist.cluster.run_dir import RunDir, private_folders
from nbdist.errors import PayloadError, StartError
from nbdist.hardware import process_identity
from nbdist.protocol import messages
from nbdist.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nbdist.cluster.allocation import Kind
    from nbdist.cluster.interfaces import Left, Member, Moved
    from nbdist.cluster.rank_channels import Channels, Reader
    from nbdist.hardware.discovery import Node
    from nbdist.hardware.telemetry import Now

CLOSE_S = 5.0
"""How long a launcher may take to end its ranks before it is killed with them."""
KILLED_S = 2.0
"""How long what was killed may take to be gone."""
LOG_TAIL_BYTES = 4000
LAUNCHER_GONE = -1
"""Generation of the `Ended` that stands for the launcher's own end."""
LAUNCHER = "the launcher"
"""In place of a rank in that message's exit codes."""


def _nobody(_message: messages.LinkMessage) -> None:
    """Listen to a launcher that no session holds yet."""


def _silent(_text: str) -> None:
    """Show nothing."""


class Launcher:
    """A launcher process and the kernel's end of its link.

    Starting it costs milliseconds: its imports run in the background. `listener` gets every
    message of the launcher, on the link's thread; a dead launcher is one last `Ended`.
    """

    module = "nbdist.launcher"

    def __init__(self, kind: Kind) -> None:
        """Start the process, for ranks on a CPU or on GPUs."""
        self.kind = kind
        self.run_dir = RunDir.create()
        self.warm = False
        """Whether its imports are done."""
        self.listener: Callable[[messages.LinkMessage], None] = _nobody
        self.log = Log()
        self._link, theirs = socket.socketpair()
        try:
            self.process = self._spawn(theirs)
        except OSError as error:
            self.log.close()
            self.run_dir.remove()
            msg = f"The launcher did not start: {error}."
            raise StartError(msg) from error
        finally:
            self.log.started()
            theirs.close()
        self._closing = False
        self._folder = self.run_dir.path
        """Of the last start of the ranks."""
        self._reader = threading.Thread(target=self._read, name="nbdist-link", daemon=True)
        self._reader.start()
        atexit.register(self.close)
        orphan_cleanup.sweep_in_background()

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fd = theirs.fileno()
        command = [sys.executable, "-m", self.module, str(fd), str(self.run_dir.path)]
        env = scrubbed(os.environ) | {
            "NBDIST_BULK_DIR": str(self.run_dir.bulk),
            # by these two, and by nothing else, whatever it starts is known as ours
            process_identity.KERNEL: process_identity.Owner.me().to_json(),
            process_identity.RUN_DIR: str(self.run_dir.path),
            "DS_ACCELERATOR": self.kind,  # read when DeepSpeed is imported, and only then
        }
        return subprocess.Popen(  # noqa: S603 - our own module under this interpreter
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self.log.writing,
            stderr=self.log.writing,
            pass_fds=[fd],
            start_new_session=True,
        )

    def send(self, message: messages.LinkMessage) -> None:
        """Send one message.

        Raises:
            StartError: the launcher is gone.
        """
        try:
            self._link.sendall(messages.to_line(message))
        except OSError as error:
            how = _end_words(self._code(within_s=KILLED_S))
            msg = f"No ranks can start: {LAUNCHER} {how}. Its log ends: {redacted(self.log_tail())}"
            raise StartError(msg) from error

    @property
    def alive(self) -> bool:
        """Whether the process runs (a zombie does not)."""
        return self.process.poll() is None

    def fits(self, kind: Kind, world_size: int) -> bool:  # noqa: ARG002 - of any number
        """Whether it can start so many ranks of this kind."""
        return self.alive and self.kind == kind

    def launch(self, launch: messages.Launch, key: str, reader: Reader) -> Channels:
        """Start ranks and open the channels to them; raises StartError."""
        self._folder = self.run_dir.generation(launch.generation)
        connections = write_connections(
            self._folder, world_size=launch.world_size, key=key.encode()
        )
        channels = Sockets(connections, reader)
        try:
            run_dir, bulk = str(self._folder), str(self.run_dir.bulk)
            self.send(replace(launch, run_dir=run_dir, bulk_dir=bulk))
        except BaseException:
            channels.close()
            raise
        return channels

    def describe(self) -> list[dict[str, Any]]:
        """The launcher as plain values."""
        pid = self.process.pid
        return [{"pid": pid, "alive": self.alive, "name": LAUNCHER, "node": ""}]

    def node_of(self, rank: int) -> str:  # noqa: ARG002 - all are here
        """No node has a name on one machine."""
        return ""

    def nodes(self, world_size: int) -> list[Node]:  # noqa: ARG002 - all are here
        """No other machine."""
        return []

    def now(self, within_s: float) -> dict[str, Now]:  # noqa: ARG002 - nobody is asked
        """No node says anything."""
        return {}

    def processes(self, members: Mapping[int, Member]) -> dict[str, Process]:
        """How ranks and launcher are, by name."""
        pid = self.process.pid
        found = {
            f"rank {rank}": Process(one.pid, process_inspection.status(one.pid, one.created))
            for rank, one in members.items()
        }
        return found | {LAUNCHER: Process(pid, process_inspection.status(pid))}

    def stacks(self, pids: Mapping[int, int], *, launchers: bool) -> dict[str, str]:
        """Python stacks by signal."""
        own = self.process.pid
        told = {}
        if launchers:
            told = process_inspection.stacks(self.run_dir.path, {"launcher": own}, launcher=own)
        ranks = {f"rank{rank}": pid for rank, pid in sorted(pids.items())}
        return told | process_inspection.stacks(self._folder, ranks, launcher=own)

    def left(self) -> Left:
        """What the ranks of the last start have left."""
        return process_inspection.left(self._folder)

    @property
    def staging(self) -> list[Path]:
        """Where the kernel puts payload files: shared memory, then the temp folder."""
        return [self.run_dir.bulk, self.run_dir.path]

    def folders(self, rank: int) -> list[str]:  # noqa: ARG002 - the same for all
        """Where ranks put payload files: the same."""
        return [str(folder) for folder in self.staging]

    @contextlib.contextmanager
    def shipped(
        self,
        file: Path,
        ranks: Sequence[int],
        told: Moved,  # noqa: ARG002 - nothing moves
    ) -> Iterator[dict[int, str]]:
        """A file is where the ranks are; it is removed at the end."""
        try:
            yield dict.fromkeys(ranks, str(file))
        finally:
            file.unlink(missing_ok=True)

    def fetch(self, rank: int, path: str, told: Moved) -> Path:  # noqa: ARG002 - nothing moves
        """A payload file is here already; raises PayloadError where it is none of ours."""
        if str(Path(path).parent) not in self.folders(rank):
            raise PayloadError(foreign_words(path))
        return Path(path)

    def see(self, folder: Path) -> None:
        """Nothing to look at: all is on one machine."""

    def see_later(self, folder: Path, complain: Callable[[str], object]) -> None:
        """Nothing to look at either."""

    def private_folders(self) -> list[Path]:
        """Make empty folders for what passes from ranks to ranks."""
        return private_folders()

    def log_tail(self) -> str:
        """The end of what launcher and ranks wrote outside of cells."""
        return self.log.tail(LOG_TAIL_BYTES).strip()

    def wake_up(self) -> None:
        """Let it go on if it is stopped: it cannot end anything until then."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the launcher with everything it started; leave nothing behind.

        Bounded by nine seconds: a process that cannot be killed is named in a warning.
        """
        self.listener, self._closing = _nobody, True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self.wake_up()
        if self._code(within_s=CLOSE_S) is None:
            self.process.kill()
        stuck = orphan_cleanup.kill(orphan_cleanup.of_launcher(self.run_dir.path))
        if self._code(within_s=KILLED_S) is None:
            stuck.add(self.process.pid)
        if stuck:
            warnings.warn(stuck_words(stuck), RuntimeWarning, stacklevel=2)
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_S)
        self._link.close()
        self.log.close()
        self.run_dir.remove()
        atexit.unregister(self.close)

    def _code(self, *, within_s: float) -> int | None:
        """Its exit code, negative for a signal; None: it has not ended within this time."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def _read(self) -> None:
        # A launcher that is killed with something unread resets the link instead of ending it.
        with contextlib.suppress(ConnectionResetError), self._link.makefile("rb") as lines:
            for line in lines:
                message = messages.from_line(line)
                self.warm = self.warm or isinstance(message, messages.Warm)
                self.listener(message)
        if self._closing:
            return
        code = self._code(within_s=KILLED_S)
        self.listener(messages.Ended(LAUNCHER_GONE, {} if code is None else {LAUNCHER: code}))
        # it was killed, and its ranks' children know nothing of that
        orphan_cleanup.kill(orphan_cleanup.of_launcher(self.run_dir.path))


def _end_words(code: int | None) -> str:
    """How a process has ended."""
    if code is None:
        return "has closed its link"
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"


def stuck_words(pids: Iterable[int]) -> str:
    """Say which processes cannot be killed, and what can be done."""
    listed = ", ".join(str(pid) for pid in sorted(pids))
    return (
        f"These processes of the session cannot be killed: {listed}. They sit in a call of the"
        " operating system (state D, a disk or a driver that does not answer) and may hold"
        " memory of a device until it returns or the machine is restarted."
    )


def foreign_words(path: str) -> str:
    """Say that a rank named a file that is none of the session's."""
    return f"A rank named {path}, which lies outside of this session's own folders."


class LocalEngine:
    """Gives launchers on this machine and keeps one warm ahead of need.

    Args:
        memory_events: the file that counts what the OOM killer has killed, "memory.events" of
            a cgroup. Default: that of this process.
    """

    def __init__(self, memory_events: Path | None = None) -> None:
        """Hold no launcher yet."""
        self.memory_events = memory_events
        self._warm: Launcher | None = None

    def check(self, world_size: int) -> None:
        """Refuse ranks that this machine has no file descriptors for; raises StartError."""
        check_descriptors(world_size)

    def warm_up(self, kind: Kind) -> None:
        """Start a launcher in the background, if none of this kind waits."""
        self._warm = self.take(kind)

    def take(
        self,
        kind: Kind,
        world_size: int = 0,  # noqa: ARG002 - any number
        progress: Callable[[str], None] = _silent,  # noqa: ARG002 - nothing takes long
    ) -> Launcher:
        """Hand over the warm launcher, or a new one; the caller closes it."""
        warm, self._warm = self._warm, None
        if warm is not None and warm.alive and warm.kind == kind:
            return warm
        if warm is not None:
            warm.close()
        return Launcher(kind)

    def close(self) -> None:
        """End a launcher that nobody took."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None
