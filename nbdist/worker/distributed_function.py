"""Calls a function of the notebook that `@nbdist.distribute` sent to this rank."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Mapping


def call(content: bytes, namespace: Mapping[str, Any]) -> Any:
    """Unpickle a function with its arguments, and return what it returns.

    Args:
        content: what the kernel pickled, which may run any code on this rank anyway.
        namespace: variables of this rank; the function sees those that it did not bring itself.
    """
    function, args, kwargs, file, lines = cloudpickle.loads(content)
    # Tracebacks show the lines; an entry without a time of modification is not checked again.
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    for name, value in namespace.items():
        function.__globals__.setdefault(name, value)
    return function(*args, **kwargs)
