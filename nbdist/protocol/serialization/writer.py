"""Value -> payload file; pure, used by the kernel and the ranks."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.protocol.serialization.errors import Where, a, advice_for, refused
from nbdist.protocol.serialization.format import (
    HEADER_BYTES,
    IN_TREE_BYTES,
    MAGIC,
    MAX_DEPTH,
    NUMPY_DTYPE,
    SAFE_INT,
    SCALARS,
    TORCH_DTYPES,
    aligned,
    is_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(slots=True)
class _Writer:
    """Turns a value into its JSON tree and the buffers that the tree numbers."""

    room: int | None = None
    """Items that may still follow inside a message; None in a file. A message has no buffers."""
    sources: list[Any] = field(default_factory=list)
    """bytes, NumPy arrays and torch tensors, in the order of the file."""
    sizes: list[int] = field(default_factory=list)
    _numbers: dict[object, int] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    """Containers that are being walked, by id: meeting one again is a cycle."""

    def node(self, value: Any, where: Where) -> Any:
        """The JSON form of one value."""
        kind = type(value)
        if kind in SCALARS:
            self._take_room(len(value) if kind is str else 1, where)
            return _scalar_node(value)
        if kind in _CONTAINERS:
            return self._container(value, where)
        if kind is complex:
            return {"complex": [_scalar_node(value.real), _scalar_node(value.imag)]}
        if kind is bytes:
            return self._bytes(value, where)
        return self._library_value(value, where)

    def _library_value(self, value: Any, where: Where) -> Any:
        """The JSON form of what torch or NumPy made; nothing else is left."""
        if is_of("torch", "Tensor", value):
            return self._tensor(value, where)
        if is_of("numpy", "ndarray", value):
            return self._array(value, where)
        if is_of("numpy", "generic", value):
            dtype = _numpy_dtype_node(value.dtype, where)
            return {"numpy": [dtype, base64.b64encode(value.tobytes()).decode()]}
        for tag, (name, spell) in _TORCH_VALUES.items():
            if is_of("torch", name, value):
                return {tag: spell(value)}
        raise refused(where, f"is {a(value)}", advice=advice_for(value))

    def _container(self, value: Any, where: Where) -> Any:
        if id(value) in self._open:
            raise refused(where, "contains itself", advice="move its parts")
        if len(self._open) >= MAX_DEPTH:
            raise refused(where, f"is nested deeper than {MAX_DEPTH}", advice="flatten it")
        self._take_room(len(value), where)
        self._open.add(id(value))
        try:
            return _CONTAINERS[type(value)](self, value, where)
        finally:
            self._open.discard(id(value))

    def items(self, value: Any, where: Where) -> list[Any]:
        """The JSON forms of a list's or a tuple's items."""
        if _is_json(value):
            return list(value)
        return [self.node(item, Where(where, index)) for index, item in enumerate(value)]

    def pairs(self, value: Any, where: Where) -> list[list[Any]]:
        """The JSON forms of a dict's keys, then of its values."""
        keys = list(value) if _is_json(value) else [self.key(key, where) for key in value]
        items = value.values()
        if _is_json(items):
            return [keys, list(items)]
        return [keys, [self.node(item, Where(where, key)) for key, item in value.items()]]

    def key(self, key: Any, where: Where) -> Any:
        """The JSON form of a dict's key or a set's member."""
        if not _is_key(key):
            raise refused(
                where,
                f"has {a(key)} as a key or member",
                allowed="plain scalars and tuples of them",
                advice="use its name or its number",
            )
        return self.node(key, where)

    def members(self, value: Any, where: Where) -> list[Any]:
        """The JSON forms of a set's members."""
        return [self.key(member, where) for member in value]

    def _bytes(self, value: bytes, where: Where) -> Any:
        if self.room is not None or len(value) <= IN_TREE_BYTES:
            self._take_room(len(value), where)
            return {"bytes": base64.b64encode(value).decode()}
        return {"raw": self._buffer(id(value), value, len(value), where)}

    def _array(self, value: Any, where: Where) -> Any:
        if type(value) is not sys.modules["numpy"].ndarray:
            raise refused(where, f"is {a(value)}", advice="send numpy.asarray(value)")
        dtype = _numpy_dtype_node(value.dtype, where)
        number = self._buffer(id(value), value, value.nbytes, where)
        return {"array": [number, dtype, list(value.shape)]}

    def _tensor(self, value: Any, where: Where) -> Any:
        _check_tensor(value, where)
        # Tied parameters are two tensors over one storage: they get one number, so that
        # they are one tensor again after reading.
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        same = (value.data_ptr(), value.device, dtype, shape, value.stride(), _bits(value))
        number = self._buffer(
            same if value.numel() else id(value), value, value.numel() * value.itemsize, where
        )
        return {"tensor": [number, dtype, list(shape)]}

    def _buffer(self, same: object, source: Any, size_bytes: int, where: Where) -> int:
        if self.room is not None:
            allowed = "plain values inside a message"
            raise refused(where, f"is {a(source)}", allowed=allowed, advice="pull it by name")
        number = self._numbers.setdefault(same, len(self.sources))
        if number == len(self.sources):
            self.sources.append(source)
            self.sizes.append(size_bytes)
        return number

    def _take_room(self, count: int, where: Where) -> None:
        """Stop early at a value that no message can hold."""
        if self.room is not None:
            self.room -= count
            if self.room < 0:
                raise refused(where, "is long", allowed="small values", advice="pull it by name")

    def head(self, value: Any) -> bytes:
        """Header and JSON tree, padded to where the first buffer begins."""
        root = self.node(value, Where(None, "" if _is_named(value) else "value"))
        text = json.dumps([self.sizes, root], separators=(",", ":")).encode()
        head = MAGIC + len(text).to_bytes(HEADER_BYTES - len(MAGIC), "little") + text
        return head.ljust(aligned(len(head)), b"\0")

    def buffer_bytes(self) -> int:
        """Room that the buffers take in the file."""
        return sum(map(aligned, self.sizes))


_CONTAINERS: dict[type, Callable[[_Writer, Any, Where], Any]] = {
    list: lambda writer, value, where: writer.items(value, where),
    tuple: lambda writer, value, where: {"tuple": writer.items(value, where)},
    dict: lambda writer, value, where: {"dict": writer.pairs(value, where)},
    OrderedDict: lambda writer, value, where: {"ordered": writer.pairs(value, where)},
    set: lambda writer, value, where: {"set": writer.members(value, where)},
    frozenset: lambda writer, value, where: {"frozenset": writer.members(value, where)},
}
_TORCH_VALUES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "size": ("Size", list),
    "dtype": ("dtype", lambda value: str(value).removeprefix("torch.")),
    "device": ("device", str),
}


def size(value: object) -> int:
    """Count the bytes that `write` needs for the value; copies nothing.

    Raises:
        PayloadError: as `write`.
    """
    writer = _Writer()
    return len(writer.head(value)) + writer.buffer_bytes()


def write(value: object, path: Path) -> int:
    """Write the value into a new file (0600) and return its size in bytes.

    Costs one copy of the tensors and arrays, two where one is not contiguous or not on
    the CPU; a CUDA tensor is waited for. A dict of names is the usual value: errors then
    begin with the name. A file that could not be finished is removed.

    Raises:
        PayloadError: the value holds something that cannot be moved; says what and where.
        OSError: the file exists, or there is no room for it.
    """
    writer = _Writer()
    return _save(writer, writer.head(value), path)


def write_where_room(value: object, folders: Iterable[str | Path]) -> Path:
    """Write the value into the first folder that has room for it; return the new file.

    Raises:
        PayloadError: as `write`, or no folder has room.
    """
    writer = _Writer()
    head = writer.head(value)
    needed = len(head) + writer.buffer_bytes()
    return _where_room(needed, folders, lambda path: _save(writer, head, path))


def _where_room(needed: int, folders: Iterable[str | Path], save: Callable[[Path], object]) -> Path:
    """Save into the first folder that has room; give the new file."""
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
    given = f"needs {-(-needed >> 20)} MiB"
    advice = "move less at once, or free memory in these folders"
    raise refused(Where(None, "value"), given, allowed=allowed, advice=advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """A tensor whose elements come later."""

    same: object
    """Equal for two names of one tensor."""
    dtype: str
    """As torch names it: "bfloat16"."""
    itemsize: int
    shape: tuple[int, ...]


def reserve(
    name: str, tensors: Mapping[str, Blank], folders: Iterable[str | Path]
) -> tuple[Path, dict[object, int]]:
    """Make a payload file of one dict of tensors, without their elements.

    Whoever has elements writes them in place; the file can be read when all are there.

    Returns:
        The file, in the first folder that has room, and where each tensor begins in it: by
        its `same`, in bytes.

    Raises:
        PayloadError: no folder has room.
    """
    numbers = {one: at for at, one in enumerate({blank.same: 0 for blank in tensors.values()})}
    sizes = [0] * len(numbers)
    nodes = []
    for blank in tensors.values():
        number = numbers[blank.same]
        sizes[number] = math.prod(blank.shape) * blank.itemsize
        nodes.append({"tensor": [number, blank.dtype, list(blank.shape)]})
    root = {"dict": [[name], [{"dict": [list(tensors), nodes]}]]}
    text = json.dumps([sizes, root], separators=(",", ":")).encode()
    head = MAGIC + len(text).to_bytes(HEADER_BYTES - len(MAGIC), "little") + text
    head = head.ljust(aligned(len(head)), b"\0")
    offsets, at = {}, len(head)
    for same, number in numbers.items():
        offsets[same] = at
        at += aligned(sizes[number])
    return _where_room(at, folders, lambda path: _reserve(head, at, path)), offsets


def _reserve(head: bytes, size_bytes: int, path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)  # a full disk is known now, not half-way
        _write_all(fd, head)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(fd)


def inline(value: object, limit: int = 65536) -> Any:
    """Give a small plain value as JSON, for use inside a message.

    Plain are numbers, strings, bytes, NumPy scalars and lists, tuples, dicts, sets of
    them; never arrays or tensors.

    Raises:
        PayloadError: not plain, or more than `limit` bytes of JSON.
    """
    where = Where(None, "value")
    node = _Writer(room=limit).node(value, where)
    length = len(json.dumps(node, separators=(",", ":")))
    if length > limit:
        allowed = f"{limit} bytes inside a message"
        raise refused(where, f"needs {length} bytes", allowed=allowed, advice="pull it by name")
    return node


def _save(writer: _Writer, head: bytes, path: Path) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # write() and not a map: it needs no page faults (35 against 60 ms for 100 MB) and
        # a full /dev/shm is an OSError, where a map would end the process with SIGBUS.
        written = _write_all(fd, head)
        for source, size_bytes in zip(writer.sources, writer.sizes, strict=True):
            written += _write_all(fd, _content(source, size_bytes))
            written += _write_all(fd, bytes(aligned(size_bytes) - size_bytes))
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(fd)
    return written


def _write_all(fd: int, content: bytes | memoryview) -> int:
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]  # one call writes at most 2 GiB
    return memoryview(content).nbytes


def _content(source: Any, size_bytes: int) -> bytes | memoryview:
    """The bytes of one buffer's source, without a copy where it lies in order."""
    if not size_bytes or isinstance(source, bytes):
        return source if size_bytes else b""
    if is_of("numpy", "ndarray", source):
        numpy = sys.modules["numpy"]
        flat: memoryview = numpy.ascontiguousarray(source).reshape(-1).view(numpy.uint8).data
        return flat
    plain = source.detach().resolve_conj().resolve_neg().cpu().contiguous()
    torch = sys.modules["torch"]
    octets = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    start = plain.storage_offset() * plain.itemsize
    part: memoryview = octets[start : start + size_bytes].numpy().data
    return part


def _check_tensor(value: Any, where: Where) -> None:
    """Refuse a tensor whose values do not lie in one dense piece of memory."""
    advice = next((advice for test, advice in _NOT_DENSE if test(value)), None)
    if advice is not None:
        raise refused(where, f"is {a(value)} ({value.dtype}, {value.layout})", advice=advice)


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


def _bits(value: Any) -> tuple[bool, bool]:
    return value.is_conj(), value.is_neg()


def _numpy_dtype_node(dtype: Any, where: Where) -> Any:
    """A dtype as JSON: its string, [base, shape], or the fields of a structured one."""
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
    if dtype.hasobject or void or not NUMPY_DTYPE.fullmatch(dtype.str):
        advice = "send value.tolist()" if dtype.hasobject else "send it in a dtype of NumPy's own"
        raise refused(where, f"is of dtype {dtype}", advice=advice)
    return dtype.str


def _scalar_node(value: Any) -> Any:
    """JSON keeps None, bool, str, and int and float within bounds; the rest is tagged."""
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) is int and not -SAFE_INT < value < SAFE_INT:
        return {"int": hex(value)}
    return value


def _is_json(items: Iterable[Any]) -> bool:
    """True for a list or tuple that is its own JSON form: a fast path for long ones."""
    kinds = set(map(type, items))
    return (
        kinds <= SCALARS
        and (float not in kinds or all(math.isfinite(x) for x in items if type(x) is float))
        and (int not in kinds or all(abs(x) < SAFE_INT for x in items if type(x) is int))
    )


def _is_key(key: Any) -> bool:
    if type(key) in (tuple, frozenset):
        return all(map(_is_key, key))
    return type(key) in SCALARS or type(key) in (complex, bytes) or is_of("numpy", "generic", key)


def _is_named(value: object) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)
