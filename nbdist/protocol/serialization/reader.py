"""Payload file -> value; pure, used by the kernel and the ranks.

Everything that a file says is checked before it is used: a hostile file gives a
PayloadError, and no allocation that is larger than the file.
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
from nbdist.protocol.serialization.errors import damaged
from nbdist.protocol.serialization.format import (
    HEADER_BYTES,
    MAGIC,
    MAX_NDIM,
    NUMPY_DTYPE,
    SCALARS,
    TORCH_DTYPES,
    TORCH_ONLY,
    aligned,
)
from nbdist.signals import unstopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MAP_FROM_BYTES = 4 << 20
"""Smaller files are copied: a map costs a file descriptor (Python < 3.13) and whole pages."""
_OWN_BELOW_BYTES = 1 << 20
_MAX_COUNT = 1 << 62
_Content = bytearray | mmap.mmap


def read(path: str | Path, *, as_numpy: bool = False, delete: bool = True) -> Any:
    """Return the value of a payload file; tensors and arrays are views on a private map.

    Writing into them changes no other process's copy. Their memory (of a deleted file,
    too) is given back when the last of them is gone.

    Args:
        path: a file that `write` has finished.
        as_numpy: give NumPy arrays for tensors, and do not import torch. bfloat16 then
            comes as float32, the same numbers; float8, float4 and complex32 are refused.
            A torch.Size comes as a tuple, a torch dtype or device as its name.
        delete: remove the file, also when it cannot be read.

    Raises:
        PayloadError: not a payload file, damaged, or in need of a package that is missing.
        OSError: the file cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # never waits on a pipe
    try:
        if delete:
            os.unlink(path)  # noqa: PTH108 - a str or a Path
        content = _mapped(fd)
    finally:
        os.close(fd)
    return _unpacked(content, as_numpy=as_numpy)


def from_inline(node: object) -> Any:
    """Give back the value of `inline`.

    Raises:
        PayloadError: not what `inline` makes.
    """
    return _valid(_Reader(bytearray(), [], as_numpy=False), node)


def _mapped(fd: int) -> _Content:
    """The file's bytes, writable and private to this process."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise damaged("is not a regular file")
    if status.st_size < MAP_FROM_BYTES:
        content = bytearray(status.st_size)
        if os.readv(fd, [content]) != status.st_size:
            raise damaged("was cut short")
        return content
    # Python 3.13: without trackfd the map holds no file descriptor.
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(fd, status.st_size, access=mmap.ACCESS_COPY, **options)


def _unpacked(content: _Content, *, as_numpy: bool) -> Any:
    """Check the header and the sizes against the file, then build the value."""
    if content[: len(MAGIC)] != MAGIC:
        raise damaged("is not one that this version of nbdist wrote")
    length = int.from_bytes(content[len(MAGIC) : HEADER_BYTES], "little")
    if HEADER_BYTES + length > len(content):
        raise damaged("was cut short")
    try:
        tree = json.loads(content[HEADER_BYTES : HEADER_BYTES + length])
    except (ValueError, RecursionError) as error:
        raise damaged("has no readable tree") from error
    if type(tree) is not list or len(tree) != 2:  # noqa: PLR2004 - [sizes, value]
        raise damaged("has no readable tree")
    sizes, root = tree
    start, spans = aligned(HEADER_BYTES + length), []
    for size_bytes in _counts(sizes):
        spans.append((start, size_bytes))
        start += aligned(size_bytes)
    if start != len(content):
        raise damaged("has not the size that its tree says")
    return _valid(_Reader(content, spans, as_numpy=as_numpy), root)


def _valid(reader: _Reader, node: object) -> Any:
    """Build a value; whatever a hostile tree provokes becomes a PayloadError."""
    try:
        return reader.value(node)
    except PayloadError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
        raise damaged(f"has a part that cannot be read ({error})") from error


@dataclass(slots=True)
class _Reader:
    """Turns a JSON tree back into the value."""

    content: _Content
    spans: list[tuple[int, int]]
    """Offset and size in bytes of each buffer; they lie in the file and do not overlap."""
    as_numpy: bool
    _made: dict[object, Any] = field(default_factory=dict)
    """What was made of a buffer: a second place that names it gets the same object."""

    def value(self, node: Any) -> Any:
        """The value of one node."""
        if type(node) is list:
            return self.items(node)
        if type(node) is not dict:
            return node
        ((tag, body),) = node.items()
        return _TAGS[tag](self, body)

    def items(self, body: Any) -> list[Any]:
        """The values of a list of nodes."""
        if type(body) is not list:
            raise damaged("has an unknown part")
        if set(map(type, body)) <= SCALARS:
            return body
        return [self.value(item) for item in body]

    def pairs(self, body: Any) -> Iterator[tuple[Any, Any]]:
        """Keys and values of a dict."""
        keys, values = self.items(body)
        return zip(keys, values, strict=True)

    def raw(self, number: Any) -> Any:
        """The bytes of one buffer."""
        start, size_bytes = self.spans[_count(number)]
        return self._once(number, lambda: bytes(self.content[start : start + size_bytes]))

    def array(self, body: Any) -> Any:
        """A NumPy array over one buffer."""
        number, dtype, shape = body
        return self._once(body, lambda: self._array(number, _numpy_dtype(dtype), _shape(shape)))

    def tensor(self, body: Any) -> Any:
        """A torch tensor over one buffer; an array, where torch is not wanted."""
        number, dtype, shape = body
        if dtype not in TORCH_DTYPES:
            raise damaged("has an unknown dtype")
        make = self._tensor_as_array if self.as_numpy else self._tensor
        return self._once(body, lambda: make(number, dtype, _shape(shape)))

    def _array(self, number: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        content, start = self._buffer(number, math.prod(shape) * dtype.itemsize)
        return _package("numpy").ndarray(shape, dtype, buffer=content, offset=start)

    def _tensor(self, number: int, dtype_name: str, shape: tuple[int, ...]) -> Any:
        torch = _package("torch")
        dtype = getattr(torch, dtype_name, None)
        if dtype is None:
            raise damaged(f"has a {dtype_name} tensor, unknown to torch {torch.__version__}")
        size_bytes = math.prod(shape) * dtype.itemsize
        content, start = self._buffer(number, size_bytes)
        if not size_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        octets = torch.frombuffer(content, dtype=torch.uint8, offset=start, count=size_bytes)
        # set_ and not view: the tensor is its own base, as one that was made here.
        own = torch.empty(0, dtype=dtype, device="cpu")
        return own.set_(octets.untyped_storage(), 0, shape)

    def _tensor_as_array(self, number: int, dtype_name: str, shape: tuple[int, ...]) -> Any:
        numpy = _package("numpy")
        if dtype_name == "bfloat16":  # the upper half of a float32
            upper = self._array(number, numpy.dtype("<u2"), (math.prod(shape),))
            flat = self._once(("float32", number), lambda: _from_upper_half(upper))
            return flat.reshape(shape)
        if dtype_name in TORCH_ONLY:
            sentence = f"a {dtype_name} tensor has no NumPy dtype; pull it without as_numpy"
            raise PayloadError(f"{sentence}, or send value.float().")
        return self._array(number, numpy.dtype(dtype_name), shape)

    def _buffer(self, number: Any, size_bytes: int) -> tuple[_Content, int]:
        """Where a buffer's bytes are: what holds them, and the offset there."""
        start, found_bytes = self.spans[_count(number)]
        if size_bytes != found_bytes:
            raise damaged("has a tensor or array of another size than its buffer")
        if size_bytes < _OWN_BELOW_BYTES:
            # Its own copy: a small array that is kept would keep the whole map.
            part = self._once(
                ("part", number), lambda: bytearray(self.content[start : start + size_bytes])
            )
            return part, 0
        return self.content, start

    def _once(self, same: object, make: Callable[[], Any]) -> Any:
        key = json.dumps(same)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def numpy_scalar(self, body: Any) -> Any:
        """A NumPy scalar out of the tree."""
        dtype, text = body
        kind, octets = _numpy_dtype(dtype), _octets(text)
        if kind.itemsize != len(octets):
            raise damaged("has a scalar of another size than its dtype")
        return _package("numpy").ndarray((), kind, buffer=octets)[()]

    def torch_value(self, body: Any, kind: Literal["Size", "dtype", "device"]) -> Any:
        """A torch.Size, dtype or device; without torch a tuple or the name."""
        if kind == "Size":
            shape = _shape(body)
            return shape if self.as_numpy else _package("torch").Size(shape)
        if type(body) is not str or (kind == "dtype" and body not in TORCH_DTYPES):
            raise damaged("has an unknown dtype or device")
        if self.as_numpy:
            return body
        torch = _package("torch")
        return getattr(torch, body) if kind == "dtype" else torch.device(body)


_TAGS: dict[str, Callable[[_Reader, Any], Any]] = {
    "float": lambda _, body: _float(body),
    "int": lambda _, body: int(body, 16),
    "complex": lambda reader, body: complex(*_floats(reader.items(body))),
    "bytes": lambda _, body: _octets(body),
    "raw": _Reader.raw,
    "tuple": lambda reader, body: tuple(reader.items(body)),
    "dict": lambda reader, body: dict(reader.pairs(body)),
    "ordered": lambda reader, body: OrderedDict(reader.pairs(body)),
    "set": lambda reader, body: set(reader.items(body)),
    "frozenset": lambda reader, body: frozenset(reader.items(body)),
    "array": _Reader.array,
    "tensor": _Reader.tensor,
    "numpy": _Reader.numpy_scalar,
    "size": lambda reader, body: reader.torch_value(body, "Size"),
    "dtype": lambda reader, body: reader.torch_value(body, "dtype"),
    "device": lambda reader, body: reader.torch_value(body, "device"),
}


def _from_upper_half(upper: Any) -> Any:
    """float32 of bfloat16 bits, exactly."""
    return (upper.astype("<u4") << 16).view("<f4")


def _numpy_dtype(node: Any) -> Any:
    """A dtype from its JSON form: the inverse of `_numpy_dtype_node`."""
    numpy = _package("numpy")
    if type(node) is str and NUMPY_DTYPE.fullmatch(node):
        return numpy.dtype(node)
    if type(node) is list:
        base, shape = node
        return numpy.dtype((_numpy_dtype(base), _shape(shape)))
    if type(node) is dict and node.keys() == {"names", "formats", "offsets", "itemsize"}:
        formats = [_numpy_dtype(part) for part in node["formats"]]
        return numpy.dtype({**node, "formats": formats})
    raise damaged("has an unknown dtype")


def _shape(body: Any) -> tuple[int, ...]:
    shape = _counts(body)
    if len(shape) > MAX_NDIM:
        raise damaged("has too many dimensions")
    return tuple(shape)


def _counts(body: Any) -> list[int]:
    if type(body) is not list:
        raise damaged("has an unknown part")
    return [_count(count) for count in body]


def _count(body: Any) -> int:
    if type(body) is not int or not 0 <= body < _MAX_COUNT:
        raise damaged("has a size out of bounds")
    return body


def _float(body: Any) -> float:
    if body not in ("inf", "-inf", "nan"):
        raise damaged("has an unknown part")
    return float(body)


def _floats(parts: list[Any]) -> tuple[float, float]:
    real, imag = parts
    if type(real) is not float or type(imag) is not float:
        raise damaged("has an unknown part")
    return real, imag


def _octets(body: Any) -> bytes:
    return base64.b64decode(body, validate=True)


def _package(name: Literal["torch", "numpy"]) -> Any:
    """Import torch or numpy: the file holds values of its."""
    try:
        with unstopped():  # an import that is cut in two leaves a package that no later one repairs
            return importlib.import_module(name)
    except ImportError as error:
        sentence = f"the value holds {name} values and {name} cannot be imported ({error})"
        advice = ": install it" if name == "numpy" else ": install it, or pull with as_numpy=True"
        raise PayloadError(f"{sentence}{advice}.") from error
