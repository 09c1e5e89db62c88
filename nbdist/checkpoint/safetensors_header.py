"""Reading and writing of safetensors headers. Headers of untrusted files are validated.

    length (8 bytes, little endian) | JSON | tensor data without gaps

The metadata includes DCP_SHARDING_INFO (the offsets of each tensor in the full tensor) as
HuggingFaceStorageWriter of torch 2.13 writes it, so that
`dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))` can read the folder.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint import json_validation
from nbdist.checkpoint.durable_io import read_into
from nbdist.checkpoint.names import printable
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
ALIGNMENT = 64
"""The data begins at a multiple of this, so that memory-mapped tensors are aligned."""
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
"""Dtype in a file -> torch dtype name and bytes per element (safetensors 0.8)."""
SAFETENSORS_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
TORCH_NAMES = frozenset(SAFETENSORS_NAMES)
_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
MAX_NDIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: a full tensor or a chunk of it."""

    name: str
    dtype: str
    """safetensors dtype, such as "F32"."""
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    offsets: tuple[int, ...] | None = None
    """First index in the full tensor; None if the file has no such metadata."""

    @property
    def size_bytes(self) -> int:
        """Size of its data in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Parsed header of a safetensors file."""

    tensors: Mapping[str, StoredTensor]
    starts: Mapping[str, int]
    """Name -> byte offset of its data from the beginning of the file."""
    metadata: Mapping[str, str]


def build_header(
    tensors: Sequence[StoredTensor], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Build the header of a file that contains these tensors in order.

    Args:
        tensors: the tensors in the order of the file.
        metadata: metadata of the file. Default: the metadata that the torch reader requires.

    Raises:
        ValueError: a duplicate name, or a tensor that is not aligned to its element size. Order
            the tensors by element size, largest first.
        CheckpointError: the header exceeds the limit of safetensors.
    """
    tree: dict[str, object] = {
        _METADATA: _metadata(tensors) if metadata is None else dict(metadata)
    }
    start = 0
    for tensor in tensors:
        stop = start + tensor.size_bytes
        if tensor.name in tree or start % DTYPES[tensor.dtype][1]:
            raise ValueError(f"{tensor.name} is a duplicate or misaligned at byte {start}.")
        tree[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(tree, separators=(",", ":")).encode()
    text = text.ljust(-(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors are too many for one file. Save fewer.")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _metadata(tensors: Sequence[StoredTensor]) -> dict[str, str]:
    """Build the metadata as torch 2.13 does (filesystem.py, `_write_files_from_queue`)."""
    offsets = {tensor.name: {"saved_offsets": list(_begin(tensor))} for tensor in tensors}
    sharding = json.dumps(offsets, separators=(",", ":"))
    return {_SHARDING: sharding, "DCP_VERSION": "1.0", "format": "pt"}


def _begin(tensor: StoredTensor) -> tuple[int, ...]:
    return (0,) * len(tensor.shape) if tensor.offsets is None else tensor.offsets


def read_header(fd: int, name: str) -> Header:
    """Read and validate the header of an open file.

    Args:
        fd: descriptor of a regular file.
        name: file name for error messages.

    Raises:
        CheckpointError: not a safetensors file, or the header is invalid.
        OSError: the file cannot be read.
    """
    size_bytes = os.fstat(fd).st_size
    try:
        text = _text(fd, size_bytes)
        return _parsed(text, size_bytes - LENGTH_BYTES - len(text))
    except json_validation.ValidationError as error:
        raise CheckpointError(
            f"Invalid safetensors file {printable(name)}: {error}. Load another checkpoint."
        ) from error


def _text(fd: int, size_bytes: int) -> bytes:
    if size_bytes < LENGTH_BYTES:
        raise json_validation.ValidationError("the file is too short")
    head = bytearray(LENGTH_BYTES)
    read_into(fd, memoryview(head), 0)
    length = int.from_bytes(head, "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
        raise json_validation.ValidationError(
            f"the header length is {length} bytes, which exceeds the file or the limit"
        )
    text = bytearray(length)
    read_into(fd, memoryview(text), LENGTH_BYTES)
    return bytes(text)


def _parsed(text: bytes, data_bytes: int) -> Header:
    tree = json_validation.loads(text)
    if type(tree) is not dict:
        raise json_validation.ValidationError("the header is not a JSON object")
    metadata = _TEXTS(tree.pop(_METADATA, {}), _METADATA)
    entries = {
        json_validation.text(name, "tensor name"): _TENSOR(entry, printable(name))
        for name, entry in tree.items()
    }
    begins = _offsets(metadata)
    if begins is not None and begins.keys() != entries.keys():
        raise json_validation.ValidationError(
            f"{_SHARDING} does not list the same tensors as the header"
        )
    tensors = {
        name: _stored(name, entry, None if begins is None else begins[name])
        for name, entry in entries.items()
    }
    spans = {name: entry["data_offsets"] for name, entry in entries.items()}
    _check_spans(tensors, spans, data_bytes)
    data = LENGTH_BYTES + len(text)
    starts = {name: data + start for name, (start, _) in spans.items()}
    return Header(tensors=tensors, starts=starts, metadata=metadata)


def _offsets(metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]] | None:
    """Return the offsets of each tensor in its full tensor, from the metadata."""
    if _SHARDING not in metadata:
        return None
    tree = json_validation.loads(metadata[_SHARDING].encode(errors="replace"))
    shards = _SHARDS(tree, _SHARDING)
    return {name: shard["saved_offsets"] for name, shard in shards.items()}


def _stored(name: str, found: Mapping[str, Any], offsets: tuple[int, ...] | None) -> StoredTensor:
    if offsets is not None and len(offsets) != len(found["shape"]):
        raise json_validation.ValidationError(
            f"{_SHARDING} has another number of dimensions for {printable(name)}"
        )
    return StoredTensor(name=name, dtype=found["dtype"], shape=found["shape"], offsets=offsets)


def _check_spans(
    tensors: Mapping[str, StoredTensor], spans: Mapping[str, tuple[int, ...]], data_bytes: int
) -> None:
    """Check that the tensors fill the file without gaps or overlaps."""
    offset = 0
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if start != offset or stop - start != tensors[name].size_bytes:
            raise json_validation.ValidationError(
                f"data_offsets [{start}, {stop}) of {printable(name)} do not match its size or"
                " leave a gap"
            )
        offset = stop
    if offset != data_bytes:
        raise json_validation.ValidationError(
            f"the tensors have {offset} bytes, but the file has {data_bytes}"
        )


def _pair(value: object, where: str) -> tuple[int, ...]:
    pair = json_validation.sequence(json_validation.count, at_most=2)(value, where)
    if len(pair) != 2:  # noqa: PLR2004 - start and stop
        raise json_validation.ValidationError(f"{where} must have 2 numbers, got {len(pair)}")
    return pair


_SHAPE = json_validation.sequence(json_validation.count, at_most=MAX_NDIM)
_TENSOR = json_validation.fields(
    {"dtype": json_validation.one_of(frozenset(DTYPES)), "shape": _SHAPE, "data_offsets": _pair}
)
_SHARDS = json_validation.mapping(
    json_validation.text, json_validation.fields({"saved_offsets": _SHAPE})
)


def _long_text(value: object, where: str) -> str:
    """Check a string of any length. Metadata of other writers may contain line breaks."""
    if type(value) is not str:
        raise json_validation.ValidationError(
            f"{where} must be a string, got {type(value).__name__}"
        )
    return value


_TEXTS = json_validation.mapping(_long_text, _long_text)
