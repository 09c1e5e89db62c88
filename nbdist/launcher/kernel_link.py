"""The launcher's end of the link to the kernel, read by its own thread."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from queue import SimpleQueue

from nbdist.hardware import process_identity
from nbdist.launcher import process_tree
from nbdist.protocol import messages

log = logging.getLogger("nbdist.launcher")
"""Writes to stderr, which is the launcher's log."""


class KernelLink:
    """The launcher's end of the link to the kernel."""

    def __init__(self, fd: int, run_dir: Path, payload_dir: Path) -> None:
        """Take over the inherited socket and start the reading thread.

        Args:
            fd: file descriptor of the socket.
            run_dir: the launcher's private folder.
            payload_dir: its folder for payload files.
        """
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._run_dir, self._payload_dir = run_dir, payload_dir
        self._folders: list[str] = []
        """Further folders to remove when the kernel ends."""
        self._ending = self._is_terminating = False
        self._pid = os.getpid()
        self.launch_queue: SimpleQueue[messages.LaunchRanksRequest] = SimpleQueue()
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def send(self, message: messages.LauncherMessage) -> None:
        """Send one message. Errors are only logged: the reading thread handles a closed link."""
        if self._ending:
            return  # do not report ranks that this launcher ends itself
        try:
            self._socket.sendall(messages.encode_line(message))
        except OSError as error:
            log.warning("cannot send %s, the kernel has ended (%s)", message, error)

    def register_folder_cleanup(self, folder: str) -> None:
        """Remove this folder too when the kernel ends, on the reading thread.

        It is also recorded for the next start, in case this process is killed.
        """
        self._folders.append(folder)
        process_identity.record_linked_folder(self._run_dir, Path(folder))

    def close_in_rank(self) -> None:
        """Close the link in a forked rank: only the launcher may keep it open."""
        os.close(self._socket.detach())  # close() would wait for the reader's file object

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                message = messages.decode_line(line)
                if isinstance(message, messages.LaunchRanksRequest):
                    self.launch_queue.put(message)
                elif isinstance(message, messages.StopRanksRequest):
                    if stuck := process_tree.end_descendants():
                        # torch elastic would wait for them; the kernel starts another launcher
                        log.error("cannot kill these processes: %s", stuck)
                        os._exit(1)
                elif isinstance(message, messages.CleanupFolderRequest):
                    self._folders = [folder for folder in self._folders if folder != message.folder]
                    self._folders += [message.folder] if message.remove else []
        # The kernel has ended.
        process_tree.end_descendants()
        process_identity.remove_orphaned_files(self._run_dir)
        for folder in (*map(Path, self._folders), self._payload_dir, self._run_dir):
            process_identity.remove_folder(folder)
        os._exit(0)  # the main thread may be blocked in torch elastic

    def install_signal_actions(self) -> None:
        """Make SIGTERM and SIGHUP end everything, and ignore SIGINT, which only ranks handle.

        The first SIGTERM is reported to the kernel, which saves and then ends this launcher.

        Call it on the main thread and again after each fork.
        """
        # torch elastic 2.13 replaces the handlers before it forks, and accelerate does not pass on
        # torch's option against it
        if os.getpid() != self._pid:
            return  # a rank forked
        terminate = self.exit_by_signal if self._is_terminating else self._request_termination
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGHUP, self.exit_by_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _request_termination(self, number: int, _frame: object = None) -> None:
        self._is_terminating = True
        signal.signal(number, self.exit_by_signal)
        self.send(messages.TerminationNotice("SIGTERM to the launcher"))
        grace = threading.Timer(messages.TERMINATION_GRACE_S, os.kill, (self._pid, signal.SIGTERM))
        grace.daemon = True
        grace.start()

    def exit_by_signal(self, number: int, _frame: object = None) -> None:
        """End the ranks, then end this process by the signal it received.

        Handles SIGTERM and SIGHUP, from a job scheduler or a logout. The kernel sees the signal and
        still reads the log, so the launcher's own folders are kept.
        """
        self._ending = True
        process_tree.end_descendants()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
