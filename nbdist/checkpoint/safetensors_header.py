"""The head of a safetensors file: what lies where; pure, and strict with files of strangers.

    length (8 bytes, little endian) | JSON | data of the tensors, one right after the other

The metadata carries what torch 2.13's HuggingFaceStorageWriter adds (DCP_SHARDING_INFO:
where each tensor of the file begins in the whole one), so that
`dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))` reads the folder.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint import json_validation
from nbdist.checkpoint.durable_io import read_at
from nbdist.checkpoint.names import shown
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
ALIGNMENT = 64
"""The data begins at a multiple of this, so that maps of it are aligned."""
LENGTH_BYTES = 8
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""Dtype in a file -> torch's name and bytes of an element (safetensors 0.8)."""
IN_FILES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
TORCH_NAMES = frozenset(IN_FILES)
_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
MAX_NDIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file: all of one, or a box of it."""

    name: str
    dtype: str
    """As the file names it: "F32"."""
    shape: tuple[int, ...]
    """Of what is in the file."""
    offsets: tuple[int, ...] | None = None
    """Where it begins in the whole tensor; None of a file that does not say."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file holds."""

    tensors: Mapping[str, Stored]
    starts: Mapping[str, int]
    """Name -> first byte of its data, from the beginning of the file."""
    metadata: Mapping[str, str]


def header(tensors: Sequence[Stored], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Give the head of a file in which these tensors follow each other.

    Args:
        tensors: in order.
        metadata: what is said of them. Default: what torch's reader wants of a checkpoint.

    Raises:
        ValueError: two of one name, or one that would lie at a place that its dtype cannot
            have: order them by the size of their elements, the largest first.
        CheckpointError: there are too many for one file.
    """
    tree: dict[str, object] = {
        _METADATA: _metadata(tensors) if metadata is None else dict(metadata)
    }
    start = 0
    for tensor in tensors:
        stop = start + tensor.size_bytes
        if tensor.name in tree or start % DTYPES[tensor.dtype][1]:
            raise ValueError(f"{tensor.name} stands twice or at a place it cannot have ({start})")
        tree[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(tree, separators=(",", ":")).encode()
    text = text.ljust(-(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors are too many for one file; save fewer.")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _metadata(tensors: Sequence[Stored]) -> dict[str, str]:
    """As torch 2.13's filesystem.py writes it (`_write_files_from_queue`)."""
    offsets = {one.name: {"saved_offsets": list(_begin(one))} for one in tensors}
    sharding = json.dumps(offsets, separators=(",", ":"))
    return {_SHARDING: sharding, "DCP_VERSION": "1.0", "format": "pt"}


def _begin(tensor: Stored) -> tuple[int, ...]:
    return (0,) * len(tensor.shape) if tensor.offsets is None else tensor.offsets


def parse(fd: int, name: str) -> Header:
    """Read the head of an open file.

    Args:
        fd: a regular file.
        name: for messages.

    Raises:
        CheckpointError: not safetensors, or its head says something that cannot be.
        OSError: it cannot be read.
    """
    size_bytes = os.fstat(fd).st_size
    try:
        text = _text(fd, size_bytes)
        return _parsed(text, size_bytes - LENGTH_BYTES - len(text))
    except json_validation.Refused as error:
        raise CheckpointError(
            f"{shown(name)} is no safetensors file to trust: {error}; take another checkpoint."
        ) from error


def _text(fd: int, size_bytes: int) -> bytes:
    if size_bytes < LENGTH_BYTES:
        raise json_validation.Refused("it is too short")
    head = bytearray(LENGTH_BYTES)
    read_at(fd, memoryview(head), 0)
    length = int.from_bytes(head, "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
        raise json_validation.Refused(f"its header has {length} bytes")
    text = bytearray(length)
    read_at(fd, memoryview(text), LENGTH_BYTES)
    return bytes(text)


def _parsed(text: bytes, data_bytes: int) -> Header:
    tree = json_validation.loads(text)
    if type(tree) is not dict:
        raise json_validation.Refused("its header is no object")
    metadata = _TEXTS(tree.pop(_METADATA, {}), _METADATA)
    found = {
        json_validation.text(name, ""): _TENSOR(one, shown(name)) for name, one in tree.items()
    }
    begins = _offsets(metadata)
    if begins is not None and begins.keys() != found.keys():
        raise json_validation.Refused(f"{_SHARDING} speaks of other tensors")
    tensors = {
        name: _stored(name, one, None if begins is None else begins[name])
        for name, one in found.items()
    }
    spans = {name: one["data_offsets"] for name, one in found.items()}
    _check_spans(tensors, spans, data_bytes)
    data = LENGTH_BYTES + len(text)
    starts = {name: data + start for name, (start, _) in spans.items()}
    return Header(tensors=tensors, starts=starts, metadata=metadata)


def _offsets(metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]] | None:
    """Where each tensor begins in the whole one, as the metadata says."""
    if _SHARDING not in metadata:
        return None
    tree = json_validation.loads(metadata[_SHARDING].encode(errors="replace"))
    found = _SHARDS(tree, _SHARDING)
    return {name: one["saved_offsets"] for name, one in found.items()}


def _stored(name: str, found: Mapping[str, Any], offsets: tuple[int, ...] | None) -> Stored:
    if offsets is not None and len(offsets) != len(found["shape"]):
        raise json_validation.Refused(f"{_SHARDING} has {shown(name)} with other dimensions")
    return Stored(name=name, dtype=found["dtype"], shape=found["shape"], offsets=offsets)


def _check_spans(
    tensors: Mapping[str, Stored], spans: Mapping[str, tuple[int, ...]], data_bytes: int
) -> None:
    """The tensors follow each other without gaps and fill the file."""
    at = 0
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if start != at or stop - start != tensors[name].size_bytes:
            raise json_validation.Refused(f"{shown(name)} lies at [{start}, {stop})")
        at = stop
    if at != data_bytes:
        raise json_validation.Refused(f"its tensors have {at} bytes and the file {data_bytes}")


def _pair(value: object, where: str) -> tuple[int, ...]:
    found = json_validation.sequence(json_validation.count, at_most=2)(value, where)
    if len(found) != 2:  # noqa: PLR2004 - start and stop
        raise json_validation.Refused(f"{where} has {len(found)} numbers where two belong")
    return found


_SHAPE = json_validation.sequence(json_validation.count, at_most=MAX_NDIM)
_TENSOR = json_validation.fields(
    {"dtype": json_validation.one_of(frozenset(DTYPES)), "shape": _SHAPE, "data_offsets": _pair}
)
_SHARDS = json_validation.mapping(
    json_validation.text, json_validation.fields({"saved_offsets": _SHAPE})
)


def _long_text(value: object, where: str) -> str:
    """Metadata of others may be long and have line breaks."""
    if type(value) is not str:
        raise json_validation.Refused(f"{where} has {type(value).__name__} where text belongs")
    return value


_TEXTS = json_validation.mapping(_long_text, _long_text)
