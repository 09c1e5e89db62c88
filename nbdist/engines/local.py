"""Launchers on this machine; runs in the kernel, called by `kernel.session`.

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
from typing import TYPE_CHECKING, Literal

from nbdist import owner, wire
from nbdist.engines import leftovers
from nbdist.engines.environment import scrubbed
from nbdist.engines.log import Log
from nbdist.engines.run_dir import RunDir
from nbdist.errors import StartError
from nbdist.redacted import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

Kind = Literal["cpu", "cuda"]
CLOSE_S = 5.0
"""How long a launcher may take to end its ranks before it is killed with them."""
KILLED_S = 2.0
"""How long what was killed may take to be gone."""
LOG_TAIL_BYTES = 4000
LAUNCHER_GONE = -1
"""Generation of the `Ended` that stands for the launcher's own end."""
LAUNCHER = "the launcher"
"""In place of a rank in that message's exit codes."""


def _nobody(_message: wire.LinkMessage) -> None:
    """Listen to a launcher that no session holds yet."""


class Launcher:
    """A launcher process and the kernel's end of its link.

    Starting it costs milliseconds: its imports run in the background. `listener` gets every
    message of the launcher, on the link's thread; a dead launcher is one last `Ended`.
    """

    def __init__(self, kind: Kind) -> None:
        """Start the process, for ranks on a CPU or on GPUs."""
        self.kind = kind
        self.run_dir = RunDir.create()
        self.warm = False
        """Whether its imports are done."""
        self.listener: Callable[[wire.LinkMessage], None] = _nobody
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
        self._reader = threading.Thread(target=self._read, name="nbdist-link", daemon=True)
        self._reader.start()
        atexit.register(self.close)
        leftovers.sweep_in_background()

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "nbdist.launcher", str(fd), str(self.run_dir.path)]
        env = scrubbed(os.environ) | {
            "NBDIST_BULK_DIR": str(self.run_dir.bulk),
            # by these two, and by nothing else, whatever it starts is known as ours
            owner.KERNEL: owner.Owner.me().to_json(),
            owner.RUN_DIR: str(self.run_dir.path),
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

    def send(self, message: wire.LinkMessage) -> None:
        """Send one message.

        Raises:
            StartError: the launcher is gone.
        """
        try:
            self._link.sendall(wire.to_line(message))
        except OSError as error:
            msg = f"The launcher is gone. Its log ends: {redacted(self.log_tail())}"
            raise StartError(msg) from error

    @property
    def alive(self) -> bool:
        """Whether the process runs (a zombie does not)."""
        return self.process.poll() is None

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
        stuck = leftovers.kill(leftovers.of_launcher(self.run_dir.path))
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
                message = wire.from_line(line)
                self.warm = self.warm or isinstance(message, wire.Warm)
                self.listener(message)
        if self._closing:
            return
        code = self._code(within_s=KILLED_S)
        self.listener(wire.Ended(LAUNCHER_GONE, {} if code is None else {LAUNCHER: code}))
        # it was killed, and its ranks' children know nothing of that
        leftovers.kill(leftovers.of_launcher(self.run_dir.path))


def stuck_words(pids: Iterable[int]) -> str:
    """Say which processes cannot be killed, and what can be done."""
    listed = ", ".join(str(pid) for pid in sorted(pids))
    return (
        f"These processes of the session cannot be killed: {listed}. They sit in a call of the"
        " operating system (state D, a disk or a driver that does not answer) and may hold"
        " memory of a device until it returns or the machine is restarted."
    )


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

    def warm_up(self, kind: Kind) -> None:
        """Start a launcher in the background, if none of this kind waits."""
        self._warm = self.take(kind)

    def take(self, kind: Kind) -> Launcher:
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
