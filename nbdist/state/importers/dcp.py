"""Reader of torch.distributed.checkpoint folders, as Accelerate writes them with FSDP."""

from __future__ import annotations

import functools
import io
import re
from typing import TYPE_CHECKING, Any

import torch

from nbdist.checkpoint.name_validation import printable
from nbdist.errors import CheckpointError
from nbdist.state.importers import safe_unpickler
from nbdist.state.layouts.base import bare_name
from nbdist.state.shards import Chunk, chunk_to_intervals
from nbdist.state.tensor_index import part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.state.tensor_index import ForeignCheckpoint

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")

_PREFIXES = ("model.", "optimizer.state.", "optim.state.")

ByteRange = tuple[str, int, int]
"""File name, offset, number of bytes."""


def find_folders(path: Path) -> list[Path]:
    """Return the folders of torch.distributed.checkpoint at or below a path."""
    if (path / ".metadata").is_file():
        return [path]
    # The names are those of Accelerate's save_state.
    folders = [path / "pytorch_model_fsdp_0", path / "optimizer_0"]
    return [folder for folder in folders if (folder / ".metadata").is_file()]


def add_tensors(found: ForeignCheckpoint, folder: Path, *, trust: bool) -> None:
    """Add the tensors of a folder to an index.

    Args:
        folder: folder with a `.metadata` file.
        trust: allow code in the files to run.

    Raises:
        CheckpointError: the folder is damaged or contains code.
    """
    metadata = safe_unpickler.read_dcp_metadata(folder / ".metadata", trust=trust)
    try:
        for name, shape, dtype, chunks in _tensors(metadata):
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
            if prefix is None:
                continue
            parameter, state = name.removeprefix(prefix), ""
            if prefix != "model.":
                parameter, _, state = parameter.rpartition(".")
            parameter = bare_name(parameter)
            loaders = [_loader(folder, where, dtype, trust=trust) for _, where in chunks]
            if state == "step" or (state and not shape):
                scalar = float(loaders[0]().reshape(()))
                found.scalar_state.setdefault(parameter, {})[state] = scalar
                continue
            key = f"optim.state.{parameter}.{state}" if state else f"model.{parameter}"
            for (chunk, _), load in zip(chunks, loaders, strict=True):
                offset = 0
                for start, stop in chunk_to_intervals(shape, chunk):
                    found.add_tensor(key, shape, dtype, part_of(load, start, stop, offset=offset))
                    offset += stop - start
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / '.metadata'} was not written by torch.distributed.checkpoint or is corrupt"
            f" ({type(error).__name__}: {str(error)[:80]}). Load another checkpoint."
        ) from error


def _tensors(
    metadata: Any,
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, list[tuple[Chunk, ByteRange]]]]:
    """Yield the name, shape and dtype of each tensor, and its chunks with their locations."""
    places: dict[tuple[str, tuple[int, ...]], ByteRange] = {}
    for index, info in metadata.storage_data.items():
        where = (str(info.relative_path), int(info.offset), int(info.length))
        places[str(index.fqn), tuple(getattr(index, "offset", None) or ())] = where
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        state = getattr(entry.properties, "state", None)
        dtype = state[0] if isinstance(state, tuple) else entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError("a dtype is missing")
        shape = tuple(map(int, entry.size))
        chunks = [Chunk(tuple(map(int, c.offsets)), tuple(map(int, c.sizes))) for c in entry.chunks]
        located = [(chunk, places[str(name), chunk.offsets]) for chunk in chunks]
        yield str(name), shape, dtype, located


def _loader(
    folder: Path, where: ByteRange, dtype: torch.dtype, *, trust: bool
) -> Callable[[], torch.Tensor]:
    name, offset, length = where
    if not _FILE.fullmatch(name) or offset < 0 or length < 0:
        raise CheckpointError(
            f"{folder / '.metadata'} refers to {printable(name)}, which is not a file name in its"
            " folder. Load another checkpoint."
        )

    def load() -> torch.Tensor:
        tensor = _load_chunk(folder / name, offset, length, trust)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
            raise CheckpointError(
                f"{folder / name} has no tensor at offset {offset}. Load another checkpoint."
            )
        return tensor

    return load


# The intervals of a chunk are read one after the other: caching the last chunk suffices.
@functools.lru_cache(maxsize=1)
def _load_chunk(path: Path, offset: int, length: int, trust: bool) -> Any:  # noqa: FBT001 - a key of the cache
    try:
        # The size first: a pipe would block, and a wrong length would allocate memory.
        content = b""
        if path.is_file() and offset + length <= path.stat().st_size:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"Cannot read {path} ({error.strerror}). Load another checkpoint."
        ) from error
    if len(content) < length:
        raise CheckpointError(f"Cannot read {path} (truncated). Load another checkpoint.")
    return safe_unpickler.load_torch_file(io.BytesIO(content), trust=trust, name=path)
