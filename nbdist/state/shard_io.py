"""Shards of this rank to and from the files of a checkpoint.

Runs where torch is: on the ranks, and in the kernel for `state_dict`. A rank writes what it
owns, in any cut, and reads what it wants, in any other; no process ever holds more than its
own part. Files are `<kind>-<rank>-<box>.safetensors`: box number b of a tensor lies in file
b, because torch's HuggingFaceStorageReader knows one box of a tensor in each file.
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
from nbdist.checkpoint.chunks import Box, boxes, intervals
from nbdist.checkpoint.durable_io import read_at
from nbdist.checkpoint.names import shown
from nbdist.checkpoint.reader import Opened
from nbdist.checkpoint.safetensors_header import Stored
from nbdist.checkpoint.writer import Writer
from nbdist.errors import CheckpointError
from nbdist.state.shards import Piece, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nbdist.checkpoint.manifest import FilePart, Key, Manifest
    from nbdist.state.shards import ShardMap

New = Callable[[PurePath, Sequence[Stored]], Writer]
SUFFIX = ".safetensors"
SLICE_BYTES = 64 << 20
"""Through host memory at a time: to and from a GPU, or into another dtype."""
_LISTED = 10


class _Part(NamedTuple):
    """A box of a shard, on its way into a file."""

    stored: Stored
    start: int
    """First element in the flattened tensor."""
    shard: Shard


class _Source(NamedTuple):
    """An interval of a flattened tensor, in a file."""

    start: int
    stop: int
    file: FilePart
    offset: int
    """Of its first byte in the file."""


class _Copy(NamedTuple):
    """Bytes of a file that belong into a tensor."""

    file: FilePart
    offset: int
    dtype: torch.dtype
    """In the file."""
    into: torch.Tensor
    """Of one dimension, contiguous."""


def write(
    shards: ShardMap, folder: PurePath, rank: int, kind: str, new: New = Writer
) -> list[FilePart]:
    """Write what this rank owns; blocks until it is on the disk.

    A tensor without elements is written by rank 0.

    Args:
        shards: of all ranks together, each element stands in one.
        folder: of a checkpoint that is being written (`checkpoint.begin`).
        rank: of this process, for names and messages.
        kind: what the files are called: "model", "optim".
        new: begins a file, there or wherever a save goes.

    Returns:
        The files, for `checkpoint.report`; none where the rank owns nothing.

    Raises:
        CheckpointError: the disk is full or refuses (says the rank), or a dtype that
            safetensors does not have. A file that was begun is removed.
    """
    try:
        # All are open until the last is written: then the disk has most, and syncs follow
        # each other in one journal commit.
        with ExitStack() as stack:
            writers = [
                _write_file(stack, new, folder / f"{kind}-{rank:05d}-{number}{SUFFIX}", parts)
                for number, parts in enumerate(_by_file(shards, rank))
            ]
    except OSError as error:
        raise CheckpointError(
            f"rank {rank} cannot write its part of {folder} ({error.strerror}, errno"
            f" {error.errno}); free room, or save elsewhere."
        ) from error
    return [writer.part for writer in writers]


def read(
    folder: Path,
    manifest: Manifest,
    target: ShardMap,
    told: Callable[[int], object] | None = None,
) -> int:
    """Fill the pieces of `target`, in place, each with its part of the checkpoint.

    Reads only bytes that are wanted. All keys, shapes and files are looked at before the
    first element is copied. Bytes are not compared with their checksums: `checkpoint.verify`
    does that. A number that `target` wants in another dtype is converted.

    Args:
        folder: of the checkpoint.
        manifest: that was read there; a checkpoint that took its place since is refused.
        target: what this rank wants; its keys may be aliases.
        told: hears after each piece how many bytes have been read.

    Returns:
        Bytes that were read.

    Raises:
        CheckpointError: keys are missing or have other shapes, elements are missing, or a
            file is damaged.
    """
    with _opened(folder, manifest) as opened:
        return _fill(opened, target, told)


def wanted(folder: Path, manifest: Manifest, target: ShardMap) -> set[str]:
    """Names of the files that `read` reads for this target; their heads must be there.

    Raises:
        CheckpointError: as `read`.
    """
    with _opened(folder, manifest) as opened:
        return {copy.file.name for copy in _wanted(opened, target)}


def state_dict(folder: Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Give whole tensors on the CPU, by their names without the prefix.

    A tensor that lies in one piece in a file is a view of a private map of that file: it
    costs no memory before it is read, and what is written into it stays in this process. The
    others (of a checkpoint of several ranks, most) are read at once. Tied tensors are one
    tensor under all their names. Works without a session and without ranks.

    Do not change the files while such a tensor lives; removing them is fine.

    Raises:
        CheckpointError: no checkpoint is there, or a file is damaged.
    """
    with Opened.at(folder) as opened:
        keys = [name for name in opened.manifest.keys if name.startswith(prefix)]
        state = _whole(opened, keys)
        for name, key in opened.manifest.aliases.items():
            if name.startswith(prefix):
                state[name] = state[key] if key in state else _whole(opened, [key])[key]
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


# Writing


def _by_file(shards: ShardMap, rank: int) -> list[list[_Part]]:
    """Boxes of each file, in the order in which they lie there."""
    files: list[list[_Part]] = []
    for name, shard in shards.items():
        for number, part in enumerate(_parts(name, shard, rank)):
            if number == len(files):
                files.append([])
            files[number].append(part)
    for parts in files:
        # Without gaps, large elements first: that is how each gets an address it can have.
        parts.sort(key=lambda part: (-part.shard.dtype.itemsize, part.stored.name))
    return files


def _parts(name: str, shard: Shard, rank: int) -> Iterator[_Part]:
    """The boxes of one tensor that this rank writes."""
    dtype = safetensors_header.IN_FILES.get(str(shard.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(
            f"{shown(name)} is of {shard.dtype}, which safetensors does not have; allowed are"
            f" {', '.join(sorted(safetensors_header.TORCH_NAMES))}."
        )
    for start, box in _boxes(shard, rank):
        stored = safetensors_header.Stored(
            name=name, dtype=dtype, shape=box.sizes, offsets=box.offsets
        )
        yield _Part(stored, start, shard)


def _boxes(shard: Shard, rank: int) -> Iterator[tuple[int, Box]]:
    if 0 in shard.shape and rank == 0:
        yield 0, Box((0,) * len(shard.shape), shard.shape)
    for start, stop in _joined(shard):
        at = start
        for box in boxes(shard.shape, start, stop):
            yield at, box
            at += box.numel


def _joined(shard: Shard) -> list[tuple[int, int]]:
    """Intervals of a shard, those that follow each other as one."""
    found: list[tuple[int, int]] = []
    for start, stop, _ in sorted(shard.pieces, key=lambda piece: piece.start):
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _write_file(stack: ExitStack, new: New, path: PurePath, parts: list[_Part]) -> Writer:
    writer = stack.enter_context(new(path, [part.stored for part in parts]))
    for part in parts:
        for piece in _content(part):
            writer.write(piece)
    return writer


def _content(part: _Part) -> Iterator[memoryview]:
    """The bytes of a box; without a copy where they are in host memory."""
    start, stop = part.start, part.start + Box((), part.stored.shape).numel
    for piece in part.shard.pieces:
        view = piece.view[max(start - piece.start, 0) : max(stop - piece.start, 0)].detach()
        if view.device.type == "cpu":
            yield _octets(view)
        else:
            count = SLICE_BYTES // view.element_size()
            yield from (_octets(one.cpu()) for one in view.split(count) if one.numel())


def _octets(view: torch.Tensor) -> memoryview:
    """The bytes of a tensor of one dimension, as they are."""
    octets: memoryview = view.view(torch.uint8).numpy().data if view.numel() else memoryview(b"")
    return octets


# Reading


@contextmanager
def _opened(folder: Path, manifest: Manifest) -> Iterator[Opened]:
    """Open the checkpoint that the manifest is of."""
    with Opened.at(folder) as opened:
        if opened.manifest.id != manifest.id:
            raise CheckpointError(f"{folder} was replaced by a newer save; load it again.")
        yield opened


def _fill(opened: Opened, target: ShardMap, told: Callable[[int], object] | None) -> int:
    return _carry_out(opened, _wanted(opened, target), told)


def _wanted(opened: Opened, target: ShardMap) -> list[_Copy]:
    """All that has to be copied."""
    keys = _checked(opened.manifest, target)
    index = _index(opened, set(keys.values()))
    return [
        copy
        for name, shard in target.items()
        for copy in _copies(opened.manifest.keys[keys[name]], index[keys[name]], shard, name)
    ]


def _checked(manifest: Manifest, target: ShardMap) -> dict[str, str]:
    """The key under which each wanted tensor is stored.

    Raises:
        CheckpointError: some are not there, or have another shape; says which.
    """
    keys = {name: manifest.aliases.get(name, name) for name in target}
    missing = [name for name, key in keys.items() if key not in manifest.keys]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(target)} tensors: {_list(missing)}; load"
            " it into the model that it is of."
        )
    wrong = [
        f"{shown(name)} {tuple(shard.shape)} (saved {manifest.keys[keys[name]].shape})"
        for name, shard in target.items()
        if tuple(shard.shape) != manifest.keys[keys[name]].shape
    ]
    if wrong:
        more = ", ..." if len(wrong) > _LISTED else ""
        raise CheckpointError(
            f"{len(wrong)} of {len(target)} tensors have another shape:"
            f" {', '.join(wrong[:_LISTED])}{more}; load it into the model that it is of."
        )
    return keys


def _index(opened: Opened, keys: set[str]) -> dict[str, list[_Source]]:
    """Where the elements of each key lie, in order."""
    found: dict[str, list[_Source]] = {key: [] for key in keys}
    for file in opened.manifest.files:
        if file.name.endswith(SUFFIX):
            for name, header in _header(opened, file):
                if name in keys:
                    found[name] += _sources(opened.manifest.keys[name], name, header, file)
    for sources in found.values():
        sources.sort()
    return found


def _header(opened: Opened, file: FilePart) -> Iterator[tuple[str, safetensors_header.Header]]:
    """Each tensor of a file, with the file's header."""
    fd = opened.open(file)
    try:
        header = safetensors_header.parse(fd, file.name)
    except OSError as error:
        raise _unreadable(file, error) from error
    finally:
        os.close(fd)
    for name in header.tensors:
        yield name, header


def _sources(
    key: Key, name: str, header: safetensors_header.Header, file: FilePart
) -> Iterator[_Source]:
    """The intervals that one box in a file has."""
    stored, offset = header.tensors[name], header.starts[name]
    dtype, itemsize = safetensors_header.DTYPES[stored.dtype]
    box = Box(stored.offsets or (0,) * len(stored.shape), stored.shape)
    try:
        found = list(intervals(key.shape, box))
    except ValueError:
        found = None
    if found is None or dtype != key.dtype:
        raise CheckpointError(
            f"{shown(name)} in {file.name} is not what the manifest says; take another checkpoint."
        )
    for start, stop in found:
        yield _Source(start, stop, file, offset)
        offset += (stop - start) * itemsize


def _copies(key: Key, sources: list[_Source], shard: Shard, name: str) -> Iterator[_Copy]:
    """What has to be copied to fill one tensor's pieces.

    Raises:
        CheckpointError: no file has some of the elements.
    """
    dtype: torch.dtype = getattr(torch, key.dtype)
    for start, stop, view in shard.pieces:
        at = start
        place = max(bisect_right(sources, at, key=lambda source: source.start) - 1, 0)
        while at < stop:
            source = sources[place] if place < len(sources) else None
            if source is None or not source.start <= at < source.stop:
                raise CheckpointError(
                    f"no file of the checkpoint has element {at} of {shown(name)}; take another"
                    " checkpoint."
                )
            end = min(stop, source.stop)
            offset = source.offset + (at - source.start) * dtype.itemsize
            yield _Copy(source.file, offset, dtype, view[at - start : end - start])
            at, place = end, place + 1


def _carry_out(
    opened: Opened, copies: Iterable[_Copy], told: Callable[[int], object] | None = None
) -> int:
    """Copy, file by file and from front to back; give the bytes that were read."""
    by_file: dict[FilePart, list[_Copy]] = {}
    for copy in copies:
        by_file.setdefault(copy.file, []).append(copy)
    read_bytes = 0
    for file, wanted in by_file.items():
        fd = opened.open(file)
        try:
            for copy in sorted(wanted, key=lambda one: one.offset):
                read_bytes += _carry(fd, copy)
                if told is not None:
                    told(read_bytes)
        except OSError as error:
            raise _unreadable(file, error) from error
        finally:
            os.close(fd)
    return read_bytes


@torch.no_grad()
def _carry(fd: int, copy: _Copy) -> int:
    # Read and not mapped: no page faults, and a file that is cut short is an error here,
    # where a map would end the process with SIGBUS.
    into, itemsize = copy.into.detach(), copy.dtype.itemsize
    if into.dtype == copy.dtype and into.device.type == "cpu":
        read_at(fd, _octets(into), copy.offset)
        return into.numel() * itemsize
    count = min(into.numel(), SLICE_BYTES // itemsize)
    room = torch.empty(count, dtype=copy.dtype, pin_memory=into.is_cuda)
    for start in range(0, into.numel(), count):
        part = into[start : start + count]
        read_at(fd, _octets(room[: part.numel()]), copy.offset + start * itemsize)
        part.copy_(room[: part.numel()])
    return into.numel() * itemsize


def _unreadable(file: FilePart, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{file.name} cannot be read ({error.strerror}); take another checkpoint."
    )


def _list(names: list[str]) -> str:
    more = ", ..." if len(names) > _LISTED else ""
    return ", ".join(map(shown, names[:_LISTED])) + more


# Whole tensors


def _whole(opened: Opened, names: list[str]) -> dict[str, torch.Tensor]:
    """Whole tensors by key: views of maps where they can be."""
    index, maps = _index(opened, set(names)), _Maps(opened)
    state: dict[str, torch.Tensor] = {}
    copies: list[_Copy] = []
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


def _check_covered(name: str, key: Key, sources: list[_Source]) -> None:
    """Before memory is taken: a manifest may say any shape, files have the bytes."""
    if sum(source.stop - source.start for source in sources) < key.numel:
        raise CheckpointError(
            f"the files do not have all elements of {shown(name)}; take another checkpoint."
        )


def _shard_of(tensor: torch.Tensor) -> Shard:
    whole = Piece(0, tensor.numel(), tensor.view(-1))
    return Shard(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=(whole,))


@dataclass(slots=True)
class _Maps:
    """Private maps of a checkpoint's files, each made once."""

    opened: Opened
    made: dict[str, mmap.mmap] = field(default_factory=dict)

    def view(self, key: Key, sources: list[_Source]) -> torch.Tensor | None:
        """A tensor over a map; None where it does not lie in one piece."""
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

    def _map(self, file: FilePart) -> mmap.mmap:
        if file.name not in self.made:
            # Python 3.13: without trackfd the map holds no file descriptor.
            options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            fd = self.opened.open(file)
            try:
                self.made[file.name] = mmap.mmap(
                    fd, file.size_bytes, access=mmap.ACCESS_COPY, **options
                )
            finally:
                os.close(fd)
        return self.made[file.name]
