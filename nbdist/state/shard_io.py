"""Reading and writing of shards in the files of a checkpoint.

Runs on the ranks, and in the kernel for ``read_state_dict``. A rank writes the elements that it
owns and reads the elements that it needs, with any sharding; no process holds more than its own
part. Files are named `<kind>-<rank>-<chunk>.safetensors`: chunk number b of a tensor is in file b,
because torch's HuggingFaceStorageReader supports one chunk of a tensor per file.
"""

from __future__ import annotations

import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbdist.checkpoint import safetensors_header
from nbdist.checkpoint.chunks import Chunk, chunk_to_intervals, interval_to_chunks
from nbdist.checkpoint.durable_io import read_into
from nbdist.checkpoint.names import printable
from nbdist.checkpoint.reader import CheckpointReader
from nbdist.checkpoint.safetensors_header import StoredTensor
from nbdist.checkpoint.writer import SafetensorsWriter
from nbdist.errors import CheckpointError
from nbdist.state.shards import Piece, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nbdist.checkpoint.manifest import CheckpointFile, Manifest, TensorMetadata
    from nbdist.state.shards import ShardMap

WriterFactory = Callable[[PurePath, Sequence[StoredTensor]], SafetensorsWriter]
SUFFIX = ".safetensors"
SLICE_BYTES = 64 << 20
"""Bytes that pass through host memory at a time: to and from a GPU, or to another dtype."""
_LISTED = 10


class _ShardChunk(NamedTuple):
    """A chunk of a shard to write."""

    stored: StoredTensor
    start: int
    """Index of its first element in the flattened tensor."""
    shard: Shard


class _FileInterval(NamedTuple):
    """An interval of a flattened tensor in a file."""

    start: int
    stop: int
    file: CheckpointFile
    offset: int
    """Offset of its first byte in the file."""


class _FileRead(NamedTuple):
    """A read from a file into a tensor."""

    file: CheckpointFile
    offset: int
    dtype: torch.dtype
    """Dtype in the file."""
    into: torch.Tensor
    """1-D, contiguous."""


def write_shards(
    shards: ShardMap, folder: PurePath, rank: int, kind: str, new: WriterFactory = SafetensorsWriter
) -> list[CheckpointFile]:
    """Write this rank's shards; blocks until they are on disk.

    A tensor without elements is written by rank 0.

    Args:
        shards: owned shards: each element on exactly one rank.
        folder: folder of a pending checkpoint (``create_draft``).
        rank: rank of this process, for file names and messages.
        kind: prefix of the file names: "model", "optim".
        new: creates a file in the storage of the checkpoint.

    Returns:
        The files, for the rank's report; empty if the rank owns no elements.

    Raises:
        CheckpointError: a write failed, or safetensors does not support a dtype. Partly written
            files are removed.
    """
    try:
        # Keep all files open until the last is written: by then most data is on disk, and the
        # fsyncs share one journal commit.
        with ExitStack() as stack:
            writers = [
                _write_file(stack, new, folder / f"{kind}-{rank:05d}-{number}{SUFFIX}", parts)
                for number, parts in enumerate(_by_file(shards, rank))
            ]
    except OSError as error:
        raise CheckpointError(
            f"rank {rank} cannot write its part of {folder} ({error.strerror}, errno"
            f" {error.errno}). Free disk space, or save to another folder."
        ) from error
    return [writer.result for writer in writers]


def read_shards(
    folder: Path,
    manifest: Manifest,
    target: ShardMap,
    on_progress: Callable[[int], object] | None = None,
) -> int:
    """Read the pieces of `target` from a checkpoint, in place.

    Reads only the needed bytes. All keys, shapes and file headers are checked before the first
    read. Values are cast to the dtype of `target`. Does not verify checksums: see
    ``checkpoint.verify``.

    Args:
        folder: folder of the checkpoint.
        manifest: its manifest; a checkpoint that has replaced it since is refused.
        target: shards to fill; their keys may be aliases.
        on_progress: called after each read with the number of bytes read so far.

    Returns:
        Number of bytes read.

    Raises:
        CheckpointError: keys are missing or have other shapes, elements are missing, or a
            file is damaged.
    """
    with _opened(folder, manifest) as opened:
        return _fill(opened, target, on_progress)


def files_to_read(folder: Path, manifest: Manifest, target: ShardMap) -> set[str]:
    """Return the names of the files that a target needs; requires only the file headers.

    Raises:
        CheckpointError: as for ``read_shards``.
    """
    with _opened(folder, manifest) as opened:
        return {copy.file.name for copy in _wanted(opened, target)}


def read_state_dict(folder: Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Return whole tensors on the CPU, by name without the prefix.

    A tensor that is contiguous in one file is a view of a private memory map of that file: it
    uses no memory before it is accessed, and writes to it stay in this process. Other tensors
    (most, if several ranks wrote the checkpoint) are read immediately. Tied tensors are the same
    tensor under all their names. Works without a session and without ranks.

    Do not modify the files while such a tensor is in use; removing them is fine.

    Raises:
        CheckpointError: there is no checkpoint, or a file is damaged.
    """
    with CheckpointReader.open_folder(folder) as opened:
        keys = [name for name in opened.manifest.keys if name.startswith(prefix)]
        state = _whole(opened, keys)
        for name, key in opened.manifest.aliases.items():
            if name.startswith(prefix):
                state[name] = state[key] if key in state else _whole(opened, [key])[key]
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


# Writing


def _by_file(shards: ShardMap, rank: int) -> list[list[_ShardChunk]]:
    """Return the chunks of each file, in file order."""
    files: list[list[_ShardChunk]] = []
    for name, shard in shards.items():
        for number, part in enumerate(_parts(name, shard, rank)):
            if number == len(files):
                files.append([])
            files[number].append(part)
    for parts in files:
        # Largest itemsize first: each chunk is then aligned to its itemsize without gaps.
        parts.sort(key=lambda part: (-part.shard.dtype.itemsize, part.stored.name))
    return files


def _parts(name: str, shard: Shard, rank: int) -> Iterator[_ShardChunk]:
    """Yield the chunks of one tensor that this rank writes."""
    dtype = safetensors_header.SAFETENSORS_NAMES.get(str(shard.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(
            f"{printable(name)} has dtype {shard.dtype}, which safetensors does not support."
            f" Supported: {', '.join(sorted(safetensors_header.TORCH_NAMES))}."
        )
    for start, box in _boxes(shard, rank):
        stored = safetensors_header.StoredTensor(
            name=name, dtype=dtype, shape=box.sizes, offsets=box.offsets
        )
        yield _ShardChunk(stored, start, shard)


def _boxes(shard: Shard, rank: int) -> Iterator[tuple[int, Chunk]]:
    if 0 in shard.shape and rank == 0:
        yield 0, Chunk((0,) * len(shard.shape), shard.shape)
    for start, stop in _joined(shard):
        position = start
        for box in interval_to_chunks(shard.shape, start, stop):
            yield position, box
            position += box.numel


def _joined(shard: Shard) -> list[tuple[int, int]]:
    """Return the intervals of a shard, with consecutive ones merged."""
    joined: list[tuple[int, int]] = []
    for start, stop, _ in sorted(shard.pieces, key=lambda piece: piece.start):
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _write_file(
    stack: ExitStack, new: WriterFactory, path: PurePath, parts: list[_ShardChunk]
) -> SafetensorsWriter:
    writer = stack.enter_context(new(path, [part.stored for part in parts]))
    for part in parts:
        for piece in _content(part):
            writer.write(piece)
    return writer


def _content(part: _ShardChunk) -> Iterator[memoryview]:
    """Yield the bytes of a chunk, without a copy if they are in host memory."""
    start, stop = part.start, part.start + Chunk((), part.stored.shape).numel
    for piece in part.shard.pieces:
        view = piece.view[max(start - piece.start, 0) : max(stop - piece.start, 0)].detach()
        if view.device.type == "cpu":
            yield _octets(view)
        else:
            count = SLICE_BYTES // view.element_size()
            yield from (_octets(block.cpu()) for block in view.split(count) if block.numel())


def _octets(view: torch.Tensor) -> memoryview:
    """Return the bytes of a 1-D tensor without a copy."""
    octets: memoryview = view.view(torch.uint8).numpy().data if view.numel() else memoryview(b"")
    return octets


# Reading


@contextmanager
def _opened(folder: Path, manifest: Manifest) -> Iterator[CheckpointReader]:
    """Open the checkpoint and check that it has this manifest."""
    with CheckpointReader.open_folder(folder) as opened:
        if opened.manifest.id != manifest.id:
            raise CheckpointError(f"{folder} was replaced by a newer save. Load it again.")
        yield opened


def _fill(
    opened: CheckpointReader, target: ShardMap, on_progress: Callable[[int], object] | None
) -> int:
    return _carry_out(opened, _wanted(opened, target), on_progress)


def _wanted(opened: CheckpointReader, target: ShardMap) -> list[_FileRead]:
    """Return all reads that fill the target."""
    keys = _checked(opened.manifest, target)
    index = _index(opened, set(keys.values()))
    return [
        copy
        for name, shard in target.items()
        for copy in _copies(opened.manifest.keys[keys[name]], index[keys[name]], shard, name)
    ]


def _checked(manifest: Manifest, target: ShardMap) -> dict[str, str]:
    """Return the stored key of each target tensor.

    Raises:
        CheckpointError: tensors are missing or have another shape. The message lists them.
    """
    keys = {name: manifest.aliases.get(name, name) for name in target}
    missing = [name for name, key in keys.items() if key not in manifest.keys]
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {len(missing)} of {len(target)} tensors: {_list(missing)}. Load"
            " it into the model that it was saved from."
        )
    wrong = [
        f"{printable(name)} {tuple(shard.shape)} (saved {manifest.keys[keys[name]].shape})"
        for name, shard in target.items()
        if tuple(shard.shape) != manifest.keys[keys[name]].shape
    ]
    if wrong:
        more = ", ..." if len(wrong) > _LISTED else ""
        raise CheckpointError(
            f"{len(wrong)} of {len(target)} tensors have a different shape:"
            f" {', '.join(wrong[:_LISTED])}{more}. Load it into the model that it was saved from."
        )
    return keys


def _index(opened: CheckpointReader, keys: set[str]) -> dict[str, list[_FileInterval]]:
    """Return the file intervals of each key, in order."""
    index: dict[str, list[_FileInterval]] = {key: [] for key in keys}
    for file in opened.manifest.files:
        if file.name.endswith(SUFFIX):
            for name, header in _header(opened, file):
                if name in keys:
                    index[name] += _sources(opened.manifest.keys[name], name, header, file)
    for sources in index.values():
        sources.sort()
    return index


def _header(
    opened: CheckpointReader, file: CheckpointFile
) -> Iterator[tuple[str, safetensors_header.Header]]:
    """Yield each tensor name of a file, with the file's header."""
    fd = opened.open_file(file)
    try:
        header = safetensors_header.read_header(fd, file.name)
    except OSError as error:
        raise _unreadable(file, error) from error
    finally:
        os.close(fd)
    for name in header.tensors:
        yield name, header


def _sources(
    key: TensorMetadata, name: str, header: safetensors_header.Header, file: CheckpointFile
) -> Iterator[_FileInterval]:
    """Yield the intervals that one chunk in a file covers."""
    stored, offset = header.tensors[name], header.starts[name]
    dtype, itemsize = safetensors_header.DTYPES[stored.dtype]
    box = Chunk(stored.offsets or (0,) * len(stored.shape), stored.shape)
    try:
        spans = list(chunk_to_intervals(key.shape, box))
    except ValueError:
        spans = None
    if spans is None or dtype != key.dtype:
        raise CheckpointError(
            f"{printable(name)} in {file.name} does not match the manifest. Load another"
            " checkpoint."
        )
    for start, stop in spans:
        yield _FileInterval(start, stop, file, offset)
        offset += (stop - start) * itemsize


def _copies(
    key: TensorMetadata, sources: list[_FileInterval], shard: Shard, name: str
) -> Iterator[_FileRead]:
    """Yield the reads that fill the pieces of one tensor.

    Raises:
        CheckpointError: elements are in no file.
    """
    dtype: torch.dtype = getattr(torch, key.dtype)
    for start, stop, view in shard.pieces:
        position = start
        place = max(bisect_right(sources, position, key=lambda source: source.start) - 1, 0)
        while position < stop:
            source = sources[place] if place < len(sources) else None
            if source is None or not source.start <= position < source.stop:
                raise CheckpointError(
                    f"Element {position} of {printable(name)} is in no file of the checkpoint. Load"
                    " another checkpoint."
                )
            end = min(stop, source.stop)
            offset = source.offset + (position - source.start) * dtype.itemsize
            yield _FileRead(source.file, offset, dtype, view[position - start : end - start])
            position, place = end, place + 1


def _carry_out(
    opened: CheckpointReader,
    copies: Iterable[_FileRead],
    on_progress: Callable[[int], object] | None = None,
) -> int:
    """Perform the reads, file by file in offset order; return the number of bytes read."""
    by_file: dict[CheckpointFile, list[_FileRead]] = {}
    for copy in copies:
        by_file.setdefault(copy.file, []).append(copy)
    read_bytes = 0
    for file, file_copies in by_file.items():
        fd = opened.open_file(file)
        try:
            for copy in sorted(file_copies, key=lambda copy: copy.offset):
                read_bytes += _carry(fd, copy)
                if on_progress is not None:
                    on_progress(read_bytes)
        except OSError as error:
            raise _unreadable(file, error) from error
        finally:
            os.close(fd)
    return read_bytes


@torch.no_grad()
def _carry(fd: int, copy: _FileRead) -> int:
    # Read instead of mmap: no page faults, and a truncated file raises an error instead of
    # killing the process with SIGBUS.
    into, itemsize = copy.into.detach(), copy.dtype.itemsize
    if into.dtype == copy.dtype and into.device.type == "cpu":
        read_into(fd, _octets(into), copy.offset)
        return into.numel() * itemsize
    count = min(into.numel(), SLICE_BYTES // itemsize)
    room = torch.empty(count, dtype=copy.dtype, pin_memory=into.is_cuda)
    for start in range(0, into.numel(), count):
        part = into[start : start + count]
        read_into(fd, _octets(room[: part.numel()]), copy.offset + start * itemsize)
        part.copy_(room[: part.numel()])
    return into.numel() * itemsize


def _unreadable(file: CheckpointFile, error: OSError) -> CheckpointError:
    return CheckpointError(f"Cannot read {file.name} ({error.strerror}). Load another checkpoint.")


def _list(names: list[str]) -> str:
    more = ", ..." if len(names) > _LISTED else ""
    return ", ".join(map(printable, names[:_LISTED])) + more


# Whole tensors


def _whole(opened: CheckpointReader, names: list[str]) -> dict[str, torch.Tensor]:
    """Return whole tensors by key, as views of memory maps if possible."""
    index, maps = _index(opened, set(names)), _MemoryMaps(opened)
    state: dict[str, torch.Tensor] = {}
    copies: list[_FileRead] = []
    for name in names:
        key = opened.manifest.keys[name]
        tensor = maps.view(key, index[name])
        if tensor is None:
            _check_covered(name, key, index[name])
            tensor = torch.empty(key.shape, dtype=getattr(torch, key.dtype))
            copies += _copies(key, index[name], _shard_of(tensor), name)
        state[name] = tensor
    _carry_out(opened, copies)
    return state


def _check_covered(name: str, key: TensorMetadata, sources: list[_FileInterval]) -> None:
    """Raise if the files lack elements; called before allocating the shape in the manifest."""
    if sum(source.stop - source.start for source in sources) < key.numel:
        raise CheckpointError(
            f"The files lack elements of {printable(name)}. Load another checkpoint."
        )


def _shard_of(tensor: torch.Tensor) -> Shard:
    whole = Piece(0, tensor.numel(), tensor.view(-1))
    return Shard(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=(whole,))


@dataclass(slots=True)
class _MemoryMaps:
    """Private memory maps of a checkpoint's files, each created once."""

    opened: CheckpointReader
    made: dict[str, mmap.mmap] = field(default_factory=dict)

    def view(self, key: TensorMetadata, sources: list[_FileInterval]) -> torch.Tensor | None:
        """Return a tensor on a memory map; None if it is not contiguous in one file."""
        dtype: torch.dtype = getattr(torch, key.dtype)
        if len(sources) != 1 or not key.numel:
            return None
        (source,) = sources
        if (source.start, source.stop) != (0, key.numel) or source.offset % dtype.itemsize:
            return None
        flat = torch.frombuffer(
            self._map(source.file), dtype=dtype, count=key.numel, offset=source.offset
        )
        return flat.view(key.shape)

    def _map(self, file: CheckpointFile) -> mmap.mmap:
        if file.name not in self.made:
            # Python 3.13: with trackfd=False the map does not keep a file descriptor.
            options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            fd = self.opened.open_file(file)
            try:
                self.made[file.name] = mmap.mmap(
                    fd, file.size_bytes, access=mmap.ACCESS_COPY, **options
                )
            finally:
                os.close(fd)
        return self.made[file.name]
