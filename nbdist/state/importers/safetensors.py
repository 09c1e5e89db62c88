"""Reader of weights in safetensors files, from Hugging Face or any other tool."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES
from nbdist.checkpoint.name_validation import printable
from nbdist.errors import CheckpointError
from nbdist.state.tensor_index import open_safetensors, part_of

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.state.tensor_index import TensorIndex

_INDEX = "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_INDEX_BYTES = 1 << 28
_DTYPES = {stored: getattr(torch, name) for name, (stored, _) in SAFETENSORS_DTYPES.items()}
RenamedTensors = Mapping[str, tuple[str, int, tuple[int, ...]]]
"""Tensor name in files -> key, index of its first element there and shape of the whole tensor."""


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
        raise CheckpointError(
            f"{index} is not a valid index of safetensors files. Load another checkpoint."
        ) from error
    wrong = [name for name in names if type(name) is not str or not _FILE.fullmatch(name)]
    if wrong:
        raise CheckpointError(
            f"{index} refers to {printable(wrong[0])}, which is not a file name in its folder."
            " Load another checkpoint."
        )
    return [path / name for name in sorted(names)]


def add_tensors(found: TensorIndex, paths: list[Path], names: RenamedTensors) -> None:
    """Add the tensors of files to an index.

    Args:
        found: index to add to.
        paths: the files.
        names: tensor names in the files of the model's class.

    Raises:
        CheckpointError: a file is damaged or missing.
    """
    for path in paths:
        if not path.is_file():  # a pipe would block
            raise CheckpointError(f"Cannot read {path} (not a file). Load another checkpoint.")
        file = open_safetensors(path, path.name)
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            part = file.get_slice(name)
            stored_shape = tuple(part.get_shape())
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{printable(name)} in {path} has dtype {part.get_dtype()}, which torch does"
                    " not support. Load another checkpoint."
                )
            key, first, shape = names.get(name, (f"model.{name}", 0, stored_shape))
            size = math.prod(stored_shape)
            load = partial(file.get_tensor, name)
            found.add_tensor(key, shape, dtype, part_of(load, first, first + size))
