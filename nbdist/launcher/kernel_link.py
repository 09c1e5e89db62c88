"""The launcher's end of the link to the kernel, read on a thread of its own."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from queue import SimpleQueue

from nbdist.hardware import process_identity, shm_cleanup
from nbdist.launcher import process_tree
from nbdist.protocol import messages

log = logging.getLogger("nbdist.launcher")
"""Its messages go to stderr, which is the launcher's log."""


class Link:
    """The launcher's end of the link to the kernel."""

    def __init__(self, fd: int, run_dir: Path, folders: list[str]) -> None:
        """Take over the inherited socket and start to read it.

        Args:
            fd: of the socket.
            run_dir: the launcher's private folder.
            folders: further ones to remove when the kernel is gone.
        """
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._run_dir = run_dir
        self._folders = folders
        self._own = tuple(folders)
        self._ending = False
        self._pid = os.getpid()
        self.launches: SimpleQueue[messages.Launch] = SimpleQueue()
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def send(self, message: messages.LinkMessage) -> None:
        """Send one message; a kernel that is gone is the reading thread's business."""
        if self._ending:
            return  # it would hear of ranks that this launcher has ended itself
        try:
            self._socket.sendall(messages.to_line(message))
        except OSError as error:
            log.warning("not sent, the kernel is gone: %s (%s)", message, error)

    def remove_at_end(self, folder: str) -> None:
        """Remove this folder too when the kernel is gone: the main thread gets no time for it.

        It is noted for the next start, in case this process is killed as well.
        """
        self._folders.append(folder)
        process_identity.note_elsewhere(self._run_dir, Path(folder))

    def close_in_rank(self) -> None:
        """Let go of the link in a forked rank: only the launcher may hold it open."""
        os.close(self._socket.detach())  # close() would wait for the reader's file object

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                message = messages.from_line(line)
                if isinstance(message, messages.Launch):
                    self.launches.put(message)
                elif isinstance(message, messages.Halt):
                    self._halt()
                elif isinstance(message, messages.RemoveAtEnd):
                    self._folders = [one for one in self._folders if one != message.folder]
                    self._folders += [message.folder] if message.remove else []
        self._kernel_is_gone()

    def take_signals(self) -> None:
        """Let SIGTERM and SIGHUP end everything, and SIGINT nothing: Stop is the ranks' business.

        On the main thread, again after each fork: torch elastic puts handlers of its own in
        their place before it forks (2.13), and accelerate leaves no way to say otherwise.
        """
        if os.getpid() != self._pid:
            return  # a rank forks
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.end_by)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_by(self, number: int, _frame: object = None) -> None:
        """End the ranks, then this process by the very signal that asked for it.

        A handler of SIGTERM and SIGHUP: a job scheduler, or the end of a login. The kernel
        sees which signal it was, and still reads the log: its folders stay.
        """
        self._ending = True
        process_tree.end_descendants()
        for folder in set(self._folders) - set(self._own):
            shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _halt(self) -> None:
        if stuck := process_tree.end_descendants():
            # torch elastic would wait for them: the kernel takes another launcher
            log.error("these processes cannot be killed: %s", stuck)
            os._exit(1)

    def _kernel_is_gone(self) -> None:
        process_tree.end_descendants()
        shm_cleanup.remove_left(self._run_dir)
        for folder in (*map(Path, self._folders), self._run_dir):
            process_identity.remove(folder)
        os._exit(0)  # the main thread may sit in torch elastic; nothing is left to save
