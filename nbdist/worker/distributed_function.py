"""Calls a function of the notebook that `@nbdist.distribute` sent to this rank."""

from __future__ import annotations

import linecache
import platform
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from nbdist.errors import OptionError


def call(namespace: dict[str, Any], python: str) -> Any:
    """Unpickle the variable `_function`, a function with its arguments, and call it.

    The kernel pickled it, which may run any code on this rank anyway.

    Raises:
        OptionError: the kernel's version of Python, `python`, is another one.
    """
    content = namespace.pop("_function")
    own = platform.python_version()
    if own.split(".")[:2] != python.split(".")[:2]:
        raise OptionError(
            f"A distributed function needs the same version of Python on both sides: the notebook"
            f" runs {python}, the ranks {own}. Use a %%distribute cell or Session.run()."
        )
    function, args, kwargs, file, lines = cloudpickle.loads(content)
    # Tracebacks show the lines; an entry without a time of modification is not checked again.
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return function(*args, **kwargs)
