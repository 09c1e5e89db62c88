"""Detects whether torch.compile is in use in this process.

Measurements must not affect compilation: dynamo permanently falls back to eager for a function
that it sees under a dispatch mode, and recompiles when hooks are added or removed.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def is_compile_active() -> bool:
    """Return whether compiled code is alive; dynamo (torch 2.13) keeps it in a weak map."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.orig_code_map.values)


def on_compile(notify: Callable[[], object]) -> Callable[[], object]:
    """Register a callback for the start of a compilation; return a function that removes it."""
    dynamo: Any = sys.modules.get("torch._dynamo.callback")
    if dynamo is None:  # nothing has been compiled yet
        return lambda: None
    handler = dynamo.callback_handler
    callback = handler.register_start_callback(lambda _: notify())

    def remove() -> None:
        with contextlib.suppress(ValueError):  # torch.compiler.reset() has removed it
            handler.remove_start_callback(callback)

    return remove
