"""Serialization of Python values to and from payload files, in the kernel and the ranks.

A payload file consists of a header, a JSON tree and raw buffers that are aligned to 64 bytes.
It contains no code: no pickle, no class names, and only listed dtypes. Reading maps the file
privately, so that tensors and arrays are views without a copy and are not shared between processes.

    magic (8 bytes) | length of the tree (8 bytes, little endian) | tree | buffer | buffer ...

safetensors cannot replace it: it has no strings, dates or structured arrays, and without torch it
copies what it reads.

Plain values are restored as they are. A list or dict that is referenced twice becomes two objects;
an array or tensor (tied weights) stays one. Tensors are restored on the CPU, contiguous and
detached (`nn.Parameter` too), arrays C-contiguous, an OrderedDict without its attributes. torch and
numpy are imported only to read a file that contains their values.
"""

from __future__ import annotations

from nbdist.protocol.serialization.reader import from_inline_json, read_payload
from nbdist.protocol.serialization.writer import (
    UnfilledTensor,
    reserve_payload,
    to_inline_json,
    write_payload_to_free_folder,
)

__all__ = [
    "UnfilledTensor",
    "from_inline_json",
    "read_payload",
    "reserve_payload",
    "to_inline_json",
    "write_payload_to_free_folder",
]
