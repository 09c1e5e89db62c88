"""Index of the tensors in files: intervals of flattened tensors, each with a reader.

`shard_io` builds one for the checkpoints of nbdist, `importers` for those of other tools.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nbdist.checkpoint.name_validation import printable
from nbdist.errors import CheckpointError
from nbdist.state.shards import ShapeAndDtype

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.state.shards import ShardMap

BLOCK_ELEMENTS = 16 << 20
"""Elements that are read at a time."""
FetchElements = Callable[[int, int], torch.Tensor]
"""Return elements [start, stop) of the flattened tensor as a 1-D tensor."""


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
    aliases: dict[str, str] = field(default_factory=dict)
    """Additional name of a tied parameter -> its first name."""
    notes: list[str] = field(default_factory=list)
    """Notes on content that is not loaded."""


def part_of(
    load: Callable[[], torch.Tensor], start: int, stop: int, *, offset: int = 0, file: str = ""
) -> TensorPart:
    """Return a part whose elements are contiguous in a tensor that is loaded when it is read.

    Args:
        load: loads the tensor, of any shape; called for each read.
        start: first element in the flattened tensor of the checkpoint.
        stop: element after the last.
        offset: index of `start` in the flattened loaded tensor.
        file: name of the file that contains it.
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
