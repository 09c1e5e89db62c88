"""Work of the notebook's kernel that Stop must not cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def not_stopped(tell: Callable[[], object]) -> Iterator[None]:
    """Let Stop have no other effect meanwhile than this call."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: tell())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
