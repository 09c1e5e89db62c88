"""Folders of torch.distributed.checkpoint, as Accelerate writes them under FSDP."""

from __future__ import annotations

import functools
import io
import math
import os
import re
from typing import TYPE_CHECKING, Any

import torch

from nbdist.checkpoint.chunks import Box, intervals
from nbdist.checkpoint.durable_io import read_at
from nbdist.checkpoint.names import shown
from nbdist.errors import CheckpointError
from nbdist.state.importers import safe_unpickler
from nbdist.state.importers.tensor_index import Part
from nbdist.state.layouts.base import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.state.importers.tensor_index import Fetch, Foreign

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_SCALARS = frozenset({"step"})


def add(
    found: Foreign, folder: Path, named: Callable[[str], tuple[str, str] | None], *, trust: bool
) -> None:
    """Note the tensors of a folder.

    Args:
        found: to be added to.
        folder: with `.metadata` in it.
        named: name in the folder -> parameter, and which state of it or "" for itself; None
            for what is not wanted.
        trust: whether code in it may run.

    Raises:
        CheckpointError: it is damaged, or holds code.
    """
    read = safe_unpickler.metadata(folder / ".metadata", trust=trust)
    try:
        for name, shape, dtype, boxes in _tensors(read):
            wanted = named(name)
            if wanted is None:
                continue
            parameter, state = plain(wanted[0]), wanted[1]
            load = [_loader(folder, where, dtype, trust=trust) for _, where in boxes]
            if state in _SCALARS or (state and not shape):
                found.counts.setdefault(parameter, {})[state] = float(load[0]().reshape(()))
                continue
            key = f"optim.state.{parameter}.{state}" if state else f"model.{parameter}"
            for (box, _), one in zip(boxes, load, strict=True):
                found.add(key, shape, dtype, *_parts(shape, box, one))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        message = (
            f"{folder / '.metadata'} is not what torch.distributed.checkpoint writes"
            f" ({type(error).__name__}: {str(error)[:80]}); take another checkpoint."
        )
        raise CheckpointError(message) from error


Where = tuple[str, int, int]
"""File, first byte, bytes."""


def _tensors(
    read: Any,
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, list[tuple[Box, Where]]]]:
    """Each tensor with the boxes that it is cut into, and where they are."""
    places: dict[tuple[str, tuple[int, ...]], Where] = {}
    for index, info in read.storage_data.items():
        where = (str(info.relative_path), int(info.offset), int(info.length))
        places[str(index.fqn), tuple(getattr(index, "offset", None) or ())] = where
    for name, entry in read.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        state = getattr(entry.properties, "state", None)
        dtype = state[0] if isinstance(state, tuple) else entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError("a dtype is missing")
        shape = tuple(map(int, entry.size))
        boxes = [Box(tuple(map(int, c.offsets)), tuple(map(int, c.sizes))) for c in entry.chunks]
        yield str(name), shape, dtype, [(box, places[str(name), box.offsets]) for box in boxes]


def _parts(shape: tuple[int, ...], box: Box, load: Callable[[], torch.Tensor]) -> Iterator[Part]:
    """The intervals of the flattened tensor that a box has."""
    at = 0
    for start, stop in intervals(shape, box):
        yield Part(start, stop, _fetch(load, start, at, box))
        at += stop - start


def _fetch(load: Callable[[], torch.Tensor], start: int, at: int, box: Box) -> Fetch:
    def fetch(low: int, high: int) -> torch.Tensor:
        flat = load().reshape(-1)
        if flat.numel() != math.prod(box.sizes):
            raise CheckpointError("a tensor is shorter than it says; take another checkpoint.")
        return flat[at + low - start : at + high - start]

    return fetch


def _loader(
    folder: Path, where: Where, dtype: torch.dtype, *, trust: bool
) -> Callable[[], torch.Tensor]:
    """Read one box; its intervals come one after the other, so the last one is kept."""
    name, offset, length = where
    if not _FILE.fullmatch(name) or offset < 0 or length < 0:
        message = f"{folder / '.metadata'} names {shown(name)}, which is no file beside it."
        raise CheckpointError(message)

    def load() -> torch.Tensor:
        tensor = _box(folder / name, offset, length, trust)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
            message = f"{folder / name} has no tensor at {offset}; take another checkpoint."
            raise CheckpointError(message)
        return tensor

    return load


@functools.lru_cache(maxsize=1)
def _box(path: Path, offset: int, length: int, trust: bool) -> Any:  # noqa: FBT001 - a key of the cache
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if offset + length > os.fstat(fd).st_size:
                raise OSError("it is too short")
            content = bytearray(length)
            read_at(fd, memoryview(content), offset)
        finally:
            os.close(fd)
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror or error}); take another checkpoint."
        raise CheckpointError(message) from error
    return safe_unpickler.torch_file(io.BytesIO(content), trust=trust, name=path)
