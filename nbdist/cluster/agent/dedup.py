"""Deduplicates messages of a node's ranks: equal messages are sent to the kernel once.

Runs in the agent, which verifies every signature, so that only messages of ranks are forwarded.
Text is compared line by line, independent of how it is split into messages; other messages are
compared as a whole. The order of each rank's messages per channel is preserved.
"""

from __future__ import annotations

import functools
import hmac
import json
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_client.session import DELIM

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MERGE_DELAY_S = 0.03
"""Time for which a message is held for other ranks to send the same."""
MAX_BATCH_BYTES = 4 << 20
"""Approximate maximum size of a batch."""
MAX_TEXT_CHARS = 1 << 20
"""Approximate maximum length of a rank's queued text."""
MAX_REQUESTS = 1024
MAX_SIGNATURES = 1 << 16
_Kind = tuple[bytes, str]
"""Identifies text: parent header and stream name."""


@dataclass(slots=True, eq=False)
class _QueuedMessage:
    """A queued message that is compared as a whole."""

    head: tuple[object, ...]
    """Comparison key, equal for equal messages."""
    parts: list[bytes]
    request: str
    at: float


@dataclass(slots=True, eq=False)
class _QueuedText:
    """Queued text of a rank for one stream."""

    kind: _Kind
    begin: list[bytes]
    """Header, parent and metadata of the first message."""
    request: str
    text: str = ""
    _ends: deque[tuple[int, float]] = field(default_factory=deque)
    """End position and arrival time of each piece."""
    _num_removed: int = 0

    @property
    def head(self) -> tuple[object, ...]:
        """Comparison key: the stream and the first line."""
        return self.kind, self.text[: self.text.find("\n") + 1] or self.text

    @property
    def at(self) -> float:
        """Arrival time of the first piece."""
        return self._ends[0][1]

    @property
    def open(self) -> bool:
        """True if its line is not terminated yet."""
        return "\n" not in self.text

    def add(self, text: str, at: float) -> None:
        """Append text."""
        self.text += text
        self._ends.append((self._num_removed + len(self.text), at))

    def lines(self, heads: set[tuple[object, ...]], most: int) -> str:
        """Return up to `most` lines; stop before a later line that is another rank's head."""
        end = 0
        for _ in range(most):
            begin, end = end, self.text.find("\n", end) + 1 or len(self.text)
            if begin and (self.kind, self.text[begin:end]) in heads:
                return self.text[:begin]
            if end == len(self.text):
                break
        return self.text[:end]

    def cut(self, length: int) -> None:
        """Remove text from the beginning."""
        self.text = self.text[length:]
        self._num_removed += length
        while self._ends and self._ends[0][0] <= self._num_removed:
            self._ends.popleft()


@dataclass(slots=True, eq=False)
class _MergedMessage:
    """A message with all ranks that have sent it."""

    ranks: list[int]
    parts: list[bytes]
    kind: _Kind | None = None
    text: list[str] = field(default_factory=list)

    def whole(self) -> tuple[tuple[int, ...], list[bytes]]:
        """Return the ranks and the parts of the message."""
        if self.kind is None:
            return tuple(self.ranks), self.parts
        content = {"name": self.kind[1], "text": "".join(self.text)}
        return tuple(self.ranks), [*self.parts, json.dumps(content).encode()]


class MessageDeduplicator:
    """Queues and merges the messages of one channel.

    Args:
        ranks: the ranks of this node.
        key: signing key.
    """

    def __init__(self, ranks: Sequence[int], key: bytes) -> None:
        self._ranks, self._key = tuple(ranks), key
        self._ranks_by_request: dict[str, tuple[int, ...]] = {}
        """Ranks by request id, oldest first."""
        self._queues: dict[int, deque[_QueuedMessage | _QueuedText]] = {
            rank: deque() for rank in self._ranks
        }
        self._num_received = dict.fromkeys(self._ranks, 0)
        """Number of lines and messages that each rank has sent since its last request."""
        self._num_forwarded = dict.fromkeys(self._ranks, 0)
        """Number of these that were forwarded."""
        self._seen: dict[bytes, None] = {}
        """Signatures, oldest first, to reject replayed messages."""

    def record_request(self, ranks: Sequence[int], frames: list[bytes]) -> None:
        """Record the ranks that receive a request: their replies may be equal."""
        try:
            request = json.loads(frames[frames.index(DELIM) + 2])["msg_id"]
        except (ValueError, LookupError, TypeError):
            return
        self._ranks_by_request[request] = tuple(ranks)
        for rank in ranks:
            self._num_received[rank] -= self._num_forwarded[rank]
            self._num_forwarded[rank] = 0
        if len(self._ranks_by_request) > MAX_REQUESTS:
            del self._ranks_by_request[next(iter(self._ranks_by_request))]

    def add_message(self, rank: int, frames: list[bytes], now: float) -> bool:
        """Add a message of a rank; return False if it is unsigned or replayed."""
        parts = self._checked(frames)
        if parts is None:
            return False
        queue = self._queues[rank]
        try:
            kind, request = str(json.loads(parts[0])["msg_type"]), _request(parts[1])
            content = json.loads(parts[3]) if kind == "stream" else None
            text = None if content is None else (str(content["name"]), str(content["text"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # malformed, but signed: forward it, the kernel reports it
            queue.append(_QueuedMessage((object(),), parts, "", now))
            self._num_received[rank] += 1
            return True
        if text is None:
            # the metadata of a reply holds its start time, which is not used
            metadata = b"" if kind.endswith("_reply") else parts[2]
            queue.append(
                _QueuedMessage((kind, parts[1], metadata, *parts[3:]), parts, request, now)
            )
            self._num_received[rank] += 1
        elif text[1]:
            self._put_text(queue, (parts[1], text[0]), text[1], parts, request, now)
            self._num_received[rank] += text[1].count("\n")
        return True

    def pop_ready(self, now: float) -> list[tuple[tuple[int, ...], list[bytes]]]:
        """Remove and return the messages that are ready, with their ranks, in order."""
        leaving: list[_MergedMessage] = []
        last: dict[int, _MergedMessage] = {}
        size, most = 0, 1
        while size < MAX_BATCH_BYTES and (ready := self._ready_groups(now)):
            heads = {queue[0].head for queue in self._queues.values() if queue}
            for ranks in ready:
                size += self._forward_common(ranks, leaving, last, heads=heads, most=most)
            # the next line may be equal on other ranks, less likely after many unequal ones
            most = most * 2 if all(len(ranks) == 1 for ranks in ready) else 1
        return [message.whole() for message in leaving]

    @property
    def next_deadline(self) -> float | None:
        """Time at which the next held message must be sent; None if none is held."""
        heads = (queue[0].at for queue in self._queues.values() if queue)
        return min((at + MERGE_DELAY_S for at in heads), default=None)

    def _checked(self, frames: list[bytes]) -> list[bytes] | None:
        """Return the parts of a message; None if its signature is invalid or was seen before."""
        try:
            at = frames.index(DELIM) + 1
            signature, header, parent, metadata, content, *buffers = frames[at:]
        except ValueError:
            return None
        parts = [header, parent, metadata, content]
        expected = hmac.digest(self._key, b"".join(parts), "sha256").hex().encode()
        if not hmac.compare_digest(signature, expected) or signature in self._seen:
            return None
        self._seen[signature] = None
        if len(self._seen) > MAX_SIGNATURES:
            del self._seen[next(iter(self._seen))]
        return parts + buffers

    @staticmethod
    def _put_text(
        queue: deque[_QueuedMessage | _QueuedText],
        kind: _Kind,
        text: str,
        parts: list[bytes],
        request: str,
        now: float,
    ) -> None:
        """Append text to the rank's last queued text if it is for the same stream."""
        last = queue[-1] if queue else None
        if (
            not isinstance(last, _QueuedText)
            or last.kind != kind
            or len(last.text) > MAX_TEXT_CHARS
        ):
            last = _QueuedText(kind, parts[:3], request)
            queue.append(last)
        last.add(text, now)

    def _ready_groups(self, now: float) -> list[list[int]]:
        """Return groups of ranks whose next messages are equal and need not be held longer."""
        ready = []
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank, queue in self._queues.items():
            if queue:
                alike.setdefault(queue[0].head, []).append(rank)
        least: dict[str, float] = {}
        """By request: the smallest count among the awaited ranks whose queues are empty."""
        for ranks in alike.values():
            items = [self._queues[rank][0] for rank in ranks]
            request = items[0].request
            if request not in least:
                awaited = self._ranks_by_request.get(request, self._ranks)
                silent = (self._num_received[rank] for rank in awaited if not self._queues[rank])
                least[request] = min(silent, default=math.inf)
            settled = not any(self._has_open_line(rank) for rank in ranks)
            turn = min(self._num_forwarded[rank] for rank in ranks)
            due = now >= min(item.at for item in items) + MERGE_DELAY_S
            if due or (settled and least[request] > turn):
                ready.append(ranks)
        return ready

    def _has_open_line(self, rank: int) -> bool:
        """Return True if the rank's open line may still be continued."""
        queue = self._queues[rank]
        return len(queue) == 1 and isinstance(queue[0], _QueuedText) and queue[0].open

    def _forward_common(
        self,
        ranks: list[int],
        leaving: list[_MergedMessage],
        last: dict[int, _MergedMessage],
        *,
        heads: set[tuple[object, ...]],
        most: int,
    ) -> int:
        """Forward the common beginning of these ranks' queues; return its size.

        Args:
            ranks: ranks whose first queued messages are equal.
            leaving: messages to send; extended here.
            last: for each rank its last message in `leaving`.
            heads: comparison keys of all queues: text of a single rank is cut before one.
            most: maximum number of lines of a single rank.
        """
        first = self._queues[ranks[0]][0]
        if isinstance(first, _QueuedMessage):
            for rank in ranks:
                self._queues[rank].popleft()
                self._num_forwarded[rank] += 1
            leaving.append(_MergedMessage(ranks, first.parts))
            last.update(dict.fromkeys(ranks, leaving[-1]))
            return sum(map(len, first.parts))
        text = self._common_lines(ranks) if len(ranks) > 1 else first.lines(heads, most)
        self._remove_text(ranks, text)
        message = last.get(ranks[0])
        follows = message is not None and message.kind == first.kind and message.ranks == ranks
        if message is None or not follows or any(last.get(rank) is not message for rank in ranks):
            message = _MergedMessage(ranks, first.begin, first.kind)
            leaving.append(message)
            last.update(dict.fromkeys(ranks, message))
        message.text.append(text)
        return len(text)

    def _common_lines(self, ranks: list[int]) -> str:
        """Return the lines that the text of all these ranks starts with."""
        texts = (
            item.text for rank in ranks if isinstance(item := self._queues[rank][0], _QueuedText)
        )
        shared = _common_prefix(texts)
        return shared[: shared.rfind("\n") + 1] or shared

    def _remove_text(self, ranks: Iterable[int], text: str) -> None:
        """Remove text from the beginning of these ranks' queues."""
        lines = text.count("\n")
        for rank in ranks:
            queue = self._queues[rank]
            item = queue[0]
            self._num_forwarded[rank] += lines
            if isinstance(item, _QueuedText):
                item.cut(len(text))
                if not item.text:
                    queue.popleft()


def _common_prefix(texts: Iterable[str]) -> str:
    """Return the common prefix of all texts."""
    texts = iter(texts)
    shared = next(texts)
    for text in texts:
        if not text.startswith(shared):
            low, high = 0, min(len(shared), len(text))
            while low < high:
                middle = (low + high + 1) // 2
                if text.startswith(shared[:middle]):
                    low = middle
                else:
                    high = middle - 1
            shared = shared[:low]
    return shared


@functools.lru_cache(maxsize=64)
def _request(parent: bytes) -> str:
    """Id of the request that a message belongs to; "" without one."""
    return str(json.loads(parent).get("msg_id", ""))
