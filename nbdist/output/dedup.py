"""Merges equal output of several ranks, so that it is passed on once.

Each rank has a queue of items. An item waits briefly for equal items of the other ranks and then
leaves together with them. The order of a rank's items is kept, except that stdout and stderr items
may pass each other to reach an equal item.

The kernel merges the lines of a cell, the agent of a node the messages of its ranks.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from jupyter_client.session import DELIM

from nbdist.protocol.signing import MessageSigner

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

    RankMessage = tuple[list[bytes], Hashable, str]
    """Parts of a message; of text also its stream and one line."""

T = TypeVar("T")

StreamName = Literal["stdout", "stderr"]
ItemStream = Literal["stdout", "stderr", ""]
"""Stream of text; "" for an item that no other item may pass."""
MimeBundle = dict[str, Any]

MERGE_DELAY_S = 0.15
"""Maximum wait of a line for the same line of the other ranks."""
MESSAGE_DELAY_S = 0.03
"""Time for which a message is held for other ranks to send the same."""
MAX_BATCH_BYTES = 4 << 20
"""Approximate maximum size of the messages that are sent together."""
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
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


# -- messages, in the agent of a node


@dataclass(slots=True, eq=False)
class _MergedMessage:
    """A message with the ranks that have sent it."""

    ranks: tuple[int, ...]
    parts: list[bytes]
    """Header, parent header, metadata, content and buffers."""
    stream: Hashable
    """Parent header and stream name of text; None for other messages."""
    text: list[str] = field(default_factory=list)


class MessageMerger:
    """Merges equal messages of a node's ranks on one channel, so that each is sent once.

    Text is compared line by line, other messages as a whole. The order of each rank's messages is
    kept. Messages without a valid signature are dropped; all others are signed again.

    Args:
        ranks: the ranks of this node.
        key: signing key of the ranks' messages.
    """

    def __init__(self, ranks: Sequence[int], key: bytes) -> None:
        self._signer = MessageSigner(key=key)
        self._merger: OutputMerger[RankMessage] = OutputMerger(ranks)
        self._numbers = itertools.count()

    @property
    def next_due_at(self) -> float | None:
        """Time at which the next held message must be sent; None if none is held."""
        return self._merger.next_due_at

    def add_message(self, rank: int, frames: list[bytes], now: float) -> bool:
        """Add a message of a rank; return False if it is unsigned, replayed or malformed."""
        try:
            signature, *parts = frames[frames.index(DELIM) + 1 :]
            message = self._signer.deserialize([signature, *parts])
        except Exception:  # noqa: BLE001 - unverified frames can raise anything
            return False
        _, parent, metadata, content, *buffers = parts
        kind, text = message["msg_type"], message["content"].get("text")
        if kind == "stream" and isinstance(text, str):
            stream = parent, message["content"].get("name")
            items: list[OutputItem[RankMessage]] = [
                OutputItem((parts, stream, line), now, "", (stream, line), MESSAGE_DELAY_S)
                for line in _LINE.findall(text)
            ]
        else:
            # the metadata of a reply contains its start time, which is not used
            same = kind, parent, b"" if kind.endswith("_reply") else metadata, content, *buffers
            items = [OutputItem((parts, None, ""), now, "", same, MESSAGE_DELAY_S)]
        self._merger.add_items((rank,), items)
        return True

    def pop_ready(self, now: float) -> list[tuple[tuple[int, ...], list[bytes]]]:
        """Return the messages that need not be held any longer, with their ranks, in order."""
        outgoing: list[_MergedMessage] = []
        last_by_rank: dict[int, _MergedMessage] = {}
        size = 0
        for ranks, item in self._merger.pop_ready(now):
            parts, stream, line = item.content
            last = last_by_rank.get(ranks[0])
            if (
                last is None
                or stream is None
                or (last.ranks, last.stream) != (ranks, stream)
                or any(last_by_rank[rank] is not last for rank in ranks)
            ):
                last = _MergedMessage(ranks, parts, stream)
                outgoing.append(last)
            last_by_rank.update(dict.fromkeys(ranks, last))
            last.text.append(line)
            size += len(line) or sum(map(len, parts))
            if size > MAX_BATCH_BYTES:
                break
        signed = []
        for message in outgoing:
            parts = message.parts
            if message.stream is not None:
                content = {**json.loads(parts[3]), "text": "".join(message.text)}
                # the number makes the signature unique: equal text may leave twice under one header
                number = {"part": next(self._numbers)}
                parts = [*parts[:2], json.dumps(number).encode(), json.dumps(content).encode()]
            signed.append((message.ranks, [DELIM, self._signer.sign(parts[:4]), *parts]))
        return signed
