"""Index of the tensors in files: intervals of flattened tensors, each with a reader.

`shard_io` builds one for the checkpoints of nbdist, `importers` for those of other tools.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES
from nbdist.checkpoint.name_validation import list_first, printable
from nbdist.errors import CheckpointError
from nbdist.state.shards import ShapeAndDtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nbdist.state.shards import ShardMap

BLOCK_ELEMENTS = 16 << 20
"""Elements that are read at a time."""
FetchElements = Callable[[int, int], torch.Tensor]
"""Return elements [start, stop) of the flattened tensor as a 1-D tensor."""
_INDEX_NAME = "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_INDEX_BYTES = 1 << 28
_DTYPES = {stored: getattr(torch, name) for name, (stored, _) in SAFETENSORS_DTYPES.items()}
RenamedTensors = Mapping[str, tuple[str, int, tuple[int, ...]]]
"""Tensor name in files -> key, index of its first element there and shape of the whole tensor."""


class TensorPart(NamedTuple):
    """An interval [start, stop) of a flattened tensor that is stored contiguously."""

    start: int
    stop: int
    fetch: FetchElements
    file: str = ""
    """Name of the file that contains it."""


@dataclass(slots=True, kw_only=True)
class TensorIndex:
    """The tensors of a checkpoint by key: `model.<fqn>`, `optim.state.<fqn>.<name>`."""

    keys: dict[str, ShapeAndDtype] = field(default_factory=dict)
    parts: dict[str, list[TensorPart]] = field(default_factory=dict)

    def add_tensor(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, *parts: TensorPart
    ) -> None:
        """Add a tensor, or more parts of it.

        Raises:
            CheckpointError: the key exists with another shape or dtype.
        """
        entry = ShapeAndDtype(tuple(shape), dtype)
        if self.keys.setdefault(key, entry) != entry:
            raise CheckpointError(
                f"The checkpoint has {printable(key)} twice, with different shapes or dtypes."
            )
        self.parts.setdefault(key, []).extend(parts)

    def add_whole_tensor(self, key: str, tensor: torch.Tensor) -> None:
        """Add a tensor that is in memory as a whole."""
        part = part_of(tensor.detach, 0, tensor.numel())
        self.add_tensor(key, tuple(tensor.shape), tensor.dtype, part)

    @torch.no_grad()
    def read_into(
        self, target: ShardMap, on_progress: Callable[[int], object] | None = None
    ) -> int:
        """Read into the pieces of `target` in place, cast to their dtype.

        Args:
            target: shards to fill; their keys must be in the index.
            on_progress: called after each read with the number of bytes read so far.

        Returns:
            Number of bytes read.

        Raises:
            CheckpointError: elements are missing, or a file is damaged.
        """
        done = 0
        for key, shard in target.items():
            for piece in shard.pieces:
                for start, stop, part in self.covering(key, piece.start, piece.stop):
                    # In blocks: a copy to a GPU or to another dtype allocates as much memory.
                    for low in range(start, stop, BLOCK_ELEMENTS):
                        high = min(low + BLOCK_ELEMENTS, stop)
                        values = part.fetch(low, high)
                        if values.numel() != high - low:
                            raise CheckpointError(
                                f"{printable(key)} has fewer elements than its shape. Load another"
                                " checkpoint."
                            )
                        piece.view[low - piece.start : high - piece.start].copy_(values)
                        done += values.nbytes
                        if on_progress is not None:
                            on_progress(done)
        return done

    def covering(self, key: str, start: int, stop: int) -> Iterator[tuple[int, int, TensorPart]]:
        """Yield the parts that cover an interval of a tensor: start, stop and part.

        Raises:
            CheckpointError: an element is in no part.
        """
        parts = self.parts.get(key, [])
        parts.sort(key=lambda part: part.start)
        position = start
        place = max(bisect_right(parts, position, key=lambda part: part.start) - 1, 0)
        while position < stop:
            part = parts[place] if place < len(parts) else None
            if part is None or not part.start <= position < part.stop:
                raise CheckpointError(
                    f"Element {position} of {printable(key)} is in no file of the checkpoint. Load"
                    " another checkpoint."
                )
            end = min(stop, part.stop)
            yield position, end, part
            position, place = end, place + 1

    def check_complete(self) -> None:
        """Raise if elements of a tensor are missing.

        Raises:
            CheckpointError: elements are missing. The message has the key.
        """
        for key, entry in self.keys.items():
            for _ in self.covering(key, 0, math.prod(entry.shape)):
                pass


@dataclass(slots=True, kw_only=True)
class ForeignCheckpoint(TensorIndex):
    """A checkpoint from another tool, indexed by nbdist's keys."""

    kind: str
    """Format: "safetensors", "FSDP (torch.distributed.checkpoint)"."""
    scalar_state: dict[str, dict[str, float]] = field(default_factory=dict)
    """Parameter -> scalar state of the optimizer."""
    notes: list[str] = field(default_factory=list)
    """Notes on content that is not loaded."""


def check_shapes(
    required: Mapping[str, tuple[int, ...]],
    saved: Mapping[str, tuple[int, ...]],
    unexpected: Iterable[str] = (),
) -> None:
    """Refuse a checkpoint of another model before any tensor is read.

    Args:
        required: name of a tensor -> its shape in the model.
        saved: name -> shape in the checkpoint.
        unexpected: names of the tensors that the model does not have.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape. The message has
            the number and the first ten of each.
    """
    problems = {
        "are missing": [printable(name)[1:-1] for name in required if name not in saved],
        "are unexpected": [printable(name)[1:-1] for name in unexpected],
        "have a different shape": [
            f"{printable(name)[1:-1]} {tuple(shape)} (saved {tuple(saved[name])})"
            for name, shape in required.items()
            if name in saved and tuple(shape) != tuple(saved[name])
        ],
    }
    if any(problems.values()):
        found = [f"{len(n)} {noun}: {list_first(n)}" for noun, n in problems.items() if n]
        raise CheckpointError(
            f"The checkpoint does not match the prepared model: of {len(required)} tensors"
            f" {'; '.join(found)}. Prepare the model that was saved."
        )


def part_of(
    load: Callable[[], torch.Tensor], start: int, stop: int, *, offset: int = 0, file: str = ""
) -> TensorPart:
    """Return a part whose elements are contiguous in a tensor that is loaded when it is read.

    Args:
        load: loads the tensor, of any shape; called for each read.
        start: first element in the flattened tensor of the checkpoint.
        offset: index of `start` in the flattened loaded tensor.
    """

    def fetch(low: int, high: int) -> torch.Tensor:
        return load().reshape(-1)[offset + low - start : offset + high - start]

    return TensorPart(start, stop, fetch, file)


def tensor_as_bytes(view: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous 1-D CPU tensor without a copy."""
    content: memoryview = view.view(torch.uint8).numpy().data if view.numel() else memoryview(b"")
    return content


def open_safetensors(path: Path | str, shown: str) -> safe_open:
    """Open a safetensors file; its tensors are read when they are accessed.

    The library checks the header: sizes, dtypes, gaps and overlaps. The file may then be closed
    or removed. It must not be truncated while tensors are in use, since they are memory-mapped.

    Args:
        path: path of a regular file.
        shown: name of the file for error messages.

    Raises:
        CheckpointError: not a safetensors file, or the header is invalid.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"Invalid safetensors file {printable(shown)}: {printable(str(error))}. Load another"
            " checkpoint."
        ) from error


def find_safetensors(path: Path) -> list[Path]:
    """Return the safetensors files of a folder, or the file itself.

    Raises:
        CheckpointError: the index is invalid or refers to files outside of its folder.
    """
    if path.is_file():
        return [path]
    index = path / _INDEX_NAME
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


def add_safetensors(
    found: TensorIndex, paths: list[Path], names: RenamedTensors, *, prefix: str = "model."
) -> None:
    """Add the tensors of files to an index.

    Args:
        names: tensor names in the files of the model's class.
        prefix: prefix of the keys of all other tensors.

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
            key, first, shape = names.get(name, (prefix + name, 0, stored_shape))
            size = math.prod(stored_shape)
            load = partial(file.get_tensor, name)
            found.add_tensor(key, shape, dtype, part_of(load, first, first + size))
