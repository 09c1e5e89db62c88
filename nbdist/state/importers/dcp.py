"""Reader of torch.distributed.checkpoint folders, as Accelerate writes them with FSDP."""

from __future__ import annotations

import functools
import io
import math
import os
import re
from typing import TYPE_CHECKING, Any

import torch

from nbdist.checkpoint.chunks import Chunk, chunk_to_intervals
from nbdist.checkpoint.durable_io import read_into
from nbdist.checkpoint.names import printable
from nbdist.errors import CheckpointError
from nbdist.state.importers import safe_unpickler
from nbdist.state.importers.tensor_index import TensorPart
from nbdist.state.layouts.base import bare_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.state.importers.tensor_index import FetchElements, ForeignCheckpoint

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_SCALARS = frozenset({"step"})


def add_tensors(
    found: ForeignCheckpoint,
    folder: Path,
    named: Callable[[str], tuple[str, str] | None],
    *,
    trust: bool,
) -> None:
    """Add the tensors of a folder to an index.

    Args:
        found: index to add to.
        folder: folder with a `.metadata` file.
        named: function of a name in the folder: returns the parameter and the name of its
            optimizer state ("" for the parameter itself), or None to skip it.
        trust: allow code in the files to run.

    Raises:
        CheckpointError: the folder is damaged or contains code.
    """
    read = safe_unpickler.read_dcp_metadata(folder / ".metadata", trust=trust)
    try:
        for name, shape, dtype, boxes in _tensors(read):
            parsed = named(name)
            if parsed is None:
                continue
            parameter, state = bare_name(parsed[0]), parsed[1]
            load = [_loader(folder, location, dtype, trust=trust) for _, location in boxes]
            if state in _SCALARS or (state and not shape):
                found.scalar_state.setdefault(parameter, {})[state] = float(load[0]().reshape(()))
                continue
            key = f"optim.state.{parameter}.{state}" if state else f"model.{parameter}"
            for (box, _), loader in zip(boxes, load, strict=True):
                found.add_tensor(key, shape, dtype, *_parts(shape, box, loader))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        message = (
            f"{folder / '.metadata'} was not written by torch.distributed.checkpoint or is corrupt"
            f" ({type(error).__name__}: {str(error)[:80]}). Load another checkpoint."
        )
        raise CheckpointError(message) from error


ByteRange = tuple[str, int, int]
"""File name, offset, number of bytes."""


def _tensors(
    read: Any,
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, list[tuple[Chunk, ByteRange]]]]:
    """Yield the name, shape and dtype of each tensor, and its chunks with their locations."""
    places: dict[tuple[str, tuple[int, ...]], ByteRange] = {}
    for index, info in read.storage_data.items():
        location = (str(info.relative_path), int(info.offset), int(info.length))
        places[str(index.fqn), tuple(getattr(index, "offset", None) or ())] = location
    for name, entry in read.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        state = getattr(entry.properties, "state", None)
        dtype = state[0] if isinstance(state, tuple) else entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError("a dtype is missing")
        shape = tuple(map(int, entry.size))
        boxes = [Chunk(tuple(map(int, c.offsets)), tuple(map(int, c.sizes))) for c in entry.chunks]
        yield str(name), shape, dtype, [(box, places[str(name), box.offsets]) for box in boxes]


def _parts(
    shape: tuple[int, ...], box: Chunk, load: Callable[[], torch.Tensor]
) -> Iterator[TensorPart]:
    """Yield the intervals of the flattened tensor that a chunk covers."""
    offset = 0
    for start, stop in chunk_to_intervals(shape, box):
        yield TensorPart(start, stop, _fetch(load, start, offset, box))
        offset += stop - start


def _fetch(load: Callable[[], torch.Tensor], start: int, at: int, box: Chunk) -> FetchElements:
    def fetch(low: int, high: int) -> torch.Tensor:
        flat = load().reshape(-1)
        if flat.numel() != math.prod(box.sizes):
            raise CheckpointError(
                "A tensor has fewer elements than its shape. Load another checkpoint."
            )
        return flat[at + low - start : at + high - start]

    return fetch


def _loader(
    folder: Path, where: ByteRange, dtype: torch.dtype, *, trust: bool
) -> Callable[[], torch.Tensor]:
    """Return a function that reads one chunk."""
    name, offset, length = where
    if not _FILE.fullmatch(name) or offset < 0 or length < 0:
        message = (
            f"{folder / '.metadata'} refers to {printable(name)}, which is not a file name in its"
            " folder."
        )
        raise CheckpointError(message)

    def load() -> torch.Tensor:
        tensor = _box(folder / name, offset, length, trust)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
            message = f"{folder / name} has no tensor at offset {offset}. Load another checkpoint."
            raise CheckpointError(message)
        return tensor

    return load


# The intervals of a chunk are read one after the other: caching the last chunk suffices.
@functools.lru_cache(maxsize=1)
def _box(path: Path, offset: int, length: int, trust: bool) -> Any:  # noqa: FBT001 - a key of the cache
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if offset + length > os.fstat(fd).st_size:
                raise OSError("the file is too short")
            content = bytearray(length)
            read_into(fd, memoryview(content), offset)
        finally:
            os.close(fd)
    except OSError as error:
        message = f"Cannot read {path} ({error.strerror or error}). Load another checkpoint."
        raise CheckpointError(message) from error
    return safe_unpickler.load_torch_file(io.BytesIO(content), trust=trust, name=path)
