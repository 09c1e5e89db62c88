"""How an engine tells a training step: once for a model and a setup, for any micro-batch.

What an engine holds does not depend on the size of a micro-batch; activations and logits do.
So a story is made once and works out once what is `Held` at the steps of a walk; a micro-batch
of another size takes two additions a step. Parts are added up by name for those who read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, cached_property
from operator import attrgetter, gt
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from nbdist.planner.model_spec import ends, walk

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from nbdist.planner.model_spec import MicroBatch, ModelSpec, Step, Visits

T = TypeVar("T")

Parts = Mapping[str, int]
"""Bytes, by what they are for (`memory.PARTS`)."""
_NOTHING: Parts = MappingProxyType({})


class Held:
    """What one rank holds at a moment beside a micro-batch's activations and logits."""

    __slots__ = ("host", "host_bytes", "nvme", "parts", "total")

    def __init__(self, *parts: Parts, host: tuple[Parts, ...] = (), nvme: int = 0) -> None:
        """Count bytes.

        Args:
            parts: bytes on the rank's device; a part may be in several.
            host: bytes in the host's memory for this rank, in the same manner.
            nvme: bytes on NVMe for this rank.
        """
        self.parts, self.host, self.nvme = parts, host, nvme
        self.total = sum([sum(one.values()) for one in parts])
        self.host_bytes = sum([sum(one.values()) for one in host])


class Moment(NamedTuple):
    """What one rank holds at one moment."""

    name: str
    """For a reader: "forward of block 3", "loss", "backward of block 0", "optimizer step"."""
    parts: Parts
    """Bytes on the rank's device, by part."""
    host: Parts = _NOTHING
    """Bytes in the host's memory, for this rank."""
    nvme: int = 0
    """Bytes on NVMe, for this rank."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())


class Story(ABC):
    """One engine's training step of one model."""

    def __init__(self, model: ModelSpec) -> None:
        """Begin with nothing worked out."""
        self.model = model
        self._told = cache(lambda steps: list(self.during(steps)))

    @cached_property
    def visited(self) -> Visits:
        """Where a walk goes: to all blocks that may be the fullest."""
        return ends(self.model.groups)

    @abstractmethod
    def during(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, Held]]:
        """What is held at the steps of a walk, each with the step's index.

        A step may come several times, or not at all where the engine does nothing of its own.
        """

    @abstractmethod
    def between(self, run: MicroBatch) -> Iterator[tuple[str, Held, int]]:
        """What is no step of a walk: a name, what is held, and bytes of activations."""

    def moments(self, run: MicroBatch) -> Iterator[Moment]:
        """All moments of an optimizer step whose micro-batches are like this one."""
        steps, activations, logits = walk(self.model, run, self.visited)
        for at, held in self._told(steps):
            yield _moment(steps[at].name, held, activations[at], logits[at], held.host)
        for name, held, alive in self.between(run):
            yield _moment(name, held, alive, run.outputs, held.host)

    def peak(self, run: MicroBatch) -> Moment:
        """The fullest moment; of host memory the most of any moment."""
        steps, activations, logits = walk(self.model, run, self.visited)
        told, between = self._told(steps), list(self.between(run))
        totals = [held.total + activations[at] + logits[at] for at, held in told]
        totals += [held.total + alive + run.outputs for _, held, alive in between]
        every = [held for _, held in told] + [held for _, held, _ in between]
        host = max(every, key=_host_bytes).host
        first = totals.index(max(totals))
        if first < len(told):
            at, held = told[first]
            return _moment(steps[at].name, held, activations[at], logits[at], host)
        name, held, alive = between[first - len(told)]
        return _moment(name, held, alive, run.outputs, host)


def records(many: Iterable[tuple[Hashable, tuple[int, ...], T]]) -> list[T]:
    """Those that have more of something than all before them that are alike.

    Args:
        many: what makes them alike, how much of each thing they have, and they themselves.
    """
    most: dict[Hashable, tuple[int, ...]] = {}
    found: list[T] = []
    for alike, sizes, one in many:
        before = most.get(alike)
        if before is None or any(map(gt, sizes, before)):
            most[alike] = sizes if before is None else tuple(map(max, sizes, before))
            found.append(one)
    return found


_host_bytes = attrgetter("host_bytes")


def _moment(
    name: str, held: Held, activations: int, logits: int, host: tuple[Parts, ...]
) -> Moment:
    """Add parts up by name."""
    alive = {"activations": activations, "logits": logits}
    return Moment(name, total((*held.parts, alive)), total(host), held.nvme)


def total(many: Iterable[Parts]) -> dict[str, int]:
    """Add parts up by name."""
    sums: dict[str, int] = {}
    for parts in many:
        for name, count in parts.items():
            sums[name] = sums.get(name, 0) + count
    return sums
