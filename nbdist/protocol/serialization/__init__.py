"""Python values to and from payload files; pure, used by the kernel and the ranks.

A payload file is one header, one JSON tree and raw buffers that each begin at a multiple
of 64 bytes. Nothing in it is code: no pickle, no class names, dtypes from a list. Reading
maps the file privately, so tensors and arrays are views that cost no copy and that no two
processes share.

    magic (8 bytes) | length of the tree (8 bytes, little endian) | tree | buffer | buffer ...

What arrives: plain values as they are; a list or dict that stands at two places arrives
as two, an array or tensor (tied weights) as one. A tensor arrives on the CPU, contiguous
and detached (`nn.Parameter` too); an array C-contiguous; an OrderedDict without
attributes. torch and numpy are imported only to read a file that holds values of theirs.
"""

from __future__ import annotations

from nbdist.protocol.serialization.reader import from_inline, read
from nbdist.protocol.serialization.writer import (
    Blank,
    inline,
    reserve,
    size,
    write,
    write_where_room,
)

__all__ = [
    "Blank",
    "from_inline",
    "inline",
    "read",
    "reserve",
    "size",
    "write",
    "write_where_room",
]
