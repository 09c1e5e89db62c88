"""Index of a checkpoint from another tool: intervals of named tensors, each with a reader."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbdist.checkpoint.names import printable
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from nbdist.state.shards import ShardMap

FetchElements = Callable[[int, int], torch.Tensor]
"""Return elements [start, stop) of the flattened tensor as a 1-D tensor."""


class TensorPart(NamedTuple):
    """An interval [start, stop) of a flattened tensor that is stored contiguously."""

    start: int
    stop: int
    fetch: FetchElements


class TensorEntry(NamedTuple):
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class ForeignCheckpoint:
    """A checkpoint from another tool, indexed by nbdist's keys."""

    kind: str
    """Format: "safetensors", "FSDP (torch.distributed.checkpoint)"."""
    keys: dict[str, TensorEntry] = field(default_factory=dict)
    """`model.<fqn>`, `optim.state.<fqn>.<name>`."""
    scalar_state: dict[str, dict[str, float]] = field(default_factory=dict)
    """Parameter -> scalar state of the optimizer."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Additional name of a tied parameter -> its first name."""
    notes: list[str] = field(default_factory=list)
    """Notes on content that is not loaded."""
    parts: dict[str, list[TensorPart]] = field(default_factory=dict)

    def add_tensor(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, *parts: TensorPart
    ) -> None:
        """Add a tensor, or more parts of it.

        Raises:
            CheckpointError: the key exists with another shape or dtype.
        """
        entry = TensorEntry(tuple(shape), dtype)
        if self.keys.setdefault(key, entry) != entry:
            message = f"The checkpoint has {printable(key)} twice, with different shapes or dtypes."
            raise CheckpointError(message)
        self.parts.setdefault(key, []).extend(parts)

    def add_whole_tensor(self, key: str, tensor: torch.Tensor) -> None:
        """Add a tensor that is in memory as a whole."""
        flat = tensor.detach().reshape(-1)
        part = TensorPart(0, flat.numel(), lambda start, stop: flat[start:stop])
        self.add_tensor(key, tuple(tensor.shape), tensor.dtype, part)

    def read_into(self, target: ShardMap) -> int:
        """Read into the pieces of `target` in place; return the number of bytes read.

        Raises:
            CheckpointError: elements are missing, or a file is damaged.
        """
        done = 0
        for key, shard in target.items():
            parts = sorted(self.parts[key], key=lambda part: part.start)
            for piece in shard.pieces:
                for low, high, part in _cut(parts, piece.start, piece.stop, key):
                    values = _fetched(part, low, high, key)
                    room = piece.view[low - piece.start : high - piece.start]
                    with torch.no_grad():
                        room.copy_(values)
                    done += values.numel() * values.element_size()
        return done

    def check_complete(self) -> None:
        """Raise if elements of a tensor are missing.

        Raises:
            CheckpointError: elements are missing. The message has the key.
        """
        for key, entry in self.keys.items():
            parts = sorted(self.parts[key], key=lambda part: part.start)
            for _ in _cut(parts, 0, math.prod(entry.shape), key):
                pass


def _cut(
    parts: list[TensorPart], start: int, stop: int, key: str
) -> list[tuple[int, int, TensorPart]]:
    """Return the parts that cover an interval: start, stop and part."""
    cuts = []
    position = start
    place = max(bisect_right(parts, position, key=lambda part: part.start) - 1, 0)
    while position < stop:
        part = parts[place] if place < len(parts) else None
        if part is None or not part.start <= position < part.stop:
            message = (
                f"Element {position} of {printable(key)} is in no file. Load another checkpoint."
            )
            raise CheckpointError(message)
        end = min(stop, part.stop)
        cuts.append((position, end, part))
        position, place = end, place + 1
    return cuts


def _fetched(part: TensorPart, low: int, high: int, key: str) -> torch.Tensor:
    values = part.fetch(low, high)
    if values.numel() != high - low:
        message = f"{printable(key)} has fewer elements than its shape. Load another checkpoint."
        raise CheckpointError(message)
    return values


RenamedTensors = Mapping[str, tuple[str, int, tuple[int, ...]]]
"""Tensor name in files -> key, index of its first element there and shape of the whole tensor."""
