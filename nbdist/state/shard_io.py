"""Reading and writing of shards in files.

Runs on the ranks, and in the kernel for ``read_state_dict``. A rank writes the elements that it
owns and reads the elements that it needs, with any sharding; no process holds more than its own
part. In a checkpoint each rank writes its own files, named `<kind>-<rank>-<chunk>.safetensors`:
chunk number b of a tensor is in file b, because torch's HuggingFaceStorageReader supports one chunk
of a tensor per file.

``write_regions`` writes to files that all ranks share, for an export and a pull. The file and
offset of every tensor are known in advance, so the ranks do not communicate; the caller
synchronizes them.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from nbdist.checkpoint import CheckpointReader
from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES
from nbdist.checkpoint.name_validation import printable
from nbdist.checkpoint.safetensors_writer import SHARDING_KEY, StoredTensor
from nbdist.errors import CheckpointError
from nbdist.state import base_model
from nbdist.state.shards import (
    Chunk,
    Shard,
    ShardPiece,
    chunk_to_intervals,
    interval_to_chunks,
    joined_intervals,
    pieces_within,
)
from nbdist.state.tensor_index import (
    TensorIndex,
    check_shapes,
    open_safetensors,
    part_of,
    tensor_as_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from nbdist.checkpoint import CheckpointFile, Manifest, PendingCheckpoint
    from nbdist.checkpoint.safetensors_writer import SafetensorsWriter
    from nbdist.state.shards import ShardMap

SUFFIX = ".safetensors"
SLICE_BYTES = 64 << 20
"""Bytes that pass through host memory at a time: from a GPU, or to another dtype."""
_WRITEBACK_BYTES = 1 << 20
"""Writeback of a shared file is started after writes of at least so many bytes."""


class _ShardChunk(NamedTuple):
    stored: StoredTensor
    start: int
    """Index of its first element in the flattened tensor."""
    shard: Shard


def write_shards(
    shards: ShardMap, draft: PendingCheckpoint, rank: int, kind: str
) -> list[CheckpointFile]:
    """Write this rank's shards; blocks until they are on disk.

    A tensor without elements is written by rank 0.

    Args:
        shards: owned shards: each element on exactly one rank.
        draft: the checkpoint that all ranks are writing.
        rank: rank of this process, for file names and messages.
        kind: prefix of the file names: "model", "optim".

    Returns:
        The files, for the rank's report; empty if the rank owns no elements.

    Raises:
        CheckpointError: a write failed, or safetensors does not support a dtype. Partly written
            files are removed.
    """
    writers: list[SafetensorsWriter] = []
    try:
        # Keep all files open until the last is written: by then most data is on disk, and the
        # fsyncs share one journal commit.
        with ExitStack() as stack:
            for number, chunks in enumerate(_chunks_by_file(shards, rank)):
                name = f"{kind}-{rank:05d}-{number}{SUFFIX}"
                writer = draft.create_file(name, [chunk.stored for chunk in chunks])
                writers.append(stack.enter_context(writer))
                for chunk in chunks:
                    for content in _content(chunk):
                        writer.write(content)
    except OSError as error:
        raise CheckpointError(
            f"rank {rank} cannot write its part of {draft.location} ({error.strerror}, errno"
            f" {error.errno}). Free disk space, or save to another folder."
        ) from error
    return [writer.result for writer in writers]


def _chunks_by_file(shards: ShardMap, rank: int) -> list[list[_ShardChunk]]:
    files: list[list[_ShardChunk]] = []
    for name, shard in shards.items():
        dtype = str(shard.dtype).removeprefix("torch.")
        if dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"{printable(name)} has dtype {shard.dtype}, which safetensors does not support."
                f" Supported: {', '.join(sorted(SAFETENSORS_DTYPES))}."
            )
        for number, (start, chunk) in enumerate(_owned_chunks(shard, rank)):
            if number == len(files):
                files.append([])
            stored = StoredTensor(name=name, dtype=dtype, shape=chunk.sizes, offsets=chunk.offsets)
            files[number].append(_ShardChunk(stored, start, shard))
    for chunks in files:
        # Largest itemsize first: each chunk is then aligned to its itemsize without gaps.
        chunks.sort(key=lambda chunk: (-chunk.shard.dtype.itemsize, chunk.stored.name))
    return files


def _owned_chunks(shard: Shard, rank: int) -> Iterator[tuple[int, Chunk]]:
    """Yield the chunks of a shard, each with the index of its first element."""
    if 0 in shard.shape and rank == 0:
        yield 0, Chunk((0,) * len(shard.shape), shard.shape)
    for start, stop in joined_intervals(shard):
        position = start
        for chunk in interval_to_chunks(shard.shape, start, stop):
            yield position, chunk
            position += chunk.numel


def _content(chunk: _ShardChunk) -> Iterator[memoryview]:
    """Yield the bytes of a chunk, without a copy if they are in host memory."""
    start, stop = chunk.start, chunk.start + math.prod(chunk.stored.shape)
    for piece in pieces_within(chunk.shard.pieces, start, stop):
        view = piece.view.detach()
        if view.device.type == "cpu":
            yield tensor_as_bytes(view)
        else:
            for block in view.split(SLICE_BYTES // view.element_size()):
                yield tensor_as_bytes(block.cpu())


def read_shards(
    folder: Path,
    manifest: Manifest,
    target: ShardMap,
    on_progress: Callable[[int], object] | None = None,
) -> int:
    """Read the pieces of `target` from a checkpoint, in place.

    Reads only the needed bytes. All keys, shapes and file headers are checked before the first
    read. Values are cast to the dtype of `target`. Does not verify checksums: see
    ``checkpoint.verify_files``.

    Args:
        manifest: its manifest; a checkpoint that has replaced it since is refused.
        target: shards to fill; their keys may be aliases.
        on_progress: called after each read with the number of bytes read so far.

    Returns:
        Number of bytes read.

    Raises:
        CheckpointError: keys are missing or have other shapes, elements are missing, or a
            file is damaged.
    """
    index = _index_for(folder, manifest, target)
    return index.read_into(target, on_progress)


def files_to_read(folder: Path, manifest: Manifest, target: ShardMap) -> set[str]:
    """Return the names of the files that a target needs; requires only the file headers.

    Raises:
        CheckpointError: as for ``read_shards``.
    """
    index = _index_for(folder, manifest, target)
    return {
        part.file
        for key, shard in target.items()
        for piece in shard.pieces
        for _, _, part in index.covering(key, piece.start, piece.stop)
    }


def read_state_dict(folder: Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Return whole tensors on the CPU, by name without the prefix.

    A tensor that is contiguous in one file is a view of a private memory map of that file: it
    uses no memory before it is accessed, and writes to it stay in this process. Other tensors
    (most, if several ranks wrote the checkpoint) are read immediately. Tied tensors are the same
    tensor under all their names. Works without a session and without ranks.

    Do not modify the files while such a tensor is in use; removing them is fine. Tensors that are
    stored by reference are read from the files of the base model.

    Raises:
        CheckpointError: there is no checkpoint, a file is damaged, or a base model is missing or
            has changed.
    """
    with CheckpointReader.open_folder(folder) as opened:
        manifest = opened.manifest
        wanted = {
            name: manifest.aliases.get(name, name)
            for name in (*manifest.keys, *manifest.aliases)
            if name.startswith(prefix)
        }
        index = _build_index(opened, {key: key for key in wanted.values()})
    if referenced := manifest.referenced.keys() & set(wanted.values()):
        index.parts |= base_model.open_references(manifest, sorted(referenced), ()).parts
    tensors = {key: _whole_tensor(index, key) for key in dict.fromkeys(wanted.values())}
    return {name.removeprefix(prefix): tensors[key] for name, key in wanted.items()}


def _whole_tensor(index: TensorIndex, key: str) -> torch.Tensor:
    """Return a tensor, as a view of a memory map if it is contiguous in one file."""
    (shape, dtype), parts = index.keys[key], index.parts[key]
    numel = math.prod(shape)
    # Checked before the shape in the manifest is allocated.
    if sum(part.stop - part.start for part in parts) < numel:
        raise CheckpointError(
            f"The files lack elements of {printable(key)}. Load another checkpoint."
        )
    if [(part.start, part.stop) for part in parts] == [(0, numel)]:
        return parts[0].fetch(0, numel).view(shape)
    tensor = torch.empty(shape, dtype=dtype)
    piece = ShardPiece(0, numel, tensor.view(-1))
    index.read_into({key: Shard(shape=shape, dtype=dtype, pieces=(piece,))})
    return tensor


def _index_for(folder: Path, manifest: Manifest, target: ShardMap) -> TensorIndex:
    """Index the files of a checkpoint by the keys of a target that matches it.

    Raises:
        CheckpointError: tensors are missing or have another shape; the message lists them. Or
            the checkpoint was replaced, or a file is damaged.
    """
    with CheckpointReader.open_folder(folder) as opened:
        if opened.manifest.id != manifest.id:
            raise CheckpointError(f"{folder} was replaced by a newer save. Load it again.")
        keys = {name: manifest.aliases.get(name, name) for name in target}
        saved = manifest.keys
        check_shapes(
            {name: shard.shape for name, shard in target.items()},
            {name: saved[key].shape for name, key in keys.items() if key in saved},
        )
        return _build_index(opened, keys)


def _build_index(opened: CheckpointReader, keys: dict[str, str]) -> TensorIndex:
    """Index the files of a checkpoint; reads their headers.

    Args:
        keys: key in the index -> key in the manifest.
    """
    index, names = TensorIndex(), dict[str, list[str]]()
    for name, key in keys.items():
        stored = opened.manifest.keys[key]
        index.add_tensor(name, stored.shape, getattr(torch, stored.dtype))
        names.setdefault(key, []).append(name)
    for file in opened.manifest.files:
        if file.name.endswith(SUFFIX):
            _index_file(index, opened, file, names)
    return index


def _index_file(
    index: TensorIndex,
    opened: CheckpointReader,
    file: CheckpointFile,
    names: dict[str, list[str]],
) -> None:
    """Add the parts of tensors in one file; `names` are the keys in the index by stored key."""
    with opened.open_file(file) as content:
        # By descriptor: the path may refer to another checkpoint by now.
        tensors = open_safetensors(f"/proc/self/fd/{content.fileno()}", file.name)
    stored_keys = set(tensors.keys())
    offsets = _saved_offsets(tensors.metadata() or {}, stored_keys, file.name)
    for key in stored_keys & names.keys():
        stored, part = opened.manifest.keys[key], tensors.get_slice(key)
        chunk = Chunk(offsets.get(key, (0,) * len(stored.shape)), tuple(part.get_shape()))
        try:
            spans = list(chunk_to_intervals(stored.shape, chunk))
        except ValueError:
            spans = None
        if spans is None or part.get_dtype() != SAFETENSORS_DTYPES[stored.dtype][0]:
            raise CheckpointError(
                f"{printable(key)} in {file.name} does not match the manifest. Load another"
                " checkpoint."
            )
        load = partial(tensors.get_tensor, key)
        offset = 0
        for start, stop in spans:
            for name in names[key]:
                index.parts[name].append(part_of(load, start, stop, offset=offset, file=file.name))
            offset += stop - start


def _saved_offsets(
    metadata: dict[str, str], names: Collection[str], file: str
) -> dict[str, tuple[int, ...]]:
    """Return the offsets of each tensor in its full tensor, from the metadata of a file."""
    if SHARDING_KEY not in metadata:
        return {}
    try:
        tree = json.loads(metadata[SHARDING_KEY])
        offsets = {name: tuple(tree[name]["saved_offsets"]) for name in names}
        if any(type(first) is not int for offset in offsets.values() for first in offset):
            raise ValueError("offsets must be integers")  # noqa: TRY301 - converted below
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"Invalid safetensors file {printable(file)}: {SHARDING_KEY} does not list the offsets"
            " of its tensors. Load another checkpoint."
        ) from error
    return offsets


# -- files that all ranks share


class TensorFileRegion(NamedTuple):
    """Region of a file for elements [start, stop) of a flattened tensor."""

    path: Path
    offset: int
    """Offset of its first byte."""
    dtype: torch.dtype
    key: str
    start: int
    stop: int


class OpenFiles:
    """Existing files to write to, each opened once.

    A context manager; on exit without an error the files are flushed to disk with fsync.
    """

    def __init__(self, *, durable: bool = True) -> None:
        self._descriptors: dict[Path, int] = {}
        self._durable = durable

    def write_tensor(
        self, path: Path, tensor: torch.Tensor, dtype: torch.dtype, offset: int
    ) -> int:
        """Write a tensor in row-major order, cast to a dtype; return the number of bytes.

        Raises:
            OSError: the disk is full or a limit was reached.
        """
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fd, flat = self._descriptors[path], tensor.detach().reshape(-1)
        for part in flat.split(SLICE_BYTES // max(flat.element_size(), dtype.itemsize)):
            content, start = tensor_as_bytes(part.to("cpu", dtype)), offset
            while content:
                count = os.pwrite(fd, content, offset)
                content, offset = content[count:], offset + count
            if self._durable and offset - start >= _WRITEBACK_BYTES:
                # The disk is busy while the rest is copied. Linux: DONTNEED starts writeback of
                # dirty pages and drops only clean ones.
                os.posix_fadvise(fd, start, offset - start, os.POSIX_FADV_DONTNEED)
        return flat.numel() * dtype.itemsize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._durable:
                for fd in self._descriptors.values():
                    os.fsync(fd)
        finally:
            for fd in self._descriptors.values():
                os.close(fd)
            self._descriptors.clear()


@torch.no_grad()
def write_regions(
    files: OpenFiles,
    regions: Sequence[TensorFileRegion],
    shards: ShardMap,
    *,
    on_progress: Callable[[int], object],
) -> None:
    """Write this rank's owned elements of each region.

    Args:
        shards: owned shards: each element on exactly one rank.
        on_progress: called after each region with the number of bytes written so far.

    Raises:
        OSError: the disk is full or a limit was reached.
    """
    written = 0
    for path, offset, dtype, key, start, stop in regions:
        for piece in pieces_within(shards[key].pieces if key in shards else (), start, stop):
            place = offset + (piece.start - start) * dtype.itemsize
            written += files.write_tensor(path, piece.view, dtype, place)
        on_progress(written)
