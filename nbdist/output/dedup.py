"""Merges equal output of several ranks, so that it is shown once.

Each rank has a queue of items. An item waits briefly for equal items of the other ranks and is then
emitted together with them. The order of a rank's items is kept, except that stdout and stderr items
may pass each other to reach an equal item. Ranks with equal queues share one queue, so equal output
of a thousand ranks costs as much as that of a few.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

T = TypeVar("T")

_MAX_OVERTAKEN = 16
"""Number of items of the other stream that an item may pass to reach an equal item."""
_REORDER_WINDOW_S = 0.1
"""Items that arrive within this time are emitted in rank order."""


@dataclass(frozen=True, slots=True)
class OutputItem(Generic[T]):
    """One piece of a rank's output."""

    key: Hashable
    """Equal for equal output."""
    stream: str
    """"stdout", "stderr", or "" for an item that no other item may pass."""
    arrived_at: float
    """Arrival time in monotonic seconds."""
    merge_delay_s: float
    """Maximum wait for the other ranks."""
    content: T


@dataclass(slots=True, eq=False)
class _RankQueue(Generic[T]):
    """A queue shared by ranks with the same pending items."""

    ranks: frozenset[int]
    queue: deque[OutputItem[T]] = field(default_factory=deque)
    keys: Counter[Hashable] = field(default_factory=Counter)
    first: int = field(init=False)
    """The lowest rank."""

    def __post_init__(self) -> None:
        self.first = min(self.ranks)

    def split_off(self, ranks: frozenset[int]) -> _RankQueue[T]:
        """Move some of the ranks to a copy of the queue."""
        self.ranks -= ranks
        self.first = min(self.ranks)
        return _RankQueue(ranks, self.queue.copy(), self.keys.copy())


class OutputMerger(Generic[T]):
    """Queues of several ranks, and the order in which their items are emitted."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._all = tuple(sorted(ranks))
        whole: _RankQueue[T] = _RankQueue(frozenset(ranks))
        self._rank_queues = [whole]
        """In the order of their lowest ranks."""
        self._queue_by_rank = dict.fromkeys(ranks, whole)
        self._owners: Counter[Hashable] = Counter()
        """Number of ranks with an item of this key."""

    def add_items(self, ranks: Collection[int], items: Sequence[OutputItem[T]]) -> None:
        """Append items to the queue of each of these ranks."""
        for strand in self._queues_for(frozenset(ranks)) if items else ():
            strand.queue.extend(items)
            for item in items:
                if item.key not in strand.keys:
                    self._owners[item.key] += len(strand.ranks)
                strand.keys[item.key] += 1

    def has_items(self, rank: int) -> bool:
        """Return whether the rank has pending items."""
        return bool(self._queue_by_rank[rank].queue)

    def pop_ready(self, now: float, *, final: bool = False) -> Iterator[tuple[tuple[int, ...], T]]:
        """Yield the items that need not wait any longer, as (ranks, content).

        Args:
            now: monotonic seconds.
            final: emit everything without waiting.
        """
        while candidate := self._next(now, final=final):
            strand, ready = candidate
            item = strand.queue[0]
            yield self._take(strand, ready)
            while not ready and self._follows(item, strand):  # no other item can be due in between
                yield self._take(strand, {})
        self._unite()

    def _queues_for(self, ranks: frozenset[int]) -> list[_RankQueue[T]]:
        """Queues of exactly these ranks; queues shared with other ranks are split."""
        strands = []
        for strand in {self._queue_by_rank[rank]: None for rank in ranks}:
            if strand.ranks <= ranks:
                strands.append(strand)
            else:
                part = strand.split_off(strand.ranks & ranks)
                self._rank_queues.append(part)
                self._queue_by_rank.update(dict.fromkeys(part.ranks, part))
                strands.append(part)
        self._rank_queues.sort(key=lambda strand: strand.first)
        return strands

    def _unite(self) -> None:
        """Merge the empty queues into one."""
        empty = [strand for strand in self._rank_queues if not strand.queue]
        if len(empty) > 1:
            united: _RankQueue[T] = _RankQueue(frozenset().union(*(queue.ranks for queue in empty)))
            self._rank_queues = [united, *(strand for strand in self._rank_queues if strand.queue)]
            self._rank_queues.sort(key=lambda strand: strand.first)
            self._queue_by_rank.update(dict.fromkeys(united.ranks, united))

    def _next(
        self, now: float, *, final: bool
    ) -> tuple[_RankQueue[T], dict[_RankQueue[T], int]] | None:
        """The next queue whose head can be emitted, and the queues and indices of equal items."""
        for strand in self._heads():
            item = strand.queue[0]
            due = final or now - item.arrived_at >= item.merge_delay_s
            if not due and self._owners[item.key] < len(self._all):
                continue  # some rank does not have the item
            ready, behind = self._others(strand)
            if len(strand.ranks) + sum(len(other.ranks) for other in ready) == len(self._all):
                return strand, ready
            if due:
                return self._released([strand], behind)
        return None

    def _follows(self, before: OutputItem[T], strand: _RankQueue[T]) -> bool:
        """True if the head arrived with the previous item and no other rank has an equal item."""
        if not strand.queue:
            return False
        item = strand.queue[0]
        is_same_kind = (item.arrived_at, item.merge_delay_s, item.stream) == (
            before.arrived_at,
            before.merge_delay_s,
            before.stream,
        )
        return is_same_kind and self._owners[item.key] == len(strand.ranks)

    def _heads(self) -> list[_RankQueue[T]]:
        """Non-empty queues: oldest head first, simultaneous ones in rank order."""
        strands = [strand for strand in self._rank_queues if strand.queue]
        oldest = min((strand.queue[0].arrived_at for strand in strands), default=0.0)
        return sorted(
            strands,
            key=lambda each: (
                max(0.0, each.queue[0].arrived_at - oldest - _REORDER_WINDOW_S),
                each.first,
            ),
        )

    def _others(
        self, strand: _RankQueue[T]
    ) -> tuple[dict[_RankQueue[T], int], list[_RankQueue[T]]]:
        """Queues in which the equal item is reachable (with its index), and where it is not yet."""
        item = strand.queue[0]
        ready: dict[_RankQueue[T], int] = {}
        behind: list[_RankQueue[T]] = []
        if self._owners[item.key] == len(strand.ranks):
            return ready, behind
        for other in self._rank_queues:
            if other is strand or item.key not in other.keys:
                continue
            index = _find_item(other, item)
            if index is None:
                behind.append(other)
            else:
                ready[other] = index
        return ready, behind

    def _released(
        self, path: list[_RankQueue[T]], behind: list[_RankQueue[T]]
    ) -> tuple[_RankQueue[T], dict[_RankQueue[T], int]]:
        """Resolve what blocks the head of path[-1]: items before equal ones are emitted first."""
        if not behind:
            return path[-1], self._others(path[-1])[0]
        for other in behind:
            if other not in path:
                return self._released([*path, other], self._others(other)[1])
        # Deadlock (A B here, B A there): emit the item with the most distant equal item alone.
        strand = max(path, key=self._depth)
        return strand, self._others(strand)[0]

    def _depth(self, strand: _RankQueue[T]) -> int:
        key = strand.queue[0].key
        depths = [
            next(index for index, item in enumerate(other.queue) if item.key == key)
            for other in self._rank_queues
            if other is not strand and key in other.keys
        ]
        return max(depths, default=0)

    def _take(
        self, strand: _RankQueue[T], ready: dict[_RankQueue[T], int]
    ) -> tuple[tuple[int, ...], T]:
        content = strand.queue[0].content
        ranks = strand.ranks.union(*(other.ranks for other in ready))
        for each, index in {strand: 0, **ready}.items():
            key = each.queue[index].key
            del each.queue[index]
            each.keys[key] -= 1
            if not each.keys[key]:
                del each.keys[key]
                self._owners[key] -= len(each.ranks)
                if not self._owners[key]:
                    del self._owners[key]
        return self._all if len(ranks) == len(self._all) else tuple(sorted(ranks)), content


def _find_item(strand: _RankQueue[T], item: OutputItem[T]) -> int | None:
    """Index of an equal item that may be emitted now."""
    for index, other in enumerate(strand.queue):
        if other.key == item.key:
            return index
        if (
            index >= _MAX_OVERTAKEN
            or "" in (item.stream, other.stream)
            or other.stream == item.stream
        ):
            return None
    return None
