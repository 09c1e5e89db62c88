"""Writes payload files."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import secrets
import shutil
import sys
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.protocol.serialization.format import (
    JSON_INT_LIMIT,
    MAX_DEPTH,
    MAX_INLINE_BYTES,
    NUMPY_DTYPE_PATTERN,
    SCALAR_TYPES,
    TORCH_DTYPES,
    ValuePath,
    advice_for,
    align_offset,
    build_head,
    is_package_instance,
    type_with_article,
    unsupported_value_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


@dataclass(slots=True)
class _PayloadEncoder:
    """Converts a value into its JSON tree and the buffers that the tree refers to by number."""

    remaining_bytes: int | None = None
    """Items that still fit into a message; None in a file. A message has no buffers."""
    sources: list[Any] = field(default_factory=list)
    """bytes, NumPy arrays and torch tensors, in file order."""
    sizes: list[int] = field(default_factory=list)
    _numbers: dict[object, int] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    """Ids of the containers being visited, to detect cycles."""

    def head(self, value: Any) -> bytes:
        """Return header and JSON tree, padded to the offset of the first buffer."""
        is_named = type(value) is dict and all(type(key) is str for key in value)
        root = self.node(value, ValuePath(None, "" if is_named else "value"))
        return build_head(self.sizes, root)

    def node(self, value: Any, where: ValuePath) -> Any:
        kind = type(value)
        if kind in SCALAR_TYPES:
            self._check_remaining_size(len(value) if kind is str else 1, where)
            return _scalar_node(value)
        if kind in _CONTAINER_TAGS:
            return self._container(value, where)
        if kind is complex:
            return {"complex": [_scalar_node(value.real), _scalar_node(value.imag)]}
        if kind is bytes and (self.remaining_bytes is not None or len(value) <= MAX_INLINE_BYTES):
            self._check_remaining_size(len(value), where)
            return {"bytes": base64.b64encode(value).decode()}
        if kind is bytes:
            return {"raw": self._buffer(id(value), value, len(value), where)}
        return self._library_value(value, where)

    def _library_value(self, value: Any, where: ValuePath) -> Any:
        """Encode a torch or NumPy value; raise for any other type."""
        if is_package_instance("torch", "Tensor", value):
            return self._tensor(value, where)
        if is_package_instance("numpy", "ndarray", value):
            if type(value) is not sys.modules["numpy"].ndarray:
                advice = "send numpy.asarray(value)"
                raise unsupported_value_error(
                    where, f"is {type_with_article(value)}", advice=advice
                )
            dtype = _numpy_dtype_node(value.dtype, where)
            number = self._buffer(id(value), value, value.nbytes, where)
            return {"array": [number, dtype, list(value.shape)]}
        if is_package_instance("numpy", "generic", value):
            dtype = _numpy_dtype_node(value.dtype, where)
            return {"numpy": [dtype, base64.b64encode(value.tobytes()).decode()]}
        if is_package_instance("torch", "Size", value):
            return {"size": list(value)}
        for name in ("dtype", "device"):
            if is_package_instance("torch", name, value):
                return {name: str(value).removeprefix("torch.")}
        raise unsupported_value_error(
            where, f"is {type_with_article(value)}", advice=advice_for(value)
        )

    def _container(self, value: Any, where: ValuePath) -> Any:
        if id(value) in self._open:
            raise unsupported_value_error(where, "contains itself", advice="move its parts")
        if len(self._open) >= MAX_DEPTH:
            raise unsupported_value_error(
                where, f"is nested deeper than {MAX_DEPTH}", advice="flatten it"
            )
        self._check_remaining_size(len(value), where)
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                keys = list(value) if _is_json(value) else [self._key(key, where) for key in value]
                body: list[Any] = [keys, self._items(value.values(), where, value)]
            elif isinstance(value, (set, frozenset)):
                body = [self._key(member, where) for member in value]
            else:
                body = self._items(value, where, range(len(value)))
        finally:
            self._open.discard(id(value))
        tag = _CONTAINER_TAGS[type(value)]
        return {tag: body} if tag else body

    def _items(self, items: Any, where: ValuePath, keys: Iterable[Any]) -> list[Any]:
        """Encode items; `keys` are their keys or indices, for error messages."""
        if _is_json(items):
            return list(items)
        pairs = zip(items, keys, strict=True)
        return [self.node(item, ValuePath(where, key)) for item, key in pairs]

    def _key(self, key: Any, where: ValuePath) -> Any:
        """Encode a dict key or a set member."""
        if not _is_key(key):
            raise unsupported_value_error(
                where,
                f"has {type_with_article(key)} as a key or member",
                allowed="plain scalars and tuples of them",
                advice="use its name or its number",
            )
        return self.node(key, where)

    def _tensor(self, value: Any, where: ValuePath) -> Any:
        advice = next((advice for test, advice in _NOT_DENSE if test(value)), None)
        if advice is not None:
            problem = f"is {type_with_article(value)} ({value.dtype}, {value.layout})"
            raise unsupported_value_error(where, problem, advice=advice)
        # Tied parameters are two tensors over one storage: they share a number, so that
        # reading restores a single tensor.
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        bits = value.is_conj(), value.is_neg()
        same = (value.data_ptr(), value.device, dtype, shape, value.stride(), bits)
        number = self._buffer(
            same if value.numel() else id(value), value, value.numel() * value.itemsize, where
        )
        return {"tensor": [number, dtype, list(shape)]}

    def _buffer(self, same: object, source: Any, size_bytes: int, where: ValuePath) -> int:
        if self.remaining_bytes is not None:
            allowed = "plain values inside a message"
            raise unsupported_value_error(
                where, f"is {type_with_article(source)}", allowed=allowed, advice="pull it by name"
            )
        number = self._numbers.setdefault(same, len(self.sources))
        if number == len(self.sources):
            self.sources.append(source)
            self.sizes.append(size_bytes)
        return number

    def _check_remaining_size(self, count: int, where: ValuePath) -> None:
        """Raise early for a value that is too long for a message."""
        if self.remaining_bytes is not None:
            self.remaining_bytes -= count
            if self.remaining_bytes < 0:
                raise unsupported_value_error(
                    where, "is too long", allowed="small values", advice="pull it by name"
                )


_CONTAINER_TAGS: dict[type, str] = {
    list: "",
    tuple: "tuple",
    dict: "dict",
    OrderedDict: "ordered",
    set: "set",
    frozenset: "frozenset",
}


def write_payload_to_free_folder(value: object, folders: Iterable[str | Path]) -> Path:
    """Write the value into a new file (0600) in the first folder with enough space; return it.

    Copies tensors and arrays once, or twice if they are not contiguous or not on the CPU, and
    synchronizes CUDA tensors. The value is usually a dict of names: error messages then start with
    the name. An incomplete file is removed.

    Raises:
        PayloadError: the value contains something unsupported; the message names it. Or no folder
            has enough space.
    """
    encoder = _PayloadEncoder()
    head = encoder.head(value)
    needed = len(head) + sum(map(align_offset, encoder.sizes))
    return _save_to_free_folder(needed, folders, lambda path: _write_file(encoder, head, path))


def _save_to_free_folder(
    needed: int, folders: Iterable[str | Path], save: Callable[[Path], object]
) -> Path:
    """Save into the first folder with enough space; return the new file."""
    full = []
    for folder in map(Path, folders):
        path = folder / f"{secrets.token_hex(8)}.payload"
        free = shutil.disk_usage(folder).free
        if needed <= free:
            try:
                save(path)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    raise
            else:
                return path
        full.append(f"{free >> 20} MiB in {folder}")
    allowed = " and ".join(full) or "no folder"
    problem = f"needs {-(-needed >> 20)} MiB"
    advice = "transfer less at once, or free memory in these folders"
    raise unsupported_value_error(ValuePath(None, "value"), problem, allowed=allowed, advice=advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfilledTensor:
    """A tensor whose elements are written later."""

    storage_key: object
    """Equal for two names of the same tensor."""
    dtype: str
    """torch name: "bfloat16"."""
    itemsize: int
    shape: tuple[int, ...]


def reserve_payload(
    name: str, tensors: Mapping[str, UnfilledTensor], folders: Iterable[str | Path]
) -> tuple[Path, dict[object, int]]:
    """Create a payload file of one dict of tensors, without their elements.

    Each rank writes its elements in place; the file is readable once all are written.

    Returns:
        The file, in the first folder with enough space, and the offset in bytes of each tensor
        in it, by its `storage_key`.

    Raises:
        PayloadError: no folder has enough space.
    """
    numbers: dict[object, int] = {}
    sizes: list[int] = []
    nodes = []
    for tensor in tensors.values():
        number = numbers.setdefault(tensor.storage_key, len(numbers))
        if number == len(sizes):
            sizes.append(math.prod(tensor.shape) * tensor.itemsize)
        nodes.append({"tensor": [number, tensor.dtype, list(tensor.shape)]})
    head = build_head(sizes, {"dict": [[name], [{"dict": [list(tensors), nodes]}]]})
    offsets, end = {}, len(head)
    for key, number in numbers.items():
        offsets[key] = end
        end += align_offset(sizes[number])

    def reserve(path: Path) -> None:
        with _new_file(path) as fd:
            os.posix_fallocate(fd, 0, end)  # fail on a full disk before anything is written
            _write_all(fd, head)

    return _save_to_free_folder(end, folders, reserve), offsets


def to_inline_json(value: object, limit: int = 65536) -> Any:
    """Encode a small plain value as JSON for a message.

    Plain values are numbers, strings, bytes, NumPy scalars, and lists, tuples, dicts and sets of
    them; not arrays or tensors.

    Raises:
        PayloadError: not plain, or more than `limit` bytes of JSON.
    """
    where = ValuePath(None, "value")
    node = _PayloadEncoder(remaining_bytes=limit).node(value, where)
    length = len(json.dumps(node, separators=(",", ":")))
    if length > limit:
        allowed = f"{limit} bytes inside a message"
        raise unsupported_value_error(
            where, f"needs {length} bytes", allowed=allowed, advice="pull it by name"
        )
    return node


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """Create a private file, yield its descriptor, and remove the file after an exception."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _write_file(encoder: _PayloadEncoder, head: bytes, path: Path) -> None:
    # write() instead of a map: no page faults (35 ms against 60 ms for 100 MB), and a full
    # /dev/shm is an OSError, while a map would end the process with SIGBUS.
    with _new_file(path) as fd:
        _write_all(fd, head)
        for source, size_bytes in zip(encoder.sources, encoder.sizes, strict=True):
            _write_all(fd, _content(source, size_bytes))
            _write_all(fd, bytes(align_offset(size_bytes) - size_bytes))


def _write_all(fd: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]  # one call writes at most 2 GiB


def _content(source: Any, size_bytes: int) -> bytes | memoryview:
    """Return the bytes of a buffer's source, without a copy if it is contiguous."""
    if not size_bytes or isinstance(source, bytes):
        return source if size_bytes else b""
    if is_package_instance("numpy", "ndarray", source):
        numpy = sys.modules["numpy"]
        flat: memoryview = numpy.ascontiguousarray(source).reshape(-1).view(numpy.uint8).data
        return flat
    plain = source.detach().resolve_conj().resolve_neg().cpu().contiguous()
    torch = sys.modules["torch"]
    octets = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    start = plain.storage_offset() * plain.itemsize
    part: memoryview = octets[start : start + size_bytes].numpy().data
    return part


_NOT_DENSE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda value: hasattr(value, "full_tensor"),  # DTensor
        "call .full_tensor() on all ranks and move the result",
    ),
    (
        lambda value: value.is_meta or hasattr(value, "cls_to_become"),  # UninitializedParameter
        "it has no content yet, initialise it first",
    ),
    (
        lambda value: getattr(value, "ds_numel", value.numel()) != value.numel(),
        "read it inside deepspeed.zero.GatheredParameters on all ranks",
    ),
    (
        lambda value: value.is_quantized,
        "send value.dequantize()",
    ),
    (
        lambda value: value.is_nested,
        "send value.unbind()",
    ),
    (
        lambda value: str(value.layout) != "torch.strided",
        "send value.to_dense()",
    ),
    (
        lambda value: type(value).__name__ not in {"Tensor", "Parameter", "Buffer"},
        "send value.as_subclass(torch.Tensor)",
    ),
    (
        lambda value: str(value.dtype).removeprefix("torch.") not in TORCH_DTYPES,
        "send it in another dtype",
    ),
)


def _numpy_dtype_node(dtype: Any, where: ValuePath) -> Any:
    """Encode a dtype: its string, [base, shape], or the fields of a structured one."""
    if dtype.fields is not None:
        names = list(dtype.names)
        parts = [dtype.fields[name] for name in names]
        formats = [_numpy_dtype_node(part[0], where) for part in parts]
        return {
            "names": names,
            "formats": formats,
            "offsets": [part[1] for part in parts],
            "itemsize": dtype.itemsize,
        }
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_numpy_dtype_node(base, where), list(shape)]
    numpy = sys.modules["numpy"]
    void = dtype.kind == "V" and dtype.type is not numpy.void  # another package's dtype
    if dtype.hasobject or void or not NUMPY_DTYPE_PATTERN.fullmatch(dtype.str):
        advice = "send value.tolist()" if dtype.hasobject else "send it in a dtype of NumPy's own"
        raise unsupported_value_error(where, f"is of dtype {dtype}", advice=advice)
    return dtype.str


def _scalar_node(value: Any) -> Any:
    """Encode a scalar: non-finite floats and large ints are tagged, others are JSON."""
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) is int and not -JSON_INT_LIMIT < value < JSON_INT_LIMIT:
        return {"int": hex(value)}
    return value


def _is_json(items: Iterable[Any]) -> bool:
    """Return True for a list or tuple that is already JSON: a fast path for long ones."""
    kinds = set(map(type, items))
    return (
        kinds <= SCALAR_TYPES
        and (float not in kinds or all(math.isfinite(x) for x in items if type(x) is float))
        and (int not in kinds or all(abs(x) < JSON_INT_LIMIT for x in items if type(x) is int))
    )


def _is_key(key: Any) -> bool:
    if type(key) in (tuple, frozenset):
        return all(map(_is_key, key))
    return (
        type(key) in SCALAR_TYPES
        or type(key) in (complex, bytes)
        or is_package_instance("numpy", "generic", key)
    )
