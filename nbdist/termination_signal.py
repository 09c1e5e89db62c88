"""Calls a function on a thread when SIGTERM arrives; used in the kernel, on ranks and in agents.

Python runs a signal handler on the main thread, between two bytecodes, where it may interrupt code
that holds a lock. The handler therefore only writes to a pipe, which a thread reads. C code writes
to that pipe too (`set_wakeup_fd`), so that the signal is noticed while a library call blocks the
main thread.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class TerminationSignal:
    """Handler of SIGTERM; create it on the main thread.

    Args:
        on_signal: called on a thread for the first SIGTERM; later ones are ignored.
    """

    def __init__(self, on_signal: Callable[[], object]) -> None:
        self._on_signal, self._pid, self._is_delivering = on_signal, os.getpid(), False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        threading.Thread(target=self._wait, name="nbdist-sigterm", daemon=True).start()
        self._before = signal.signal(signal.SIGTERM, self._handle)
        others = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        os.register_at_fork(after_in_child=self._reset)

    def deliver(self) -> None:
        """Let SIGTERM do what it did before; from any thread."""
        self._is_delivering = True
        os.kill(self._pid, signal.SIGTERM)

    def _handle(self, number: int, _: object) -> None:
        if self._is_delivering:
            signal.signal(number, self._before or signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            os.write(self._writing, bytes([number]))

    def _reset(self) -> None:
        """Forget the pipe in a forked child, such as a DataLoader worker."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _wait(self) -> None:
        while signal.SIGTERM not in os.read(self._reading, 64):  # it also gets other signals
            pass
        self._on_signal()
        while os.read(self._reading, 64):  # keep the pipe empty
            pass
