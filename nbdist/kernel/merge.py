"""Equal output of several ranks, shown once.

Pure; used by the renderer alone. Each rank has a queue of items; an item waits a moment for
the other ranks to bring the same one, then it leaves with those that have it. The order of
a rank's items is kept, except that stdout and stderr may pass each other to meet a twin.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

T = TypeVar("T")

_PASS = 16
"""How many items of the other stream an item may pass to meet its twin."""
_TOGETHER_S = 0.1
"""Items that arrive within this time leave in the order of their ranks."""


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """One piece of one rank's output."""

    key: Hashable
    """Equal for equal output."""
    lane: str
    """"stdout", "stderr", or "" for what no other item may pass."""
    at: float
    """Arrival, monotonic seconds."""
    hold_s: float
    """How long it waits for the other ranks."""
    content: T


class Merge(Generic[T]):
    """Queues of several ranks, and the order in which their items leave."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._queues: dict[int, deque[Item[T]]] = {rank: deque() for rank in ranks}
        self._keys: dict[int, Counter[Hashable]] = {rank: Counter() for rank in ranks}
        self._owners: Counter[Hashable] = Counter()
        """How many ranks have an item of this key."""

    def put(self, rank: int, item: Item[T]) -> None:
        """Append an item to a rank's queue."""
        self._queues[rank].append(item)
        keys = self._keys[rank]
        self._owners[item.key] += item.key not in keys
        keys[item.key] += 1

    def waiting(self, rank: int) -> bool:
        """Whether items of the rank have not left yet."""
        return bool(self._queues[rank])

    def leave(self, now: float, *, final: bool = False) -> Iterator[tuple[tuple[int, ...], T]]:
        """Take what need not wait any longer, as (ranks, content).

        Args:
            now: monotonic seconds.
            final: wait for nobody.
        """
        while group := self._next(now, final=final):
            yield group

    def _next(self, now: float, *, final: bool) -> tuple[tuple[int, ...], T] | None:
        for at, rank in self._heads():
            item = self._queues[rank][0]
            due = final or now - at >= item.hold_s
            if not due and self._owners[item.key] < len(self._queues):
                continue  # some rank has none
            ready, behind = self._others(rank)
            if len(ready) + 1 == len(self._queues):
                return self._take(rank, ready)
            if due:
                return self._released([rank], behind)
        return None

    def _heads(self) -> list[tuple[float, int]]:
        """Arrival and rank of each queue's head: the older first, together by rank."""
        heads = [(queue[0].at, rank) for rank, queue in self._queues.items() if queue]
        oldest = min(heads, default=(0.0, 0))[0]
        return sorted(heads, key=lambda head: (max(0.0, head[0] - oldest - _TOGETHER_S), head[1]))

    def _others(self, rank: int) -> tuple[dict[int, int], list[int]]:
        """Ranks where the head's twin can be taken (and its index), and where it is deeper."""
        item = self._queues[rank][0]
        ready: dict[int, int] = {}
        behind: list[int] = []
        for other, keys in self._keys.items():
            if other == rank or item.key not in keys:
                continue
            index = self._reach(other, item)
            if index is None:
                behind.append(other)
            else:
                ready[other] = index
        return ready, behind

    def _reach(self, rank: int, item: Item[T]) -> int | None:
        """Index of an equal item that can leave the queue now."""
        for index, other in enumerate(self._queues[rank]):
            if other.key == item.key:
                return index
            if index >= _PASS or "" in (item.lane, other.lane) or other.lane == item.lane:
                return None
        return None

    def _released(self, path: list[int], behind: list[int]) -> tuple[tuple[int, ...], T]:
        """Make way for the head of path[-1]: what stands before its twins goes first."""
        if not behind:
            return self._take(path[-1], self._others(path[-1])[0])
        for other in behind:
            if other not in path:
                return self._released([*path, other], self._others(other)[1])
        # Crossed: A B here, B A there. The one whose twin is farther away goes alone.
        rank = max(path, key=self._depth)
        return self._take(rank, self._others(rank)[0])

    def _depth(self, rank: int) -> int:
        key = self._queues[rank][0].key
        found = [
            next(i for i, item in enumerate(queue) if item.key == key)
            for other, queue in self._queues.items()
            if other != rank and key in self._keys[other]
        ]
        return max(found, default=0)

    def _take(self, rank: int, ready: dict[int, int]) -> tuple[tuple[int, ...], T]:
        content = self._queues[rank][0].content
        for other, index in {rank: 0, **ready}.items():
            queue, keys = self._queues[other], self._keys[other]
            key = queue[index].key
            del queue[index]
            keys[key] -= 1
            if not keys[key]:
                del keys[key]
                self._owners[key] -= 1
                if not self._owners[key]:
                    del self._owners[key]
        return tuple(sorted({rank, *ready})), content
