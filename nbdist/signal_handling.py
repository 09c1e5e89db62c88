"""Defers KeyboardInterrupt, and calls a function on SIGTERM; used in all processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLOSE_S = 1.0


@contextlib.contextmanager
def defer_interrupt() -> Iterator[None]:
    """Defer KeyboardInterrupt until the block has finished."""
    received: list[bool] = []
    with suppress_interrupt(lambda: received.append(True)):
        yield
    if received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def suppress_interrupt(notify: Callable[[], object]) -> Iterator[None]:
    """Call `notify` on SIGINT instead of raising KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield  # SIGINT handlers run only on the main thread
        return
    before = signal.signal(signal.SIGINT, lambda *_: notify())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class TerminationSignal:
    """Handler of SIGTERM that calls a function on a thread; create it on the main thread.

    Python runs a signal handler on the main thread, between two bytecodes, where it may interrupt
    code that holds a lock. The handler therefore only writes to a pipe, which a thread reads. C
    code writes to that pipe too (`set_wakeup_fd`), so that the signal is noticed while a library
    call blocks the main thread.

    Args:
        on_signal: called on a thread for the first SIGTERM; later ones are ignored.
    """

    def __init__(self, on_signal: Callable[[], object]) -> None:
        self._on_signal, self._pid = on_signal, os.getpid()
        self._is_installed, self._is_delivering = True, False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._thread = threading.Thread(target=self._wait, name="nbdist-sigterm", daemon=True)
        self._thread.start()
        self._before = signal.signal(signal.SIGTERM, self._handle)
        others = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        os.register_at_fork(after_in_child=self._restore)

    def deliver(self) -> None:
        """Send SIGTERM to this process again, for the handler before; from any thread."""
        self._is_delivering = True
        os.kill(self._pid, signal.SIGTERM)

    def close(self) -> None:
        """Restore the handler before and end the thread; on the main thread."""
        self._restore()
        os.close(self._writing)
        self._thread.join(CLOSE_S)

    def _handle(self, number: int, _: object) -> None:
        if self._is_delivering:
            self._restore()
            os.kill(self._pid, number)
        else:
            os.write(self._writing, bytes([number]))

    def _restore(self) -> None:
        """Restore the handler before; also in a forked child, such as a DataLoader worker."""
        if self._is_installed:
            self._is_installed = False
            others = signal.set_wakeup_fd(-1)
            if others != self._writing:
                signal.set_wakeup_fd(others)
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _wait(self) -> None:
        is_first = True
        while numbers := os.read(self._reading, 64):  # it also gets other signals
            if is_first and signal.SIGTERM in numbers:
                is_first = False
                self._on_signal()
        os.close(self._reading)
