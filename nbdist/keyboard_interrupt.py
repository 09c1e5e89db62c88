"""Defer or suppress KeyboardInterrupt in critical sections; used on ranks and in the kernel."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
