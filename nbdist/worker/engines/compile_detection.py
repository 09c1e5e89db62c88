"""Whether torch.compile is at work in this process; runs on a rank.

What is measured must not change what is compiled: dynamo gives a function up for good that it
meets under a dispatch mode, and compiles one anew where a hook has come or gone.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def in_use() -> bool:
    """Whether code that torch.compile made lives; dynamo (torch 2.13) keeps it in a weak map."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.orig_code_map.values)


def hear(tell: Callable[[], object]) -> Callable[[], object]:
    """Have it said when something begins to be compiled; returns what ends that."""
    dynamo: Any = sys.modules.get("torch._dynamo.callback")
    if dynamo is None:  # as long as nothing is compiled
        return lambda: None
    handler = dynamo.callback_handler
    callback = handler.register_start_callback(lambda _: tell())

    def unhear() -> None:
        with contextlib.suppress(ValueError):  # torch.compiler.reset() has removed it
            handler.remove_start_callback(callback)

    return unhear
