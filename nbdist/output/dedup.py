"""Merges equal output of several ranks, so that it is passed on once.

Each rank has a queue of items. An item waits briefly for equal items of the other ranks and then
leaves together with them. The order of a rank's items is kept, except that stdout and stderr items
may pass each other to reach an equal item.

The kernel merges the lines of a cell, the agent of a node the messages of its ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

T = TypeVar("T")

StreamName = Literal["stdout", "stderr"]
ItemStream = Literal["stdout", "stderr", ""]
"""Stream of text; "" for an item that no other item may pass."""
MimeBundle = dict[str, Any]

MERGE_DELAY_S = 0.15
"""Maximum wait of a line for the same line of the other ranks."""
_MAX_OVERTAKEN = 16
"""Number of items of the other stream that an item may pass to reach an equal item."""
_REORDER_WINDOW_S = 0.1
"""Items that arrive within this time leave in rank order."""


@dataclass(frozen=True, slots=True)
class OutputItem(Generic[T]):
    """One piece of a rank's output; all stages from the ranks to the cell pass such items on."""

    content: T
    arrived_at: float
    """Arrival time in monotonic seconds."""
    stream: ItemStream = ""
    key: Hashable = None
    """Equal for equal output. Set by the stage before the merge."""
    merge_delay_s: float = MERGE_DELAY_S
    """Maximum wait for the other ranks."""


@dataclass(frozen=True, slots=True)
class DisplayOutput:
    """A MIME bundle; its `display_id` contains the rank."""

    bundle: MimeBundle
    metadata: MimeBundle
    display_id: str | None = None


@dataclass(frozen=True, slots=True)
class ClearOutput:
    """A rank's `clear_output(wait)`."""

    wait: bool


class OutputMerger(Generic[T]):
    """Queues of several ranks, and the order in which their items leave."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._queues: dict[int, deque[OutputItem[T]]] = {rank: deque() for rank in sorted(ranks)}
        self._owners: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
        """For each key the ranks that have such items, with their number."""

    def add_items(self, ranks: Collection[int], items: Sequence[OutputItem[T]]) -> None:
        """Append items to the queue of each of these ranks."""
        for item in items:
            owners = self._owners[item.key]
            for rank in ranks:
                self._queues[rank].append(item)
                owners[rank] += 1

    def has_items(self, rank: int) -> bool:
        """Return whether the rank has pending items."""
        return bool(self._queues[rank])

    @property
    def next_due_at(self) -> float | None:
        """Time at which the next item need not wait any longer; None without items."""
        heads = (queue[0] for queue in self._queues.values() if queue)
        return min((item.arrived_at + item.merge_delay_s for item in heads), default=None)

    def pop_ready(
        self, now: float, *, final: bool = False
    ) -> Iterator[tuple[tuple[int, ...], OutputItem[T]]]:
        """Yield the items that need not wait any longer, with their ranks.

        Args:
            now: monotonic seconds.
            final: all items leave without waiting.
        """
        while positions := self._next(now, final=final):
            rank, index = next(iter(positions.items()))
            item = self._queues[rank][index]
            owners = self._owners[item.key]
            for rank, index in positions.items():
                del self._queues[rank][index]
                owners[rank] -= 1
                if not owners[rank]:
                    del owners[rank]
            if not owners:
                del self._owners[item.key]
            yield tuple(sorted(positions)), item

    def _next(self, now: float, *, final: bool) -> dict[int, int]:
        """Ranks and positions of the next item that leaves; empty if all items have to wait."""
        heads = {rank: queue[0] for rank, queue in self._queues.items() if queue}
        until = min((item.arrived_at for item in heads.values()), default=0.0) + _REORDER_WINDOW_S
        order = [(max(until, item.arrived_at), rank, item) for rank, item in heads.items()]
        seen: set[Hashable] = set()
        for _, rank, item in sorted(order, key=itemgetter(0, 1)):
            due = final or now >= item.arrived_at + item.merge_delay_s
            if not due and (item.key in seen or len(self._owners[item.key]) < len(self._queues)):
                continue  # some rank does not have the item
            seen.add(item.key)
            reachable, blocked = self._find_equal(rank)
            if not due and len(reachable) < len(self._queues):
                continue
            # what stands before the equal items of other ranks leaves first
            path = [rank]
            while blocked:
                following = next((other for other in sorted(blocked) if other not in path), None)
                if following is None:
                    # Deadlock (A B here, B A there): the item with the most distant equal item
                    # leaves without the others.
                    return self._find_equal(max(path, key=self._distance))[0]
                path.append(following)
                reachable, blocked = self._find_equal(following)
            return reachable
        return {}

    def _find_equal(self, rank: int) -> tuple[dict[int, int], list[int]]:
        """Find the items equal to the head of a rank's queue.

        Returns:
            Positions of those that may leave now, by rank, and the other ranks that have one.
        """
        head = self._queues[rank][0]
        reachable, blocked = {rank: 0}, []
        for other in self._owners[head.key]:
            if other == rank:
                continue
            for index, item in enumerate(self._queues[other]):
                if item.key == head.key:
                    reachable[other] = index
                    break
                passes = "" not in (head.stream, item.stream) and head.stream != item.stream
                if index >= _MAX_OVERTAKEN or not passes:
                    blocked.append(other)
                    break
        return reachable, blocked

    def _distance(self, rank: int) -> int:
        """Largest position of an item that is equal to the head of a rank's queue."""
        key = self._queues[rank][0].key
        return max(
            next(index for index, item in enumerate(self._queues[other]) if item.key == key)
            for other in self._owners[key]
        )
