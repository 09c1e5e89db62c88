"""Reader of weights in safetensors files, from Hugging Face or any other tool."""

from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING

import torch

from nbdist.checkpoint import safetensors_header
from nbdist.checkpoint.durable_io import read_into
from nbdist.checkpoint.names import printable
from nbdist.errors import CheckpointError
from nbdist.state.importers.tensor_index import ForeignCheckpoint, TensorPart

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.state.importers.tensor_index import FetchElements, RenamedTensors

_INDEX = "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_INDEX_BYTES = 1 << 28


def find_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder, or the file itself.

    Raises:
        CheckpointError: the index is invalid or refers to files outside of its folder.
    """
    if path.is_file():
        return [path]
    index = path / _INDEX
    if not index.is_file():
        single = path / "model.safetensors"
        return [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError  # noqa: TRY301 - converted below
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        message = f"{index} is not a valid index of safetensors files. Load another checkpoint."
        raise CheckpointError(message) from error
    wrong = [name for name in names if type(name) is not str or not _FILE.fullmatch(name)]
    if wrong:
        message = (
            f"{index} refers to {printable(wrong[0])}, which is not a file name in its folder."
        )
        raise CheckpointError(message)
    return [path / name for name in sorted(names)]


def add_tensors(found: ForeignCheckpoint, paths: list[Path], names: RenamedTensors) -> None:
    """Add the tensors of files to an index.

    Args:
        found: index to add to.
        paths: the files.
        names: tensor names in the files of the model's class.

    Raises:
        CheckpointError: a file is damaged or missing.
    """
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            message = f"Cannot read {path} ({error.strerror}). Load another checkpoint."
            raise CheckpointError(message) from error
        try:
            header = safetensors_header.read_header(fd, path.name)
        finally:
            os.close(fd)
        for name, stored in header.tensors.items():
            dtype = getattr(torch, safetensors_header.DTYPES[stored.dtype][0])
            key, first, shape = names.get(name, (f"model.{name}", 0, stored.shape))
            size = math.prod(stored.shape)
            fetch = _fetch(path, header.starts[name], dtype, first)
            found.add_tensor(key, shape, dtype, TensorPart(first, first + size, fetch))


def _fetch(path: Path, offset: int, dtype: torch.dtype, first: int) -> FetchElements:
    """Return a function that reads intervals of a tensor at an offset in a file."""

    def fetch(start: int, stop: int) -> torch.Tensor:
        room = torch.empty(stop - start, dtype=dtype)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            content = memoryview(room.view(torch.uint8).numpy().data)
            read_into(fd, content, offset + (start - first) * dtype.itemsize)
        except OSError as error:
            message = f"Cannot read {path} ({error.strerror}). Load another checkpoint."
            raise CheckpointError(message) from error
        finally:
            os.close(fd)
        return room

    return fetch
