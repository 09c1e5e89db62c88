"""Short work that Stop must not cut in two; on a rank, and where values are read."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def unstopped() -> Iterator[None]:
    """Let KeyboardInterrupt come at the end of this, not within."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Stop does not come here
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
