"""Messages of PayloadError: where a value is unsupported, what is allowed, what to do instead."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from nbdist.errors import PayloadError

_ALLOWED = (
    "numbers, strings, bytes, lists, tuples, dicts, sets, NumPy arrays and dense torch tensors"
)
_ADVICE = {
    "function": "define it in a cell on the ranks",
    "builtin_function_or_method": "call it and move its result",
    "method": "call it and move its result",
    "module": "import it in a cell on the ranks",
    "generator": "make it a list",
    "range": "make it a list",
    "slice": "send its start, stop and step",
    "bytearray": "send bytes(value)",
    "memoryview": "send bytes(value)",
    "DataFrame": "send value.to_dict('list')",
    "Series": "send value.to_numpy()",
}
_PLAIN = (dict, list, tuple, set, frozenset, str, bytes, int, float)
_SHORT = 60


class ValuePath(NamedTuple):
    """Path inside a value, formatted only for an error message."""

    parent: ValuePath | None
    key: object
    """Key or index; for the root "value", or "" if its keys are names of variables."""

    def __str__(self) -> str:
        """Format the path as Python would: model['layers'][3]."""
        if self.parent is None:
            return str(self.key) or "value"
        if not self.parent.key and self.parent.parent is None:
            return (
                str(self.key) if str(self.key).isidentifier() else f"value[{shorten_key(self.key)}]"
            )
        return f"{self.parent}[{shorten_key(self.key)}]"


def unsupported_value_error(
    where: ValuePath, problem: str, *, advice: str, allowed: str = _ALLOWED
) -> PayloadError:
    """Return an error that names the value, what is allowed, and the remedy."""
    remedy = advice[:1].upper() + advice[1:]
    return PayloadError(f"{where} {problem}. Allowed: {allowed}. {remedy}.")


def corrupt_file_error(problem: str) -> PayloadError:
    """Return an error about a file that cannot be read."""
    return PayloadError(
        f"Cannot read the transferred values: their file {problem}. Transfer the values again."
    )


def type_with_article(value: object) -> str:
    """Return the name of the value's type with its article."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def shorten_key(key: object) -> str:
    """Return the repr of a key, shortened."""
    text = repr(key)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


def advice_for(value: object) -> str:
    """Return what to do instead of transferring a value of this type."""
    by_name = _ADVICE.get(type(value).__name__)
    if by_name is not None:
        return by_name
    for test, advice in _KINDS:
        if test(value):
            return advice
    base = next((base for base in _PLAIN if isinstance(value, base)), None)
    if base is not None:
        return f"send {base.__name__}(value)"
    return "send its parts as plain values, or make it in a cell on the ranks"


_KINDS: tuple[tuple[Callable[[object], bool], str], ...] = (
    (lambda value: isinstance(value, type), "define it in a cell on the ranks"),
    (lambda value: hasattr(value, "state_dict"), "send its state_dict()"),
    (lambda value: isinstance(value, os.PathLike), "send str(value)"),
    (lambda value: hasattr(value, "readable"), "send its path or its content"),
    (lambda value: isinstance(value, Enum), "send value.value"),
    (lambda value: isinstance(value, Mapping), "send dict(value)"),
)
