"""What all foreign checkpoints come down to: intervals of named tensors, each with a way to it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbdist.checkpoint.names import shown
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from nbdist.state.shards import ShardMap

Fetch = Callable[[int, int], torch.Tensor]
"""Give elements [start, stop) of the flattened tensor, of one dimension."""


class Part(NamedTuple):
    """An interval that lies in one place."""

    start: int
    stop: int
    fetch: Fetch


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class Foreign:
    """A checkpoint that something else wrote, under our names."""

    kind: str
    """What wrote it: "safetensors", "FSDP (torch.distributed.checkpoint)"."""
    keys: dict[str, Entry] = field(default_factory=dict)
    """`model.<fqn>`, `optim.state.<fqn>.<name>`."""
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Parameter -> scalar state of the optimizer."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Another name of a tied parameter -> the first."""
    notes: list[str] = field(default_factory=list)
    """What is in the folder and was not taken."""
    parts: dict[str, list[Part]] = field(default_factory=dict)

    def add(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, *parts: Part) -> None:
        """Note a tensor, or more parts of it.

        Raises:
            CheckpointError: it is there already, otherwise.
        """
        entry = Entry(tuple(shape), dtype)
        if self.keys.setdefault(key, entry) != entry:
            message = f"{shown(key)} stands in it twice, with different shapes or types."
            raise CheckpointError(message)
        self.parts.setdefault(key, []).extend(parts)

    def add_whole(self, key: str, tensor: torch.Tensor) -> None:
        """Note a tensor that is there as a whole."""
        flat = tensor.detach().reshape(-1)
        part = Part(0, flat.numel(), lambda start, stop: flat[start:stop])
        self.add(key, tuple(tensor.shape), tensor.dtype, part)

    def read(self, target: ShardMap) -> int:
        """Fill the pieces of `target`, in place; returns the bytes that were read.

        Raises:
            CheckpointError: some elements are nowhere, or a file is damaged.
        """
        done = 0
        for key, shard in target.items():
            parts = sorted(self.parts[key], key=lambda part: part.start)
            for piece in shard.pieces:
                for low, high, part in _cut(parts, piece.start, piece.stop, key):
                    found = _fetched(part, low, high, key)
                    room = piece.view[low - piece.start : high - piece.start]
                    with torch.no_grad():
                        room.copy_(found)
                    done += found.numel() * found.element_size()
        return done

    def check(self) -> None:
        """Refuse a checkpoint that lacks elements of a tensor.

        Raises:
            CheckpointError: says of which.
        """
        for key, entry in self.keys.items():
            parts = sorted(self.parts[key], key=lambda part: part.start)
            for _ in _cut(parts, 0, math.prod(entry.shape), key):
                pass


def _cut(parts: list[Part], start: int, stop: int, key: str) -> list[tuple[int, int, Part]]:
    """The parts that an interval is made of."""
    found = []
    at = start
    place = max(bisect_right(parts, at, key=lambda part: part.start) - 1, 0)
    while at < stop:
        part = parts[place] if place < len(parts) else None
        if part is None or not part.start <= at < part.stop:
            message = f"element {at} of {shown(key)} is in no file; take another checkpoint."
            raise CheckpointError(message)
        end = min(stop, part.stop)
        found.append((at, end, part))
        at, place = end, place + 1
    return found


def _fetched(part: Part, low: int, high: int, key: str) -> torch.Tensor:
    found = part.fetch(low, high)
    if found.numel() != high - low:
        message = f"{shown(key)} is shorter than it says; take another checkpoint."
        raise CheckpointError(message)
    return found


Names = Mapping[str, tuple[str, int, tuple[int, ...]]]
"""Tensor in files -> key, first element there and shape of the whole: what a class renames."""
