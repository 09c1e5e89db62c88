"""Equal output of several ranks, shown once.

Pure; used by the renderer alone. Each rank has a queue of items; an item waits a moment for
the other ranks to bring the same one, then it leaves with those that have it. The order of
a rank's items is kept, except that stdout and stderr may pass each other to meet a twin.
Ranks of which the same is held share one queue: what a thousand ranks print alike costs as
much as what a few do.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

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


@dataclass(slots=True, eq=False)
class _Strand(Generic[T]):
    """Ranks of which the same is held."""

    ranks: frozenset[int]
    queue: deque[Item[T]] = field(default_factory=deque)
    keys: Counter[Hashable] = field(default_factory=Counter)
    first: int = field(init=False)
    """The lowest of the ranks."""

    def __post_init__(self) -> None:
        self.first = min(self.ranks)

    def part(self, ranks: frozenset[int]) -> _Strand[T]:
        """Give some of the ranks a queue of their own."""
        self.ranks -= ranks
        self.first = min(self.ranks)
        return _Strand(ranks, self.queue.copy(), self.keys.copy())


class Merge(Generic[T]):
    """Queues of several ranks, and the order in which their items leave."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._all = tuple(sorted(ranks))
        whole: _Strand[T] = _Strand(frozenset(ranks))
        self._strands = [whole]
        """In the order of their first ranks."""
        self._of = dict.fromkeys(ranks, whole)
        self._owners: Counter[Hashable] = Counter()
        """How many ranks have an item of this key."""

    def put(self, ranks: Collection[int], items: Sequence[Item[T]]) -> None:
        """Append items to the queue of each of these ranks."""
        for strand in self._of_these(frozenset(ranks)) if items else ():
            strand.queue.extend(items)
            for item in items:
                if item.key not in strand.keys:
                    self._owners[item.key] += len(strand.ranks)
                strand.keys[item.key] += 1

    def waiting(self, rank: int) -> bool:
        """Whether items of the rank have not left yet."""
        return bool(self._of[rank].queue)

    def leave(self, now: float, *, final: bool = False) -> Iterator[tuple[tuple[int, ...], T]]:
        """Take what need not wait any longer, as (ranks, content).

        Args:
            now: monotonic seconds.
            final: wait for nobody.
        """
        while found := self._next(now, final=final):
            strand, ready = found
            item = strand.queue[0]
            yield self._take(strand, ready)
            while not ready and self._follows(item, strand):  # nobody else's turn can have come
                yield self._take(strand, {})
        self._unite()

    def _of_these(self, ranks: frozenset[int]) -> list[_Strand[T]]:
        """The strands of these ranks and of no others."""
        found = []
        for strand in {self._of[rank]: None for rank in ranks}:
            if strand.ranks <= ranks:
                found.append(strand)
            else:
                part = strand.part(strand.ranks & ranks)
                self._strands.append(part)
                self._of.update(dict.fromkeys(part.ranks, part))
                found.append(part)
        self._strands.sort(key=lambda strand: strand.first)
        return found

    def _unite(self) -> None:
        """Let ranks of which nothing is held share a queue again."""
        empty = [strand for strand in self._strands if not strand.queue]
        if len(empty) > 1:
            united: _Strand[T] = _Strand(frozenset().union(*(one.ranks for one in empty)))
            self._strands = [united, *(strand for strand in self._strands if strand.queue)]
            self._strands.sort(key=lambda strand: strand.first)
            self._of.update(dict.fromkeys(united.ranks, united))

    def _next(self, now: float, *, final: bool) -> tuple[_Strand[T], dict[_Strand[T], int]] | None:
        """A strand whose head leaves, and those where its twin does."""
        for strand in self._heads():
            item = strand.queue[0]
            due = final or now - item.at >= item.hold_s
            if not due and self._owners[item.key] < len(self._all):
                continue  # some rank has none
            ready, behind = self._others(strand)
            if len(strand.ranks) + sum(len(one.ranks) for one in ready) == len(self._all):
                return strand, ready
            if due:
                return self._released([strand], behind)
        return None

    def _follows(self, before: Item[T], strand: _Strand[T]) -> bool:
        """Whether a strand's head came with the one before it, alike, and nobody has a twin."""
        if not strand.queue:
            return False
        item = strand.queue[0]
        alike = (item.at, item.hold_s, item.lane) == (before.at, before.hold_s, before.lane)
        return alike and self._owners[item.key] == len(strand.ranks)

    def _heads(self) -> list[_Strand[T]]:
        """Strands that hold something: the older head first, together by rank."""
        strands = [strand for strand in self._strands if strand.queue]
        oldest = min((strand.queue[0].at for strand in strands), default=0.0)
        return sorted(
            strands, key=lambda one: (max(0.0, one.queue[0].at - oldest - _TOGETHER_S), one.first)
        )

    def _others(self, strand: _Strand[T]) -> tuple[dict[_Strand[T], int], list[_Strand[T]]]:
        """Strands where the head's twin can be taken (and its index), and where it is deeper."""
        item = strand.queue[0]
        ready: dict[_Strand[T], int] = {}
        behind: list[_Strand[T]] = []
        if self._owners[item.key] == len(strand.ranks):
            return ready, behind
        for other in self._strands:
            if other is strand or item.key not in other.keys:
                continue
            index = _reach(other, item)
            if index is None:
                behind.append(other)
            else:
                ready[other] = index
        return ready, behind

    def _released(
        self, path: list[_Strand[T]], behind: list[_Strand[T]]
    ) -> tuple[_Strand[T], dict[_Strand[T], int]]:
        """Make way for the head of path[-1]: what stands before its twins goes first."""
        if not behind:
            return path[-1], self._others(path[-1])[0]
        for other in behind:
            if other not in path:
                return self._released([*path, other], self._others(other)[1])
        # Crossed: A B here, B A there. The one whose twin is farther away goes alone.
        strand = max(path, key=self._depth)
        return strand, self._others(strand)[0]

    def _depth(self, strand: _Strand[T]) -> int:
        key = strand.queue[0].key
        found = [
            next(i for i, item in enumerate(other.queue) if item.key == key)
            for other in self._strands
            if other is not strand and key in other.keys
        ]
        return max(found, default=0)

    def _take(self, strand: _Strand[T], ready: dict[_Strand[T], int]) -> tuple[tuple[int, ...], T]:
        content = strand.queue[0].content
        ranks = strand.ranks.union(*(one.ranks for one in ready))
        for one, index in {strand: 0, **ready}.items():
            key = one.queue[index].key
            del one.queue[index]
            one.keys[key] -= 1
            if not one.keys[key]:
                del one.keys[key]
                self._owners[key] -= len(one.ranks)
                if not self._owners[key]:
                    del self._owners[key]
        return self._all if len(ranks) == len(self._all) else tuple(sorted(ranks)), content


def _reach(strand: _Strand[T], item: Item[T]) -> int | None:
    """Index of an equal item that can leave the queue now."""
    for index, other in enumerate(strand.queue):
        if other.key == item.key:
            return index
        if index >= _PASS or "" in (item.lane, other.lane) or other.lane == item.lane:
            return None
    return None
