"""Constants, helpers and error messages of the payload format, shared by reader and writer."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from nbdist.errors import PayloadError

MAGIC = b"nbdist\x00\x01"
"""The last byte is the version of the format."""
HEADER_BYTES = len(MAGIC) + 8
ALIGNMENT = 64
MAX_DEPTH = 64
"""Maximum nesting of lists and dicts."""
MAX_NDIM = 64
MAX_INLINE_BYTES = 1024
"""Longer bytes objects are stored in a buffer."""
JSON_INT_LIMIT = 1 << 63
"""Larger ints are written in hex: Python limits the length of decimal text."""

SCALAR_TYPES = frozenset({type(None), bool, str, int, float})
"""Types that JSON preserves; non-finite floats and large ints are tagged."""

TORCH_DTYPES = frozenset(
    {
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    }
)
TORCH_ONLY = frozenset(
    name
    for name in TORCH_DTYPES
    if name.startswith(("float8", "float4")) or name in {"bfloat16", "complex32"}
)
"""Dtypes without a NumPy equivalent; all others have the same name in NumPy."""
NUMPY_DTYPE_PATTERN = re.compile(
    r"[<>|=](?:[biufcSUV][0-9]{1,18}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)"
)
"""NumPy dtype strings that can be written and read; excludes objects."""


def align_offset(size_bytes: int) -> int:
    """Round up to the next aligned buffer offset."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def build_head(sizes: list[int], root: object) -> bytes:
    """Return header and JSON tree, padded to the offset of the first buffer.

    Args:
        sizes: size in bytes of each buffer.
        root: the value as a JSON tree, which refers to buffers by their number.
    """
    text = json.dumps([sizes, root], separators=(",", ":")).encode()
    head = MAGIC + len(text).to_bytes(HEADER_BYTES - len(MAGIC), "little") + text
    return head.ljust(align_offset(len(head)), b"\0")


def is_package_instance(package: str, name: str, value: object) -> bool:
    """Return True for an instance of a package's class; False if it is not imported."""
    kind = getattr(sys.modules.get(package), name, None)
    return kind is not None and isinstance(value, kind)


# -- errors: where a value is unsupported, what is allowed, what to do instead

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
