"""Constants and helpers of the payload format, shared by reader and writer."""

from __future__ import annotations

import json
import re
import sys

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
