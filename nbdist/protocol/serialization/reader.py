"""Reads payload files.

All content is validated before use: a malicious file raises PayloadError and cannot cause an
allocation larger than the file.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import mmap
import os
import stat
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import PayloadError
from nbdist.protocol.serialization.format import (
    HEADER_BYTES,
    MAGIC,
    MAX_NDIM,
    NUMPY_DTYPE_PATTERN,
    SCALAR_TYPES,
    TORCH_DTYPES,
    TORCH_ONLY,
    align_offset,
    corrupt_file_error,
)
from nbdist.signal_handling import defer_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIN_MMAP_BYTES = 4 << 20
"""Smaller files are copied: a map costs a file descriptor (Python < 3.13) and whole pages."""
_COPY_BELOW_BYTES = 1 << 20
_MAX_COUNT = 1 << 62
_Content = bytearray | mmap.mmap


def read_payload(path: str | Path, *, as_numpy: bool = False, delete: bool = True) -> Any:
    """Return the value of a payload file; tensors and arrays are views of a private map.

    Writing to them does not change other processes' copies. Their memory is released with the
    last of them, also if the file is deleted.

    Args:
        path: a complete file from ``write_payload_to_free_folder``.
        as_numpy: return NumPy arrays instead of tensors, without importing torch. bfloat16
            becomes float32 with equal values; float8, float4 and complex32 are not supported.
            A torch.Size becomes a tuple, a torch dtype or device its name.
        delete: remove the file, also if it cannot be read.

    Raises:
        PayloadError: not a payload file, corrupt, or a required package is missing.
        OSError: the file cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # never blocks on a pipe
    try:
        if delete:
            os.unlink(path)  # noqa: PTH108 - a str or a Path
        content = _map_file(fd)
    finally:
        os.close(fd)
    return _unpack(content, as_numpy=as_numpy)


def from_inline_json(node: object) -> Any:
    """Return the value encoded by ``to_inline_json``.

    Raises:
        PayloadError: not such an encoding.
    """
    return _decode_valid(_PayloadDecoder(bytearray(), [], as_numpy=False), node)


def _map_file(fd: int) -> _Content:
    """Return the file's content, writable and private to this process."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise corrupt_file_error("is not a regular file")
    if status.st_size < MIN_MMAP_BYTES:
        content = bytearray(status.st_size)
        if os.readv(fd, [content]) != status.st_size:
            raise corrupt_file_error("is truncated")
        return content
    # Python 3.13: without trackfd the map holds no file descriptor.
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(fd, status.st_size, access=mmap.ACCESS_COPY, **options)


def _unpack(content: _Content, *, as_numpy: bool) -> Any:
    """Validate the header and the sizes, then build the value."""
    if content[: len(MAGIC)] != MAGIC:
        raise corrupt_file_error("was not written by this version of nbdist")
    length = int.from_bytes(content[len(MAGIC) : HEADER_BYTES], "little")
    if HEADER_BYTES + length > len(content):
        raise corrupt_file_error("is truncated")
    try:
        tree = json.loads(content[HEADER_BYTES : HEADER_BYTES + length])
    except (ValueError, RecursionError) as error:
        raise corrupt_file_error("has no readable tree") from error
    if type(tree) is not list or len(tree) != 2:  # noqa: PLR2004 - [sizes, value]
        raise corrupt_file_error("has no readable tree")
    sizes, root = tree
    start, spans = align_offset(HEADER_BYTES + length), []
    for size_bytes in _counts(sizes):
        spans.append((start, size_bytes))
        start += align_offset(size_bytes)
    if start != len(content):
        raise corrupt_file_error("does not have the size given in its tree")
    return _decode_valid(_PayloadDecoder(content, spans, as_numpy=as_numpy), root)


def _decode_valid(reader: _PayloadDecoder, node: object) -> Any:
    """Build a value; any error caused by a malicious tree becomes a PayloadError."""
    try:
        return reader.value(node)
    except PayloadError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
        raise corrupt_file_error(f"has a part that cannot be read ({error})") from error


@dataclass(slots=True)
class _PayloadDecoder:
    """Converts a JSON tree back into the value."""

    content: _Content
    spans: list[tuple[int, int]]
    """Offset and size in bytes of each buffer; inside the file, without overlap."""
    as_numpy: bool
    _decoded: dict[object, Any] = field(default_factory=dict)
    """Objects made of a buffer, so that a second reference returns the same object."""

    def value(self, node: Any) -> Any:
        if type(node) is list:
            return self.items(node)
        if type(node) is not dict:
            return node
        ((tag, body),) = node.items()
        return _TAGS[tag](self, body)

    def items(self, body: Any) -> list[Any]:
        """Decode a list of nodes."""
        if type(body) is not list:
            raise corrupt_file_error("contains a malformed value")
        if set(map(type, body)) <= SCALAR_TYPES:
            return body
        return [self.value(item) for item in body]

    def pairs(self, body: Any) -> Iterator[tuple[Any, Any]]:
        """Decode the keys and values of a dict."""
        keys, values = self.items(body)
        return zip(keys, values, strict=True)

    def raw(self, number: Any) -> Any:
        """Return the bytes of one buffer."""
        start, size_bytes = self.spans[_count(number)]
        return self._decode_once(number, lambda: bytes(self.content[start : start + size_bytes]))

    def array(self, body: Any) -> Any:
        """Return a NumPy array over one buffer."""
        number, dtype, shape = body
        return self._decode_once(
            body, lambda: self._array(number, _numpy_dtype(dtype), _shape(shape))
        )

    def tensor(self, body: Any) -> Any:
        """Return a torch tensor over one buffer; with `as_numpy` an array."""
        number, dtype, shape = body
        if dtype not in TORCH_DTYPES:
            raise corrupt_file_error("has an unknown dtype")
        make = self._tensor_as_array if self.as_numpy else self._tensor
        return self._decode_once(body, lambda: make(number, dtype, _shape(shape)))

    def _array(self, number: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        content, start = self._buffer(number, math.prod(shape) * dtype.itemsize)
        return _package("numpy").ndarray(shape, dtype, buffer=content, offset=start)

    def _tensor(self, number: int, dtype_name: str, shape: tuple[int, ...]) -> Any:
        torch = _package("torch")
        dtype = getattr(torch, dtype_name, None)
        if dtype is None:
            raise corrupt_file_error(
                f"has a {dtype_name} tensor, unknown to torch {torch.__version__}"
            )
        size_bytes = math.prod(shape) * dtype.itemsize
        content, start = self._buffer(number, size_bytes)
        if not size_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        octets = torch.frombuffer(content, dtype=torch.uint8, offset=start, count=size_bytes)
        # set_ instead of view: the tensor is its own base, like a newly created one.
        own = torch.empty(0, dtype=dtype, device="cpu")
        return own.set_(octets.untyped_storage(), 0, shape)

    def _tensor_as_array(self, number: int, dtype_name: str, shape: tuple[int, ...]) -> Any:
        numpy = _package("numpy")
        if dtype_name == "bfloat16":  # it is the upper half of a float32
            upper = self._array(number, numpy.dtype("<u2"), (math.prod(shape),))
            flat = self._decode_once(
                ("float32", number), lambda: (upper.astype("<u4") << 16).view("<f4")
            )
            return flat.reshape(shape)
        if dtype_name in TORCH_ONLY:
            raise PayloadError(
                f"A {dtype_name} tensor has no NumPy dtype. Pull it without as_numpy, or send"
                " value.float()."
            )
        return self._array(number, numpy.dtype(dtype_name), shape)

    def _buffer(self, number: Any, size_bytes: int) -> tuple[_Content, int]:
        """Return the object that holds a buffer's bytes, and the offset in it."""
        start, buffer_bytes = self.spans[_count(number)]
        if size_bytes != buffer_bytes:
            raise corrupt_file_error("has a buffer whose size does not match its tensor or array")
        if size_bytes < _COPY_BELOW_BYTES:
            # A copy: otherwise a small array would keep the whole map in memory.
            part = self._decode_once(
                ("part", number), lambda: bytearray(self.content[start : start + size_bytes])
            )
            return part, 0
        return self.content, start

    def _decode_once(self, same: object, make: Callable[[], Any]) -> Any:
        key = json.dumps(same)
        if key not in self._decoded:
            self._decoded[key] = make()
        return self._decoded[key]

    def numpy_scalar(self, body: Any) -> Any:
        """Decode a NumPy scalar that is stored in the tree."""
        dtype, text = body
        kind, octets = _numpy_dtype(dtype), base64.b64decode(text, validate=True)
        if kind.itemsize != len(octets):
            raise corrupt_file_error("has a scalar whose size does not match its dtype")
        return _package("numpy").ndarray((), kind, buffer=octets)[()]

    def torch_value(self, body: Any, kind: Literal["Size", "dtype", "device"]) -> Any:
        """Decode a torch.Size, dtype or device; with `as_numpy` a tuple or the name."""
        if kind == "Size":
            shape = _shape(body)
            return shape if self.as_numpy else _package("torch").Size(shape)
        if type(body) is not str or (kind == "dtype" and body not in TORCH_DTYPES):
            raise corrupt_file_error("has an unknown dtype or device")
        if self.as_numpy:
            return body
        torch = _package("torch")
        return getattr(torch, body) if kind == "dtype" else torch.device(body)


_TAGS: dict[str, Callable[[_PayloadDecoder, Any], Any]] = {
    "float": lambda _, body: _float(body),
    "int": lambda _, body: int(body, 16),
    "complex": lambda reader, body: complex(*_floats(reader.items(body))),
    "bytes": lambda _, body: base64.b64decode(body, validate=True),
    "raw": _PayloadDecoder.raw,
    "tuple": lambda reader, body: tuple(reader.items(body)),
    "dict": lambda reader, body: dict(reader.pairs(body)),
    "ordered": lambda reader, body: OrderedDict(reader.pairs(body)),
    "set": lambda reader, body: set(reader.items(body)),
    "frozenset": lambda reader, body: frozenset(reader.items(body)),
    "array": _PayloadDecoder.array,
    "tensor": _PayloadDecoder.tensor,
    "numpy": _PayloadDecoder.numpy_scalar,
    "size": lambda reader, body: reader.torch_value(body, "Size"),
    "dtype": lambda reader, body: reader.torch_value(body, "dtype"),
    "device": lambda reader, body: reader.torch_value(body, "device"),
}


def _numpy_dtype(node: Any) -> Any:
    """Decode a dtype: the inverse of `_numpy_dtype_node`."""
    numpy = _package("numpy")
    if type(node) is str and NUMPY_DTYPE_PATTERN.fullmatch(node):
        return numpy.dtype(node)
    if type(node) is list:
        base, shape = node
        return numpy.dtype((_numpy_dtype(base), _shape(shape)))
    if type(node) is dict and node.keys() == {"names", "formats", "offsets", "itemsize"}:
        formats = [_numpy_dtype(part) for part in node["formats"]]
        return numpy.dtype({**node, "formats": formats})
    raise corrupt_file_error("has an unknown dtype")


def _shape(body: Any) -> tuple[int, ...]:
    shape = _counts(body)
    if len(shape) > MAX_NDIM:
        raise corrupt_file_error("has too many dimensions")
    return tuple(shape)


def _counts(body: Any) -> list[int]:
    if type(body) is not list:
        raise corrupt_file_error("contains a malformed value")
    return [_count(count) for count in body]


def _count(body: Any) -> int:
    if type(body) is not int or not 0 <= body < _MAX_COUNT:
        raise corrupt_file_error("has a size out of bounds")
    return body


def _float(body: Any) -> float:
    if body not in ("inf", "-inf", "nan"):
        raise corrupt_file_error("contains a malformed value")
    return float(body)


def _floats(parts: list[Any]) -> tuple[float, float]:
    real, imag = parts
    if type(real) is not float or type(imag) is not float:
        raise corrupt_file_error("contains a malformed value")
    return real, imag


def _package(name: Literal["torch", "numpy"]) -> Any:
    """Import torch or numpy, which the values of the file need."""
    try:
        with defer_interrupt():  # an interrupted import leaves a broken package in sys.modules
            return importlib.import_module(name)
    except ImportError as error:
        advice = "Install it" if name == "numpy" else "Install it, or pull with as_numpy=True"
        raise PayloadError(
            f"The payload holds {name} values and {name} cannot be imported ({error}). {advice}."
        ) from error
