"""Suppress KeyboardInterrupt in the notebook's kernel during work that must not be cut short."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def suppress_interrupt(notify: Callable[[], object]) -> Iterator[None]:
    """Call `notify` on SIGINT instead of raising KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: notify())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
