"""Weights in safetensors files: a model of Hugging Face, or any other."""

from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING

import torch

from nbdist.checkpoint import safetensors_header
from nbdist.checkpoint.durable_io import read_at
from nbdist.checkpoint.names import shown
from nbdist.errors import CheckpointError
from nbdist.state.importers.tensor_index import Foreign, Part

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.state.importers.tensor_index import Fetch, Names

_INDEX = "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_INDEX_BYTES = 1 << 28


def files_of(path: Path) -> list[Path]:
    """The files of a folder, or the file itself; none where there are none.

    Raises:
        CheckpointError: an index that names something else than files beside it.
    """
    if path.is_file():
        return [path]
    index = path / _INDEX
    if not index.is_file():
        single = path / "model.safetensors"
        return [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError  # noqa: TRY301 - said below
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        message = f"{index} is no index of safetensors files; take another checkpoint."
        raise CheckpointError(message) from error
    wrong = [one for one in names if type(one) is not str or not _FILE.fullmatch(one)]
    if wrong:
        message = f"{index} names {shown(wrong[0])}, which is no file beside it."
        raise CheckpointError(message)
    return [path / name for name in sorted(names)]


def add(found: Foreign, paths: list[Path], names: Names) -> None:
    """Note the tensors of files.

    Args:
        found: to be added to.
        paths: of the files.
        names: how the class of the model names its tensors in files.

    Raises:
        CheckpointError: a file is damaged, or not there.
    """
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            message = f"{path} cannot be read ({error.strerror}); take another checkpoint."
            raise CheckpointError(message) from error
        try:
            header = safetensors_header.parse(fd, path.name)
        finally:
            os.close(fd)
        for name, stored in header.tensors.items():
            dtype = getattr(torch, safetensors_header.DTYPES[stored.dtype][0])
            key, first, shape = names.get(name, (f"model.{name}", 0, stored.shape))
            size = math.prod(stored.shape)
            fetch = _fetch(path, header.starts[name], dtype, first)
            found.add(key, shape, dtype, Part(first, first + size, fetch))


def _fetch(path: Path, offset: int, dtype: torch.dtype, first: int) -> Fetch:
    """Read an interval of a tensor that begins at an offset in a file."""

    def fetch(start: int, stop: int) -> torch.Tensor:
        room = torch.empty(stop - start, dtype=dtype)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            content = memoryview(room.view(torch.uint8).numpy().data)
            read_at(fd, content, offset + (start - first) * dtype.itemsize)
        except OSError as error:
            message = f"{path} cannot be read ({error.strerror}); take another checkpoint."
            raise CheckpointError(message) from error
        finally:
            os.close(fd)
        return room

    return fetch
